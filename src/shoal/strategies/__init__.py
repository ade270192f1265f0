"""How a group shares what its members learn."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.strategies.names import ALIASES, STRATEGIES, canonical
from shoal.strategies.options import OPTIONS, WAITS_FOR_ALL, CommonOptions, OptionInfo, describe_options

if TYPE_CHECKING:
    from shoal.strategies.all_reduce import GradientAllReduce
    from shoal.strategies.attachment import Attachment
    from shoal.strategies.base import Strategy
    from shoal.strategies.choosing import from_args, make_strategy
    from shoal.strategies.ddp import TorchDDP
    from shoal.strategies.diloco import DiLoCo
    from shoal.strategies.hierarchical import HierarchicalAverage
    from shoal.strategies.horovod import HorovodAllReduce
    from shoal.strategies.local_sgd import LocalSGD
    from shoal.strategies.neighbor import NeighborAverage
    from shoal.strategies.pair import PairAverage
    from shoal.strategies.parameter_server import ParameterServer
    from shoal.strategies.push_sum import PushSum
    from shoal.strategies.sma import SynchronousModelAverage
    from shoal.strategies.window import WindowAverage

_HOMES = {
    "Attachment": "attachment",
    "DiLoCo": "diloco",
    "GradientAllReduce": "all_reduce",
    "HierarchicalAverage": "hierarchical",
    "HorovodAllReduce": "horovod",
    "LocalSGD": "local_sgd",
    "NeighborAverage": "neighbor",
    "PairAverage": "pair",
    "ParameterServer": "parameter_server",
    "PushSum": "push_sum",
    "Strategy": "base",
    "SynchronousModelAverage": "sma",
    "TorchDDP": "ddp",
    "WindowAverage": "window",
    "from_args": "choosing",
    "make_strategy": "choosing",
}

__all__ = [
    "ALIASES",
    "OPTIONS",
    "STRATEGIES",
    "WAITS_FOR_ALL",
    "Attachment",
    "CommonOptions",
    "DiLoCo",
    "GradientAllReduce",
    "HierarchicalAverage",
    "HorovodAllReduce",
    "LocalSGD",
    "NeighborAverage",
    "OptionInfo",
    "PairAverage",
    "ParameterServer",
    "PushSum",
    "Strategy",
    "SynchronousModelAverage",
    "TorchDDP",
    "WindowAverage",
    "canonical",
    "describe_options",
    "from_args",
    "make_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.strategies' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.strategies.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
