"""Measuring things beside each other: whose turn it is, and what the ratios of neighbours in time say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

CONFIDENCE = 0.95
MIN_WAITED_SHARE = 0.2
"""Of the time, by each who waited; a third slower is a quarter of it."""
CLEARLY_SLOWER = 1.5


def taking_turns(contenders: Sequence[T], num_rounds: int) -> Iterator[T]:
    """Everybody once a round, forwards and backwards in turn: A B C, C B A, A B C, ..."""
    for number in range(num_rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Where the median of what was sampled lies, at least this surely, whatever its distribution.

    Between two order statistics, by the binomial distribution; None where there are too few samples for any
    two to be far enough apart (5 at 95 %).
    """
    count = len(samples)
    outside, depth = 0.0, 0
    while depth < count:
        outside += math.comb(count, depth) / 2**count
        if 2 * outside > 1 - confidence:
            break
        depth += 1
    if depth == 0:
        return None
    ordered = sorted(samples)
    return ordered[depth - 1], ordered[-depth]


def slowest_by_waits(waited_s: Mapping[int, float], measured_s: float) -> int | None:
    """The rank for which the others waited, where it is clearly one and clearly matters.

    `waited_s` is by the rank that was waited for, summed over those who waited; `measured_s` is how long one
    of them was watched.
    """
    if len(waited_s) < 2:
        return None
    first, second = sorted(waited_s, key=lambda rank: waited_s[rank], reverse=True)[:2]
    num_waiting = len(waited_s) - 1
    is_much = waited_s[first] >= MIN_WAITED_SHARE * measured_s * num_waiting
    return first if is_much and waited_s[first] >= 2 * waited_s[second] else None


def slowest_by_times(times_s: Mapping[int, Sequence[float]]) -> tuple[int, float] | None:
    """The rank whose own iterations take clearly longer, and how many times as long as the others'."""
    medians = {rank: statistics.median(times) for rank, times in times_s.items() if times}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda rank: medians[rank])
    others = statistics.median(time_s for rank, time_s in medians.items() if rank != slowest)
    return (slowest, medians[slowest] / others) if medians[slowest] >= CLEARLY_SLOWER * others else None
