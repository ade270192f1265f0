"""A figure along an axis: several starts as one line with a band around it. Where it is drawn is `lines`'."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.schema import Curve
from shoal.report.statistics import mean_of

MAX_POINTS = 400
"""Of one line; more are thinned evenly."""
WORKERS = "num_workers"
"""The axis of a prediction for other numbers of workers, which belongs to the rows of that metric."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """The mean over the starts, and the least and largest of them, at each `x`."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    num_starts: int

    @property
    def has_band(self) -> bool:
        """Whether the starts lie apart anywhere."""
        return self.low != self.high


def axes_of(curves: Sequence[Curve]) -> list[str]:
    """The names of all axes, in the order in which they first occur."""
    names = {name: True for curve in curves for points in curve.starts for name in points if name != "value"}
    return list(names)


def averaged(curve: Curve, axis: str) -> Line | None:
    """All starts as one line; None where none has a point on that axis.

    Starts of as many points are averaged point by point, on the axis too: the third evaluation of each.
    Others are read where the one with most points was taken, as far as all of them reach.
    """
    starts = [
        list(zip(points[axis], points["value"], strict=True))
        for points in curve.starts
        if points.get(axis) and points["value"]
    ]
    if not starts:
        return None
    if len({len(start): True for start in starts}) > 1:
        starts = _aligned(starts)
    columns = [[start[index] for start in starts] for index in _kept(len(starts[0]))]
    values = [[value for _, value in column] for column in columns]
    return Line(
        x=[mean_of([float(x) for x, _ in column]) for column in columns],
        mean=[mean_of(column) for column in values],
        low=[min(column) for column in values],
        high=[max(column) for column in values],
        num_starts=len(starts),
    )


def _kept(count: int) -> list[int]:
    if count <= MAX_POINTS:
        return list(range(count))
    return list({round(index * (count - 1) / (MAX_POINTS - 1)): True for index in range(MAX_POINTS)})


def _aligned(starts: list[Points]) -> list[Points]:
    ordered = [sorted(start) for start in starts]
    least, most = max(start[0][0] for start in ordered), min(start[-1][0] for start in ordered)
    longest = max(ordered, key=len)
    grid = [x for x, _ in longest if least <= x <= most]
    return [[(x, _at(start, x)) for x in grid] for start in ordered] if grid else [longest]


def _at(start: Points, x: float) -> float:
    """The value at `x`, on the straight line between its neighbours; `x` is within reach."""
    index = bisect_left(start, x, key=lambda point: point[0])
    after = start[min(index, len(start) - 1)]
    before = start[max(index - 1, 0)]
    if after[0] == before[0] or after[0] <= x:
        return after[1]
    return before[1] + (after[1] - before[1]) * (x - before[0]) / (after[0] - before[0])
