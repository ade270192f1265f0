"""Strategies by name: what `shoal run` was asked for, or what code asks for."""

from __future__ import annotations

import importlib
from typing import Any, cast

from shoal.core.run_options import RunOptions
from shoal.group import Group
from shoal.strategies.names import STRATEGIES, resolve
from shoal.strategies.options import OPTIONS
from shoal.strategies.strategy import Strategy

DEFAULT = "all-reduce"


def make_strategy(group: Group, name: str, **options: Any) -> Strategy:
    """A strategy by its name or alias; options given here win over those that an alias implies."""
    strategy, implied = resolve(name)
    module, _, kind = STRATEGIES[strategy].partition(":")
    made = getattr(importlib.import_module(module), kind)(group, **{**implied, **options})
    return cast(Strategy, made)


def from_args(group: Group, *, strategy: str | None = None, **overrides: Any) -> Strategy:
    """What `shoal run --strategy …` was asked for, `all-reduce` without; arguments here win.

    When another strategy is named here, options of the command line that it doesn't have are left out.
    """
    run = RunOptions.from_environment()
    asked = run.strategy or DEFAULT
    name = asked if strategy is None else strategy
    options = {option.replace("-", "_"): value for option, value in run.options.items()}
    chosen = resolve(name)[0]
    if chosen != resolve(asked)[0]:
        known = OPTIONS[chosen].__struct_fields__
        options = {option: value for option, value in options.items() if option in known}
    return make_strategy(group, name, **{**options, **overrides})
