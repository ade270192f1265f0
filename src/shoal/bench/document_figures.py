"""How the documents print figures: a mean with 1.96 deviations, iterations, and counts of workers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

_DEVIATIONS = 1.96
"""Of a normal distribution 95 % lie within so many on both sides."""


class Spread(msgspec.Struct, frozen=True):
    """The mean of one figure, and how far most samples are from it."""

    mean: float
    error: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """With the population's deviation, as BlueFog, Horovod and KungFu have it."""
        return cls(statistics.fmean(samples), _DEVIATIONS * statistics.pstdev(samples))

    def __str__(self) -> str:
        return f"{self.mean:.1f} +-{self.error:.1f}"


def iteration_text(number: int, images_per_s: float) -> str:
    """BlueFog's and Horovod's line of one iteration; on a CPU too a worker is a GPU there."""
    return f"Iter #{number}: {images_per_s:.1f} img/sec per GPU"


def workers_text(count: object) -> str:
    """As '1 worker' and '2 workers'."""
    return f"{count} worker{'' if count == 1 else 's'}"
