"""Strategies as benchmarks measure them: which are of which kind, and what options they are measured with.

Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.core import UsageError
from shoal.strategies.options import WAITS_FOR_ALL, read_options
from shoal.strategies.registry import canonical, find

NONE = "none"
"""Nothing is attached, and nothing shared: the ceiling."""


def beside_none(named: Iterable[str]) -> tuple[str, ...]:
    """What is measured beside 'none': each that was named once. UsageError where that is nothing."""
    chosen = tuple(name for name in dict.fromkeys(named) if name != NONE)
    if not chosen:
        raise UsageError(
            "There is no strategy to measure beside 'none'.",
            next_step="name one, for example --strategies all-reduce.",
        )
    for name in chosen:
        find(name)
    return chosen


def is_ddp(strategy: str) -> bool:
    """Whether it is torch's own wrapper."""
    return strategy != NONE and canonical(strategy) == "ddp"


def needs_servers(strategy: str) -> bool:
    """Whether there are processes beside the workers."""
    return strategy != NONE and find(strategy)[0].needs_servers


def sends_by_itself(strategy: str) -> bool:
    """Whether what it sends passes its group by, which so can neither count nor slow it."""
    return strategy != NONE and find(strategy)[0].has_own_channel


def is_asynchronous(strategy: str) -> bool:
    """Whether workers meet under none but special options.

    A report may name a strategy from outside that is not here: that counts as one whose workers wait.
    """
    try:
        return strategy != NONE and find(strategy)[0].is_asynchronous
    except UsageError:
        return False


def is_free_running(strategy: str, options: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no worker waits for another, so that each has its own pace; `options` are by strategy."""
    if strategy == NONE:
        return True
    own = options.get(strategy, {})
    has_rounds = any(own.get(name) for name in (*WAITS_FOR_ALL, "force_barrier"))
    has_rounds = has_rounds or own.get("mode", "async") != "async"
    return is_asynchronous(strategy) and not has_rounds


def has_option(strategy: str, option: str) -> bool:
    """Whether the strategy can be told so."""
    return option in find(strategy)[0].options.__struct_fields__


def all_options(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those given, what the strategy's name implies, and its defaults. UsageError for one it hasn't."""
    info, implied = find(strategy)
    read = read_options(info.options, {**implied, **given}, strategy)
    options: dict[str, Any] = msgspec.to_builtins(read)
    return options


def without_defaults(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leave out the options that have their default value: another version of Shoal may not know them."""
    return {
        strategy: {name: value for name, value in own.items() if value != defaults.get(name)}
        for strategy, own in options.items()
        for defaults in [all_options(strategy, {})]
    }


def shares_of(strategies: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each strategy those of the given options that it has; UsageError for one that none of them has."""
    shares = {
        strategy: {option: value for option, value in given.items() if has_option(strategy, option)}
        for strategy in strategies
    }
    for option in given:
        if not any(option in share for share in shares.values()):
            raise UsageError(
                f"None of {', '.join(shares)} has an option {option!r}.",
                next_step="`shoal run --help` names those of each strategy.",
            )
    return shares


def options_of(strategies: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """All options of each strategy, with those given that it has; UsageError for one that none has."""
    return {strategy: all_options(strategy, own) for strategy, own in shares_of(strategies, given).items()}
