"""What is drawn on a page, told from the keys and metrics of its reports; `figures` makes each figure.

Every plot has a place in the markup and an entry in the page's data. A set is what several plots have in
common: the series with their colours, which the reader switches on and off, and a choice (of the axis, of
the row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import msgspec

from shoal.report.curves import (
    BEHIND,
    WORKERS,
    Line,
    averaged,
    axes_of,
    class_width,
    histogram_of,
    is_histogram,
)
from shoal.report.diff import Diff
from shoal.report.figures import (
    NUM_COLOURS,
    PALETTE,
    Chart,
    Figure,
    axis_name,
    changes_figure,
    histogram_figure,
    percentiles_figure,
    quantiles_figure,
    rows_figure,
    samples_figure,
    waits_figure,
)
from shoal.report.schema import Curve, Report, Row, Scalar, is_number, text
from shoal.report.statistics import PERCENTILES, is_known, mean_of, percentile, start_medians
from shoal.report.units import counted
from shoal.report.views import Group, group_of, shared_key
from shoal.report.words import ABSENT, figure_scale, key_label, metric_words, sentence_case

# --- places and sets ---

MAX_SAMPLES = 1200
"""Of one plot of samples; more are thinned evenly in time, which keeps drift within a start visible."""
MIN_SAMPLES = 3
"""So few are all in the overview: a closer look has nothing more to show."""
SHOWN_SERIES = 12
"""More are there to be switched on."""
CONTENDERS = ("contender", "strategy", "method")
"""Entries of a key that name who competes; the others say under which conditions."""


@dataclass(frozen=True)
class Section:
    """A named part of a page: `about` is a sentence that says what it shows and how to read it.

    `key` is what the report calls it.
    """

    name: str
    about: str
    content: str
    key: str = ""


@dataclass(frozen=True)
class Shown:
    """A report on a page: its name there ('' for a single one), the number of its colour, and its file."""

    report: Report
    label: str = ""
    number: int = 0
    source: str = ""


@dataclass
class PageFigures:
    """All plots of one page."""

    plots: list[dict[str, Any]] = field(default_factory=list)
    sets: list[dict[str, Any]] = field(default_factory=list)
    _samples_left: int = 16_000

    @property
    def data(self) -> dict[str, Any]:
        """What `assets/drawing.js` reads; `palette` has the variable of each colour that is to be exchanged.

        A list that several traces have (the steps of all, the values over seconds and over bytes) stands
        once in `lists`; traces have its number as {"list": number}.
        """
        palette = {colour: f"--{name}" for name, colour in PALETTE.items()}
        numbers: dict[bytes, int] = {}
        lists: list[Any] = []

        def once(value: Any) -> Any:
            if not isinstance(value, list) or len(value) < 4:
                return value
            number = numbers.setdefault(msgspec.json.encode(value), len(lists))
            if number == len(lists):
                lists.append(value)
            return {"list": number}

        def packed(figure: Figure) -> Figure:
            # the names of groups are the legend's of `Report.figure`: a page has its own
            traces = [
                {name: once(value) for name, value in trace.items() if name != "legendgroup"}
                for trace in figure["data"]
            ]
            return {"data": traces, "layout": figure["layout"]}

        plots = [plot | {"figures": [packed(figure) for figure in plot["figures"]]} for plot in self.plots]
        return {"plots": plots, "sets": self.sets, "palette": palette, "lists": lists}

    def share_samples(self, num_plots: int) -> int:
        """How many samples each of some plots may have: a page has so many, and each group at most half."""
        share = max(0, min(MAX_SAMPLES, self._samples_left // (2 * num_plots)))
        self._samples_left -= share * num_plots
        return share

    def place(self, *figures: Figure, number: int | None = None) -> str:
        """Keep a figure, or those of a set's choices, and return the element in which it will be drawn."""
        self.plots.append({"figures": list(figures)} | ({} if number is None else {"set": number}))
        return f'<div class="plot" data-plot="{len(self.plots) - 1}"></div>'

    def open_set(self, series: Iterable[tuple[str, int]]) -> int:
        """A new set of series, each with a label and the number of its colour."""
        entries = [
            {"label": label, "colour": colour % NUM_COLOURS, "isHidden": index >= SHOWN_SERIES}
            for index, (label, colour) in enumerate(series)
        ]
        self.sets.append({"series": entries})
        return len(self.sets) - 1

    def legend(self, number: int) -> str:
        """The series of a set as switches; nothing where there is one series."""
        series = self.sets[number]["series"]
        if len(series) < 2:
            return ""
        buttons = "".join(
            f'<button type="button" class="line s{entry["colour"]}" data-set="{number}" '
            f'data-series="{index}" aria-pressed="{str(not entry["isHidden"]).lower()}">'
            f"{escape(entry['label'])}</button>"
            for index, entry in enumerate(series)
        )
        return f'<div class="legend">{buttons}</div>'

    def tabs(self, number: int, name: str, choices: Sequence[str]) -> str:
        """A few choices of a set, all in sight; nothing where there is no choice."""
        if len(choices) < 2:
            return ""
        buttons = "".join(
            f'<button type="button" data-set="{number}" data-choice="{index}" '
            f'aria-pressed="{"true" if index == 0 else "false"}">{escape(choice)}</button>'
            for index, choice in enumerate(choices)
        )
        return f'<div class="tabs"><span>{escape(name)}</span>{buttons}</div>'

    def picker(self, number: int, name: str, choices: Sequence[str]) -> str:
        """Many choices of a set, in a list."""
        options = "".join(
            f'<option value="{index}">{escape(choice)}</option>' for index, choice in enumerate(choices)
        )
        return f'<label>{escape(name)} <select data-set="{number}">{options}</select></label>'


