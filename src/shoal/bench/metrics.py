"""The rows of a benchmark that names its metrics, with their units, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shoal.bench.frame import Measured

Direction = Literal["higher", "lower"]
Metrics = Mapping[str, tuple[str, Direction]]
"""Unit, and what is better, of each."""


def measured(
    metrics: Metrics,
    metric: str,
    key: Mapping[str, Any],
    samples: Sequence[float] = (),
    error: str | None = None,
) -> Measured:
    """A row of one of `metrics`: its samples, or why there are none."""
    unit, direction = metrics[metric]
    return Measured(
        key=dict(key), metric=metric, unit=unit, direction=direction, samples=list(samples), error=error
    )
