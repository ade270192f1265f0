"""What rows and curves say beyond single figures: several starts as one line with a band, and counts as bars.

A histogram is rows of the metric `staleness` with a number `behind` in their key: how far behind gradients
were. A row's samples are how many were exactly that far behind, one sample for each start. They are shown in
classes as wide as the reader needs, and never compared: one such count is neither better nor worse. `plots`
draws both.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.schema import Curve, Report, Row, is_number
from shoal.report.statistics import mean_of

# --- along an axis ---

MAX_POINTS = 400
"""Of one line; more are thinned evenly."""
WORKERS = "num_workers"
"""The axis of a prediction for other numbers of workers, which belongs to the rows of that metric."""

_AXES = {"seconds_to_target": "s", "bytes_to_target": "bytes", "steps_to_target": "step"}

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
    """Draw all starts as one line; None where none has a point on that axis.

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
    columns = [[start[index] for start in starts] for index in evenly(len(starts[0]), MAX_POINTS)]
    values = [[value for _, value in column] for column in columns]
    return Line(
        x=[mean_of([float(x) for x, _ in column]) for column in columns],
        mean=[mean_of(column) for column in values],
        low=[min(column) for column in values],
        high=[max(column) for column in values],
        num_starts=len(starts),
    )


def resolution_of(report: Report, row: Row) -> float:
    """How coarsely a figure was measured; 0 where the report does not tell.

    What was counted until a target was reached is as coarse as the curve of the same key is; of scores the
    benchmark says it in its result.
    """
    axis = _AXES.get(row.metric)
    if axis is None:
        told = report.result.get("resolution", {})
        return float(told.get(row.metric, 0.0)) if isinstance(told, dict) else 0.0
    return max((spacing(curve, axis) for curve in report.curves if curve.key == row.key), default=0.0)


def spacing(curve: Curve, axis: str) -> float:
    """How far apart its points are on an axis, on average; 0 where there are no two."""
    starts = [points[axis] for points in curve.starts if len(points.get(axis, ())) > 1]
    return mean_of([(max(xs) - min(xs)) / (len(xs) - 1) for xs in starts]) if starts else 0.0


def evenly(count: int, most: int) -> list[int]:
    """Choose at most so many of `count` places, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return list({round(index * (count - 1) / (most - 1)): True for index in range(most)})


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


# --- how far behind ---

STALENESS, BEHIND = "staleness", "behind"
BAR_WIDTH = 40
"""Characters of the longest bar of a text."""
MAX_TEXT_BARS = 16
MAX_COUNT = 2**53
"""A larger float is no count: it has no units digit."""


@dataclass(frozen=True)
class Histogram:
    """How many there were in each class, by its least; all classes are equally wide."""

    counts: dict[int, float]
    width: int = 1

    @property
    def total(self) -> float:
        """Sums the counts of all classes."""
        return sum(self.counts.values())

    def most(self, share: float) -> int:
        """How far behind so large a share were at most."""
        sums = zip(self.counts, itertools.accumulate(self.counts.values()), strict=True)
        least = next((behind for behind, count in sums if count >= share * self.total * (1 - 1e-12)), 0)
        return least + self.width - 1

    def name(self, behind: int) -> str:
        """A class as a person writes it: '3', '10 to 19', 'ahead'."""
        if self.is_ahead(behind):
            return "ahead"
        return str(behind) if self.width == 1 else f"{behind} to {behind + self.width - 1}"

    def is_ahead(self, behind: int) -> bool:
        """Whether a class, by its least, is of what came from one that was ahead, which no class counts."""
        return behind < 0

    def said(self) -> str:
        """The bars in one sentence."""
        if self.total == 0:
            return "Nothing was counted."
        last = max(behind for behind, count in self.counts.items() if count > 0) + self.width - 1
        half, most, all_of_them = (max(0, each) for each in (self.most(0.5), self.most(0.95), last))
        ahead = sum(count for behind, count in self.counts.items() if behind < 0)
        also = f" {100 * ahead / self.total:.0f}% came from one that was ahead." if ahead else ""
        return (
            f"Of {self.total:,.0f} half were at most {half} behind, "
            f"95% at most {most}, all at most {all_of_them}.{also}"
        )

    def lines(self) -> list[str]:
        """Draw it as bars of text; the one hundredth that is furthest behind is in one of them."""
        width = class_width(min(self.counts), self.most(0.99), MAX_TEXT_BARS)
        end = self.most(0.99) // width * width + width - 1
        near = {behind: count for behind, count in self.counts.items() if behind <= end}
        far = [count for behind, count in self.counts.items() if behind > end]
        shown = Histogram(near, self.width).in_classes(width)
        bars = {shown.name(behind): count for behind, count in shown.counts.items()}
        if far:
            bars[f"over {end}"] = sum(far)
        longest, size = max(bars.values()), max(map(len, bars))
        lines = []
        for name, count in bars.items():
            bar = "█" * round(BAR_WIDTH * count / longest) if longest else ""
            share = f"{100 * count / self.total:.1f}%" if self.total else "-"
            lines.append(f"{name.rjust(size)}  {share.rjust(6)}  {bar}".rstrip())
        return lines

    def in_classes(self, width: int) -> Histogram:
        """The same in classes of `width`, a multiple of this one's; also of those that have none."""
        counts = dict.fromkeys(range(min(self.counts) // width * width, max(self.counts) + 1, width), 0.0)
        for behind, count in self.counts.items():
            counts[behind // width * width] += count
        return Histogram(counts, width)


def class_width(low: int, high: int, max_classes: int) -> int:
    """The least of 1, 2, 5, 10, 20, … of which at most so many reach from `low` to `high`."""
    width = 1
    for factor in itertools.cycle((2, 2.5, 2)):
        if high // width - low // width < max_classes:
            break
        width = int(width * factor)
    return width


def is_histogram(row: Row) -> bool:
    """Whether a row says how many were so far behind; anything but counts is a figure like others."""
    behind = row.key.get(BEHIND)
    is_count = isinstance(behind, int) and is_number(behind)
    return row.metric == STALENESS and is_count and all(0 <= count <= MAX_COUNT for count in row.samples)


def histogram_of(rows: Sequence[Row]) -> Histogram:
    """Make a histogram of rows that differ in how far behind they are, of all starts together."""
    counts = {int(row.key[BEHIND]): sum(row.samples) for row in rows}
    return Histogram({behind: counts[behind] for behind in sorted(counts)})
