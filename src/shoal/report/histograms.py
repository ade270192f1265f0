"""How far behind gradients were: rows of the metric `staleness` with a number `behind` in their key, as bars.

A row's samples are how many were exactly that far behind, one sample for each start. They are shown
in classes as wide as the reader needs, and never compared: one such count is neither better nor worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.report.figures import Contest, Figures, Shown, beside_one_another, titled
from shoal.report.schema import Row

METRIC, BEHIND = "staleness", "behind"
BAR_WIDTH = 40
"""Characters of the longest bar of a text."""
MAX_TEXT_BARS = 16
MAX_BARS = 60
"""Of a plot."""
MAX_COUNT = 2**53
"""A larger float is no count: it has no units digit."""


@dataclass(frozen=True)
class Histogram:
    """How many there were in each class, by its least; all classes are equally wide."""

    counts: dict[int, float]
    width: int = 1

    @property
    def total(self) -> float:
        """Of all classes."""
        return sum(self.counts.values())

    def most(self, share: float) -> int:
        """How far behind so large a share were at most."""
        sums = zip(self.counts, itertools.accumulate(self.counts.values()), strict=True)
        least = next((behind for behind, count in sums if count >= share * self.total * (1 - 1e-12)), 0)
        return least + self.width - 1

    def name(self, behind: int) -> str:
        """A class as a person writes it: '3', '10 to 19'."""
        return str(behind) if self.width == 1 else f"{behind} to {behind + self.width - 1}"

    def said(self) -> str:
        """The bars in one sentence."""
        if self.total == 0:
            return "Nothing was counted."
        last = max(behind for behind, count in self.counts.items() if count > 0) + self.width - 1
        return (
            f"Of {self.total:,.0f} half were at most {self.most(0.5)} behind, "
            f"95% at most {self.most(0.95)}, all at most {last}."
        )

    def lines(self) -> list[str]:
        """As bars of text; the one hundredth that is furthest behind is in one of them."""
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
    is_number = isinstance(behind, int) and not isinstance(behind, bool)
    return row.metric == METRIC and is_number and all(0 <= count <= MAX_COUNT for count in row.samples)


def histogram_of(rows: Sequence[Row]) -> Histogram:
    """Of rows that differ in how far behind they are; all starts together."""
    counts = {int(row.key[BEHIND]): sum(row.samples) for row in rows}
    return Histogram({behind: counts[behind] for behind in sorted(counts)})


def histogram_plots(shown: Sequence[Shown], figures: Figures, colours: dict[str, int]) -> str:
    """Bars for each contender, setting and report; '' where no staleness was counted."""
    rows = [(item, row) for item in shown for row in item.report.rows if is_histogram(row) and row.starts]
    if not rows:
        return ""
    contest = Contest((row.key for _, row in rows), aside=(BEHIND,))
    contenders = {contest.contender(row.key): True for _, row in rows}
    found: dict[str, tuple[int, list[Row]]] = {}
    for item, row in rows:
        contender = contest.contender(row.key)
        is_alone = len(contenders) == 1
        colour = item.number if is_alone else colours.setdefault(contender, len(colours))
        names = (item.label, "" if is_alone else contender, contest.setting(row.key))
        title = " · ".join(name for name in names if name)
        found.setdefault(title, (colour, []))[1].append(row)
    parts = [titled(title, _bars(of_one, colour, figures)) for title, (colour, of_one) in found.items()]
    return beside_one_another(*parts)


def _bars(rows: Sequence[Row], colour: int, figures: Figures) -> str:
    exact = histogram_of(rows)
    histogram = exact.in_classes(class_width(min(exact.counts), max(exact.counts), MAX_BARS))
    total = exact.total or 1.0
    plot = figures.place(
        "histogram",
        behind=list(histogram.counts),
        width=histogram.width,
        names=[histogram.name(behind) for behind in histogram.counts],
        counts=list(histogram.counts.values()),
        shares=[100 * count / total for count in histogram.counts.values()],
        colour=colour,
    )
    return f'{plot}<p class="how">{escape(exact.said())}</p>'