def beside_one_another(*parts: str, kind: str = "") -> str:
    """Parts in as many columns as fit."""
    shown = [part for part in parts if part]
    if len(shown) < 2:
        return "".join(shown)
    return f'<div class="{f"grid {kind}".strip()}">{"".join(f"<div>{part}</div>" for part in shown)}</div>'


def dotted(*names: str) -> str:
    """Names in one line with dots between them; those that are empty are left out."""
    return " · ".join(name for name in names if name)


def titled(title: str, plot: str) -> str:
    """A plot under its title."""
    return (f"<h4>{escape(title)}</h4>" if title else "") + plot


def swatch(number: int, label: str) -> str:
    """A report's colour and name."""
    return f'<span class="swatch s{number % NUM_COLOURS}">{escape(label)}</span>'


class Contest:
    """Who competes in which setting, told from the keys; one colour for each through a whole chapter.

    `aside` names the entries of a key that are neither: the axis of a plot.
    """

    def __init__(self, keys: Iterable[dict[str, Scalar]], aside: Sequence[str] = ()) -> None:
        self._keys = list(keys)
        self._aside = aside
        self._shared = {
            name: True
            for name, value in (self._keys[0] if self._keys else {}).items()
            if all(key.get(name) == value for key in self._keys)
        }
        names = [name for name in CONTENDERS if any(name in key for key in self._keys)]
        self._names = [name for name in names if name not in self._shared] or names

    def contender(self, key: dict[str, Scalar]) -> str:
        """Name the contender as shortly as the others allow; '' where there is one alone."""
        if self._names:
            return " ".join(text(key[name]) for name in self._names if name in key)
        return _label(key, (*self._aside, *self._shared))

    def setting(self, key: dict[str, Scalar]) -> str:
        """What else distinguishes the key; '' where nothing does."""
        return _label(key, (*self._aside, *self._shared, *self._names)) if self._names else ""


def _label(key: dict[str, Scalar], without: Sequence[str]) -> str:
    return key_label({name: value for name, value in key.items() if name not in without})


# --- distributions ---


