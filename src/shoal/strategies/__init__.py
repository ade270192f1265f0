"""How a group shares what its members learn: the strategies, their options, and the registry of both."""

# Type checkers and editors read `__init__.pyi`, which tools/strategy_files.py writes.

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from shoal.core.run_options import OptionInfo
from shoal.strategies.options import WAITS_FOR_ALL, StrategyOptions, describe_options
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

_HOMES = {
    "Strategy": "shoal.strategies.strategy",
    "TrainingSession": "shoal.strategies.session",
    **{row.location.partition(":")[2]: row.location.partition(":")[0] for row in BUILT_IN.values()},
}
"""Modules that are loaded when one of their names is first used: they need torch."""

__all__ = [
    "BUILT_IN",
    "WAITS_FOR_ALL",
    "OptionInfo",
    "StrategyInfo",
    "StrategyOptions",
    "all_strategies",
    "canonical",
    "describe_options",
    "find",
    "from_args",
    "load_class",
    "make_strategy",
]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
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
    "Attachment": ("shoal.strategies.TrainingSession", lambda: __getattr__("TrainingSession")),
    "CommonOptions": ("shoal.strategies.StrategyOptions", lambda: StrategyOptions),
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
