"""How a group shares what its members learn: the strategies, their options, and the registry of both."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.strategies.options import WAITS_FOR_ALL, OptionInfo, StrategyOptions, describe_options
from shoal.strategies.registry import (
    BUILT_IN,
    StrategyInfo,
    all_strategies,
    canonical,
    find,
    from_args,
    load_class,
    make_strategy,
)

if TYPE_CHECKING:
    from shoal.strategies.all_reduce import GradientAllReduce
    from shoal.strategies.choco import ChocoSGD
    from shoal.strategies.ddp import TorchDDP
    from shoal.strategies.diloco import DiLoCo
    from shoal.strategies.exact_diffusion import D2, ExactDiffusion
    from shoal.strategies.extra import Extra
    from shoal.strategies.gradient_tracking import GradientTracking
    from shoal.strategies.horovod import HorovodAllReduce
    from shoal.strategies.local_sgd import LocalSGD
    from shoal.strategies.neighbor import HierarchicalAverage, NeighborAverage
    from shoal.strategies.neighbor_momentum import NeighborMomentum
    from shoal.strategies.noloco import NoLoCo
    from shoal.strategies.pair import PairAverage
    from shoal.strategies.parameter_server import ParameterServer, StalenessAwareSGD
    from shoal.strategies.relay import RelaySGD
    from shoal.strategies.session import TrainingSession
    from shoal.strategies.sgp import StochasticGradientPush
    from shoal.strategies.sma import SynchronousModelAverage
    from shoal.strategies.sparse_loco import SparseLoCo
    from shoal.strategies.strategy import Strategy
    from shoal.strategies.window import PushSum, WindowAverage

_HOMES = {
    "TrainingSession": "session",
    "ChocoSGD": "choco",
    "D2": "exact_diffusion",
    "DiLoCo": "diloco",
    "ExactDiffusion": "exact_diffusion",
    "Extra": "extra",
    "GradientAllReduce": "all_reduce",
    "GradientTracking": "gradient_tracking",
    "HierarchicalAverage": "neighbor",
    "HorovodAllReduce": "horovod",
    "LocalSGD": "local_sgd",
    "NeighborAverage": "neighbor",
    "NeighborMomentum": "neighbor_momentum",
    "NoLoCo": "noloco",
    "PairAverage": "pair",
    "ParameterServer": "parameter_server",
    "PushSum": "window",
    "RelaySGD": "relay",
    "SparseLoCo": "sparse_loco",
    "StalenessAwareSGD": "parameter_server",
    "StochasticGradientPush": "sgp",
    "Strategy": "strategy",
    "SynchronousModelAverage": "sma",
    "TorchDDP": "ddp",
    "WindowAverage": "window",
}
"""Files that are loaded when one of their names is first used: they need torch."""

__all__ = [
    "BUILT_IN",
    "D2",
    "WAITS_FOR_ALL",
    "ChocoSGD",
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
    "NoLoCo",
    "OptionInfo",
    "PairAverage",
    "ParameterServer",
    "PushSum",
    "RelaySGD",
    "SparseLoCo",
    "StalenessAwareSGD",
    "StochasticGradientPush",
    "Strategy",
    "StrategyInfo",
    "StrategyOptions",
    "SynchronousModelAverage",
    "TorchDDP",
    "TrainingSession",
    "WindowAverage",
    "all_strategies",
    "canonical",
    "describe_options",
    "find",
    "from_args",
    "load_class",
    "make_strategy",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"shoal.strategies.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _FORMER:
        instead, value = _FORMER[name]
        warnings.warn(
            f"shoal.strategies.{name} is now {instead}; the old name goes in a later version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value()
    raise AttributeError(f"module 'shoal.strategies' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_FORMER: dict[str, tuple[str, Callable[[], Any]]] = {
    "StrategyOptions": ("shoal.strategies.StrategyOptions", lambda: StrategyOptions),
    "STRATEGIES": (
        "shoal.strategies.BUILT_IN, which holds rows",
        lambda: {name: row.location for name, row in BUILT_IN.items()},
    ),
    "OPTIONS": (
        "the field `options` of the rows in shoal.strategies.BUILT_IN",
        lambda: {name: row.options for name, row in BUILT_IN.items()},
    ),
    "ALIASES": (
        "the field `aliases` of the rows in shoal.strategies.BUILT_IN",
        lambda: {
            alias: (row.name, dict(row.aliases[alias])) for row in BUILT_IN.values() for alias in row.aliases
        },
    ),
}
"""Names of earlier versions: where each is now, and how its value is made."""