class ReportGroup:
    """Rows of one metric and unit over several reports; a line of `rows` has one row, or None, for each."""

    def __init__(self, key: tuple[str, str, str, str]) -> None:
        self.benchmark, self.metric, self.unit, self.direction = key
        self.group: Group = key[1:]
        self.rows: list[list[Row | None]] = []

    @property
    def present(self) -> list[Row]:
        """The first row of each line, which names it."""
        return [next(row for row in line if row is not None) for line in self.rows]

    @property
    def is_mixed(self) -> bool:
        """Whether the rows are of several metrics, which share a table and no axis."""
        return len({(row.metric, row.unit): True for row in self.present}) > 1

    @property
    def has_samples(self) -> bool:
        """Whether any row was measured more than once."""
        return any(map(has_samples, self.rows))

    @property
    def is_of_facts(self) -> bool:
        """Whether every start gave a single figure, which has no distribution."""
        return all(
            len(start) == 1 for line in self.rows for row in line if row is not None for start in row.starts
        )

    def label(self, index: int) -> str:
        """What tells a line from the others."""
        row = self.present[index]
        if self.is_mixed:
            words, shared = metric_words(row.metric), shared_key(self.present)
            own = row_label(row, shared)
            return words if own == words else f"{words} · {own}"
        label = row_label(row, shared_key(self.present))
        if label == metric_words(row.metric):
            entries = {name: True for other in self.present for name in other.key if name not in row.key}
            return next((ABSENT[name] for name in entries if name in ABSENT), label)
        return label


def has_samples(line: Sequence[Row | None]) -> bool:
    """Whether a row was measured more than once in any report."""
    return any(row is not None and len(row.samples) > 1 for row in line)


def gathered(groups: Sequence[ReportGroup]) -> list[ReportGroup]:
    """Groups of a single line in one table, after the others: a metric of one figure needs no chapter."""
    lone = [group for group in groups if len(group.rows) == 1]
    if len(lone) < 2:
        return list(groups)
    mixed = ReportGroup(("", "", "", ""))
    mixed.rows = [group.rows[0] for group in lone]
    return [*(group for group in groups if len(group.rows) > 1), mixed]


