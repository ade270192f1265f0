"""The options of strategies in `shoal bench scaling`: those of BlueFog's throughput page, unless told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.bench.contenders import all_options, shares_of
from shoal.strategies.registry import canonical, find

if TYPE_CHECKING:
    from shoal.bench.scaling import ScalingConfig

_SMALLEST_INNER_OUTER = 3
"""Workers on a machine: one goes outside, and two exchange inside."""


def given_options(strategies: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """For each strategy those of the given options that it has; UsageError for one that none of them has."""
    options = {}
    for strategy, own in shares_of(strategies, given).items():
        read = all_options(strategy, own)
        if own:
            options[strategy] = {name: read[name] for name in own}
    return options


def options_for(strategy: str, config: ScalingConfig, local_sizes: Sequence[int]) -> dict[str, Any]:
    """What the strategy is made with, among machines that have so many workers each."""
    name, implied = canonical(strategy), find(strategy)[1]
    options: dict[str, Any] = {}
    if name in ("neighbor", "hierarchical"):
        is_after = config.is_adapt_then_combine
        options["order"] = "adapt-then-combine" if is_after else "adapt-while-combine"
    if name in ("neighbor", "hierarchical", "window"):
        options["topology"] = _topology(name, local_sizes) if config.is_dynamic else "exponential-2"
    return {**options, **implied, **config.options.get(strategy, {})}


def _topology(strategy: str, local_sizes: Sequence[int]) -> str:
    """One peer in a round, by powers of two."""
    is_even = len(local_sizes) > 1 and min(local_sizes) == max(local_sizes)
    if strategy == "neighbor" and is_even and local_sizes[0] >= _SMALLEST_INNER_OUTER:
        return "inner-outer-exponential"
    return "one-peer-exponential"
