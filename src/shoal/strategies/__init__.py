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
    from shoal.strategies.hierarchical import HierarchicalAverage
    from shoal.strategies.neighbor import NeighborAverage
    from shoal.strategies.pair import PairAverage
    from shoal.strategies.sma import SynchronousModelAverage

_HOMES = {
    "Attachment": "attachment",
    "GradientAllReduce": "all_reduce",
    "HierarchicalAverage": "hierarchical",
    "NeighborAverage": "neighbor",
    "PairAverage": "pair",
    "Strategy": "base",
    "SynchronousModelAverage": "sma",
    "TorchDDP": "ddp",
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
    "GradientAllReduce",
    "HierarchicalAverage",
    "NeighborAverage",
    "OptionInfo",
    "PairAverage",
    "Strategy",
    "SynchronousModelAverage",
    "TorchDDP",
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