def group_reports(reports: Sequence[Report]) -> list[ReportGroup]:
    """All rows of all reports, lined up by identity, in the order in which they first occur."""
    groups: dict[tuple[str, str, str, str], ReportGroup] = {}
    lines: dict[object, list[Row | None]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            key = (report.benchmark, *group_of(row))
            line = lines.get((key, row.identity))
            if line is None:
                line = lines[key, row.identity] = [None] * len(reports)
                groups.setdefault(key, ReportGroup(key)).rows.append(line)
            line[number] = row
    return list(groups.values())


def row_label(row: Row, shared: dict[str, Scalar]) -> str:
    """A row for people, by what it does not share with the others; its metric where nothing else is left."""
    own = {name: value for name, value in row.key.items() if name not in shared}
    return key_label(own) or metric_words(row.metric)


def distribution(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> str:
    """All rows on one axis; beside it which share of samples took how long, for times of a single report."""
    if group.is_mixed or not group.has_samples:
        return ""
    labels = [group.label(index) for index in range(len(group.rows))]
    reports = [(item.label, item.number) for item in shown]
    overview = figures.place(rows_figure(group.group, labels, group.rows, reports))
    if len(shown) > 1:
        return overview
    return beside_one_another(
        overview, percentile_plot(list(zip(labels, group.present, strict=True)), figures)
    )


def percentile_plot(rows: Sequence[tuple[str, Row]], figures: PageFigures) -> str:
    """The share of samples up to each time, a line for each named row; '' without enough samples."""
    enough = [
        (name, number, row)
        for number, (name, row) in enumerate(rows)
        if row.unit == "s" and is_known(len(row.samples), PERCENTILES[-1])
    ]
    if not enough:
        return ""
    number = figures.open_set((name, colour) for name, colour, _ in enough)
    plot = figures.place(quantiles_figure(enough), number=number)
    return titled("Share of measurements that took at most so long", figures.legend(number) + plot)


def closer(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> str:
    """One row at a time: its percentiles in every report beside each other, and its samples by start."""
    lines = [
        (index, line)
        for index, line in enumerate(group.rows)
        if any(row is not None and len(row.samples) > MIN_SAMPLES for row in line)
    ]
    if not lines or group.is_of_facts:
        return ""
    number = figures.open_set((item.label, item.number) for item in shown)
    picker = figures.picker(number, "Row", [group.label(at) for at, _ in lines])
    picker += "".join(swatch(item.number, item.label) for item in shown if item.label)
    content = f'<div class="controls">{picker}</div>'
    named = [(item.label, item.number) for item in shown]
    if len(shown) > 1:
        bars = [
            percentiles_figure(
                group_of(present[0]),
                [
                    (name, colour, row)
                    for (name, colour), row in zip(named, line, strict=True)
                    if row is not None and row.starts
                ],
            )
            for _, line in lines
            if (present := [row for row in line if row is not None])
        ]
        content += titled("Percentiles", figures.place(*bars, number=number))
    share = figures.share_samples(len(lines))
    spreads = []
    for _, line in lines:
        first = next(row for row in line if row is not None)
        num_starts = sum(len(row.starts) for row in line if row is not None)
        rows = [(name, colour, row) for (name, colour), row in zip(named, line, strict=True)]
        spreads.append(samples_figure(first.metric, first.unit, rows, max(6, share // max(1, num_starts))))
    how = "Dots are measurements, from left to right in time; a line is the median of its run."
    spread = figures.place(*spreads, number=number)
    return content + titled("Measurements by run", f'<p class="how">{how}</p>{spread}')


def forest_plot(diff: Diff, figures: PageFigures) -> str:
    """The change of every row with its interval."""
    shared = shared_key(row.baseline for row in diff.rows)
    has_metrics = len({row.baseline.metric: True for row in diff.rows}) > 1
    labels = []
    for row in diff.rows:
        label, words = row_label(row.baseline, shared), metric_words(row.baseline.metric)
        labels.append(dotted(label, words) if has_metrics and label != words else label)
    return figures.place(changes_figure(labels, diff.rows))


# --- lines: along an axis, over the number of workers ---

_OF_A_COURSE = ("s", "bytes", "step")
"""The axes of a training, in the order in which a reader asks for them."""
Colours = dict[str, int]
"""The colour of each contender, through a whole chapter."""


def curves_title(shown: Sequence[Shown]) -> tuple[str, str]:
    """What `curve_plots` is called, and how its lines and bands are read."""
    axes = _axes([curve for _, curve in _drawn_curves(shown)])
    has_bands = any(len(curve.starts) > 1 for _, curve in _drawn_curves(shown))
    steps = steps_apart(shown)
    how = "Each line is the mean over the runs, its band reaches from the lowest run to the highest."
    how = how if has_bands else "Each line is a single run."
    if not axes or any(axis in _OF_A_COURSE for axis in axes):
        return "Over time", (
            "How each figure went while it trained. "
            + how
            + ("" if steps is None else f" A point was taken every {counted(steps, 'step')}.")
            + " Choose along what: a strategy that is ahead by "
            "steps may be behind by seconds or bytes. Press a name to hide or show it."
            + (DISTANCE_HOW if _has_distance(shown) else "")
        )
    called = " and the ".join(map(axis_name, axes))
    return f"Over the {called}", f"Each figure by the {called}. " + how


DISTANCE_HOW = (
    " How far models are apart is the length of the difference between a worker's parameters and the mean of "
    "all workers', averaged over the workers; of a strategy that averages every few steps it is taken right "
    "after an averaging, while the worst worker is examined wherever it stands."
)


def _has_distance(shown: Sequence[Shown]) -> bool:
    return any(curve.metric == "consensus_distance" for _, curve in _drawn_curves(shown))


def steps_apart(shown: Sequence[Shown]) -> int | None:
    """How many steps there are from one evaluation to the next; None where the reports do not agree."""
    (steps, *others) = {item.report.config.get("eval_every"): True for item in shown}
    return steps if not others and isinstance(steps, int) and is_number(steps) else None


def curve_plots(shown: Sequence[Shown], figures: PageFigures, colours: Colours) -> str:
    """Every metric of the reports' curves, each setting in a plot of its own; '' where there are none."""
    curves = _drawn_curves(shown)
    if not curves:
        return ""
    contest = Contest(curve.key for _, curve in curves)
    series = _Series([contest.contender(curve.key) for _, curve in curves], shown, colours)
    axes = _axes([curve for _, curve in curves])
    number = figures.open_set(series.entries)
    charts: dict[tuple[Group, str], Chart] = {}
    for index, curve in curves:
        group = group_of(curve)
        chart = charts.setdefault((group, contest.setting(curve.key)), Chart(group, axes))
        for position, axis in enumerate(axes):
            line = averaged(curve, axis)
            if line is not None:
                chart.add(position, line, **series.about(contest.contender(curve.key), index))
    tabs = figures.tabs(number, "along", [axis_name(axis) for axis in axes])
    return (
        f'<div class="controls">{tabs}{figures.legend(number)}</div>'
        f"{series.key_to_reports()}{_grid(charts, figures, number, series.entries)}"
    )


def _drawn_curves(shown: Sequence[Shown]) -> list[tuple[int, Curve]]:
    """Those with an axis of their own, and the number of their report."""
    return [
        (index, curve) for index, item in enumerate(shown) for curve in item.report.curves if _axes([curve])
    ]


def _axes(curves: Sequence[Curve]) -> list[str]:
    names = [axis for axis in axes_of(curves) if axis != WORKERS]
    return sorted(names, key=lambda axis: _OF_A_COURSE.index(axis) if axis in _OF_A_COURSE else -1)


def scaling_groups(shown: Sequence[Shown]) -> list[Group]:
    """The metrics of which a report has figures for several numbers of workers, or a prediction of them."""
    numbers: dict[tuple[int, Group], dict[Scalar, bool]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if _is_scaling(row):
                group = group_of(row)
                numbers.setdefault((index, group), {})[row.key[WORKERS]] = True
        for curve in item.report.curves:
            if WORKERS in axes_of([curve]):
                group = group_of(curve)
                numbers.setdefault((index, group), {}).update(
                    {number: True for points in curve.starts for number in points.get(WORKERS, [])}
                )
    return list({group: True for (_, group), found in numbers.items() if len(found) > 1})


def _is_scaling(row: Row) -> bool:
    value = row.key.get(WORKERS)
    return is_number(value) and float(value or 0) > 0 and bool(row.starts) and "rank" not in row.key


def scaling_plots(shown: Sequence[Shown], figures: PageFigures, colours: Colours) -> str:
    """Figures over the number of workers: measured as points on a line, predicted dashed, ideal dotted."""
    groups = scaling_groups(shown)
    rows = [
        (index, row)
        for index, item in enumerate(shown)
        for row in item.report.rows
        if _is_scaling(row) and group_of(row) in groups
    ]
    predicted = [
        (index, curve)
        for index, item in enumerate(shown)
        for curve in item.report.curves
        if WORKERS in axes_of([curve])
    ]
    if not rows and not predicted:
        return ""
    keys = [row.key for _, row in rows] + [curve.key for _, curve in predicted]
    contest = Contest(keys, aside=(WORKERS,))
    series = _Series([contest.contender(key) for key in keys], shown, colours)
    number = figures.open_set(series.entries)
    charts: dict[tuple[Group, str], Chart] = {}
    measured: dict[tuple[Group, str, str, int], list[Row]] = {}
    for index, row in rows:
        name = (group_of(row), contest.setting(row.key), contest.contender(row.key), index)
        measured.setdefault(name, []).append(row)
    for (group, setting, contender, index), found in measured.items():
        chart = charts.setdefault((group, setting), Chart(group, (WORKERS,)))
        chart.add(0, line_over(WORKERS, found), **series.about(contender, index), style="points")
    for index, curve in predicted:
        group = group_of(curve)
        chart = charts.setdefault((group, contest.setting(curve.key)), Chart(group, (WORKERS,)))
        line = averaged(curve, WORKERS)
        if line is not None:
            about = series.about(contest.contender(curve.key), index)
            chart.add(0, line, **about, style="predicted")
    for chart in charts.values():
        _add_ideal(chart)
    return (
        f'<div class="controls">{figures.legend(number)}</div>{series.key_to_reports()}'
        f"{_grid(charts, figures, number, series.entries)}"
    )


SCALING_HOW = (
    "Speed by the number of workers. Points are medians, their bars reach from the lowest to the highest "
    "run; dashed lines are predictions; the dotted line is the ideal, the fastest with the fewest "
    "workers, multiplied. The nearer to it, the better a strategy scales."
)


def line_over(name: str, rows: list[Row]) -> Line:
    """A line through rows that differ by a number in their key: medians, and how far starts reach."""
    ordered = sorted(rows, key=lambda row: float(row.key[name]))
    medians = [start_medians(row) for row in ordered]
    return Line(
        x=[float(row.key[name]) for row in ordered],
        mean=[percentile(row.samples, 50) for row in ordered],
        low=[min(values) for values in medians],
        high=[max(values) for values in medians],
        num_starts=max(len(row.starts) for row in ordered),
    )


def _add_ideal(chart: Chart) -> None:
    """What the fewest workers did, multiplied: for rates only. The fastest there sets it."""
    lines = [drawn.line for drawn in chart.lines[0] if drawn.line.x[0] > 0]
    if not chart.unit.endswith("/s") or chart.direction != "higher" or not lines:
        return
    origin = min(lines, key=lambda line: (line.x[0], -line.mean[0]))
    reach = max(line.x[-1] for line in lines)
    x = [origin.x[0], reach]
    y = [origin.mean[0] * at / origin.x[0] for at in x]
    if reach > x[0]:
        chart.add(0, Line(x, y, y, y, 1), series=-1, style="ideal")


class _Series:
    """The lines' colours: by contender, and by report where nobody competes; a dash for each report."""

    def __init__(self, contenders: Iterable[str], shown: Sequence[Shown], colours: Colours) -> None:
        self._contenders = list(dict.fromkeys(contenders, True))
        self._shown = shown
        self._is_by_report = len(self._contenders) == 1 and len(shown) > 1
        if self._is_by_report:
            self.entries = [(item.label, item.number) for item in shown]
        else:
            self.entries = [
                (contender or "measured", colours.setdefault(contender, len(colours)))
                for contender in self._contenders
            ]

    def about(self, contender: str, report: int) -> dict[str, Any]:
        if self._is_by_report:
            return {"series": report, "report": 0}
        return {"series": self._contenders.index(contender), "report": report}

    def key_to_reports(self) -> str:
        """Which dash is which report, where colours do not say it."""
        if self._is_by_report or len(self._shown) < 2:
            return ""
        items = "".join(
            f'<span class="dash d{index % 3}">{escape(item.label)}</span>'
            for index, item in enumerate(self._shown)
        )
        return f'<p class="how">{items}</p>'


def _grid(
    charts: dict[tuple[Group, str], Chart],
    figures: PageFigures,
    number: int,
    series: Sequence[tuple[str, int]],
) -> str:
    """Metric by metric, the settings of each beside one another."""
    groups = list({group: True for group, _ in charts})
    ordered = sorted(charts.items(), key=lambda item: groups.index(item[0][0]))
    parts = []
    for ((metric, _, direction), setting), chart in ordered:
        title = sentence_case(metric_words(metric)) + (f" · {setting}" if setting else "")
        plot = figures.place(*chart.figures(series), number=number)
        parts.append(titled(f"{title} ({direction} is better)", plot))
    return beside_one_another(*parts)


# --- staleness ---

MAX_BARS = 60
"""The most bars that a plot has; more are put into classes."""


def histogram_plots(shown: Sequence[Shown], figures: PageFigures, colours: dict[str, int]) -> str:
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
        title = dotted(item.label, contender, contest.setting(row.key))
        found.setdefault(title, (colour, []))[1].append(row)
    parts = [titled(title, _bars(of_one, colour, figures)) for title, (colour, of_one) in found.items()]
    return beside_one_another(*parts)


def _bars(rows: Sequence[Row], colour: int, figures: PageFigures) -> str:
    exact = histogram_of(rows)
    histogram = exact.in_classes(class_width(min(exact.counts), max(exact.counts), MAX_BARS))
    plot = figures.place(histogram_figure(histogram, colour, "Updates behind", " behind"))
    return f'<p class="how">{escape(exact.said())}</p>{plot}'


STALENESS_HOW = (
    "How old a model or a gradient was when it was used, in updates: 0 is up to date, at 3 three updates had "
    "been made without it; 'ahead' came from a worker that had made more of them. Lower, that is further to "
    "the left, is better."
)
WAITS_HOW = (
    "How long the worker of each row waited for the worker of each column, on average over the runs; more "
    "colour is a longer wait, in one scale for all strategies. A column of more colour than the others is "
    "a worker that others wait for. A dash: the one never waited for the other. A strategy that is missing "
    "here never waits for a certain worker."
)

# --- who waited for whom ---

UNEVEN = 1.5
"""A worker that others wait for so many times as long as for the average one is named."""
WAITED, WAITING, AWAITED = "waited", "rank", "waited_for"


def is_wait(row: Row) -> bool:
    """Whether a row says how long one waited for another."""
    return row.metric == WAITED and {WAITING, AWAITED} <= row.key.keys()


def wait_plots(shown: Sequence[Shown], figures: PageFigures) -> str:
    """A heat map for each strategy, setting and report, all in one scale; '' where no waits are known."""
    rows = [(item, row) for item in shown for row in item.report.rows if is_wait(row) and row.starts]
    if not rows:
        return ""
    contest = Contest((row.key for _, row in rows), aside=(WAITING, AWAITED))
    maps: dict[str, list[Row]] = {}
    for item, row in rows:
        name = dotted(item.label, contest.contender(row.key), contest.setting(row.key))
        maps.setdefault(name, []).append(row)
    longest = max(mean_of(row.samples) for _, row in rows)
    parts = [titled(name, _wait_map(found, longest, figures)) for name, found in maps.items()]
    return beside_one_another(*parts, kind="narrow")


def _wait_map(rows: list[Row], longest: float, figures: PageFigures) -> str:
    scale = figure_scale(rows[0].metric, rows[0].unit, longest)
    workers = sorted(
        {value: True for row in rows for value in (row.key[WAITING], row.key[AWAITED])}, key=_worker_order
    )
    cells = {(row.key[WAITING], row.key[AWAITED]): mean_of(row.samples) for row in rows}
    names = [text(worker) for worker in workers]
    values = [[cells.get((waiting, awaited)) for awaited in workers] for waiting in workers]
    said = f'<p class="how">{_waits_said(cells, workers, scale.format)} Numbers are in {scale.unit}.</p>'
    return said + figures.place(waits_figure(names, values, scale, longest))


def _worker_order(worker: Scalar) -> tuple[bool, float, str]:
    is_number = isinstance(worker, int | float)
    return not is_number, float(worker) if is_number else 0.0, text(worker)


def _waits_said(
    cells: dict[tuple[Scalar, Scalar], float], workers: list[Scalar], shown: Callable[[float], str]
) -> str:
    """The map in one sentence."""
    by_awaited = {
        worker: sum(value for (waiting, awaited), value in cells.items() if awaited == worker != waiting)
        for worker in workers
    }
    total = sum(by_awaited.values())
    if total <= 0:
        return "Nobody waited."
    worker = max(by_awaited, key=lambda name: by_awaited[name])
    if by_awaited[worker] < UNEVEN * total / len(by_awaited):
        return escape(
            f"{shown(total)} of waiting in all, evenly spread: no worker is waited for much longer."
        )
    name = text(worker) if isinstance(worker, str) else f"rank {worker}"
    share = 100 * by_awaited[worker] / total
    return escape(f"{shown(total)} of waiting in all, {share:.0f}% for {name} ({shown(by_awaited[worker])}).")
