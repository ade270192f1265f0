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
    from shoal.strategies.choco import ChocoSGD
    from shoal.strategies.choosing import from_args, make_strategy
    from shoal.strategies.d2 import D2
    from shoal.strategies.ddp import TorchDDP
    from shoal.strategies.diloco import DiLoCo
    from shoal.strategies.exact_diffusion import ExactDiffusion
    from shoal.strategies.extra import Extra
    from shoal.strategies.gradient_tracking import GradientTracking
    from shoal.strategies.hierarchical import HierarchicalAverage
    from shoal.strategies.horovod import HorovodAllReduce
    from shoal.strategies.local_sgd import LocalSGD
    from shoal.strategies.neighbor import NeighborAverage
    from shoal.strategies.neighbor_momentum import NeighborMomentum
    from shoal.strategies.pair import PairAverage
    from shoal.strategies.parameter_server import ParameterServer, StalenessAwareSGD
    from shoal.strategies.push_sum import PushSum
    from shoal.strategies.relay import RelaySGD
    from shoal.strategies.sgp import StochasticGradientPush
    from shoal.strategies.sma import SynchronousModelAverage
    from shoal.strategies.window import WindowAverage

_HOMES = {
    "Attachment": "attachment",
    "ChocoSGD": "choco",
    "D2": "d2",
    "DiLoCo": "diloco",
    "ExactDiffusion": "exact_diffusion",
    "Extra": "extra",
    "GradientAllReduce": "all_reduce",
    "GradientTracking": "gradient_tracking",
    "HierarchicalAverage": "hierarchical",
    "HorovodAllReduce": "horovod",
    "LocalSGD": "local_sgd",
    "NeighborAverage": "neighbor",
    "NeighborMomentum": "neighbor_momentum",
    "PairAverage": "pair",
    "ParameterServer": "parameter_server",
    "PushSum": "push_sum",
    "RelaySGD": "relay",
    "StalenessAwareSGD": "parameter_server",
    "StochasticGradientPush": "sgp",
    "Strategy": "base",
    "SynchronousModelAverage": "sma",
    "TorchDDP": "ddp",
    "WindowAverage": "window",
    "from_args": "choosing",
    "make_strategy": "choosing",
}

__all__ = [
    "ALIASES",
    "D2",
    "OPTIONS",
    "STRATEGIES",
    "WAITS_FOR_ALL",
    "Attachment",
    "ChocoSGD",
    "CommonOptions",
    "DiLoCo",
    "ExactDiffusion",
    "Extra",
    "GradientAllReduce",
    "GradientTracking",
    "HierarchicalAverage",
    "HorovodAllReduce",
    "LocalSGD",
    "NeighborAverage",
    "NeighborMomentum",
    "OptionInfo",
    "PairAverage",
    "ParameterServer",
    "PushSum",
    "RelaySGD",
    "StalenessAwareSGD",
    "StochasticGradientPush",
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
