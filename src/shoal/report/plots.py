"""The plots of a page: each has a place in the markup and an entry in the data that `assets/*.js` draw.

Data is reduced to what a browser draws quickly. A set is what several plots have in common: the series with
their colours, which the reader switches on and off, and a choice (of the axis, of the row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

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
from shoal.report.schema import Curve, Report, Row, Scalar, is_number, label_of, text
from shoal.report.statistics import (
    PERCENTILES,
    known_percentiles,
    mean_of,
    percentile,
    percentiles,
    start_medians,
)
from shoal.report.units import Scale, scale_for
from shoal.report.views import Group, shared_key, short_label, verdict_text
from shoal.report.words import metric_words

# --- places and sets ---

NUM_COLOURS = 12
SHOWN_SERIES = 12
"""More are there to be switched on."""
CONTENDERS = ("contender", "strategy", "method")
"""Entries of a key that name who competes; the others say under which conditions."""


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

    def place(self, kind: str, **data: Any) -> str:
        """Keep the data, and return the element in which the plot will be."""
        self.plots.append({"kind": kind, **data})
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
            f'data-series="{index}" aria-pressed="{"false" if entry["isHidden"] else "true"}">'
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


def titled(title: str, plot: str) -> str:
    """A plot under its title."""
    return (f"<h4>{escape(title)}</h4>" if title else "") + plot


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
    return label_of({name: value for name, value in key.items() if name not in without})


# --- distributions ---

MAX_SAMPLES = 4000
"""Of one distribution plot; more are thinned evenly in time, which keeps drift within a start visible."""
LOG_RATIO = 20
"""Values further apart than this are drawn on a logarithmic axis."""


class ReportGroup:
    """Rows of one metric and unit over several reports; a line of `rows` has one row, or None, for each."""

    def __init__(self, key: tuple[str, str, str, str]) -> None:
        self.benchmark, self.metric, self.unit, self.direction = key
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
            return " · ".join(part for part in (row.metric, row.label) if part)
        return short_label(row, shared_key(self.present))


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
            key = (report.benchmark, row.metric, row.unit, row.direction)
            line = lines.get((key, row.identity))
            if line is None:
                line = lines[key, row.identity] = [None] * len(reports)
                groups.setdefault(key, ReportGroup(key)).rows.append(line)
            line[number] = row
    return list(groups.values())


_OVERVIEW = (5, 25, 50, 75, 95)


def overview_data(group: ReportGroup) -> dict[str, Any]:
    """One line for each row, of all reports; the samples themselves where they are too few for a quartile."""
    medians = [
        percentile(row.samples, 50) for line in group.rows for row in line if row is not None and row.starts
    ]
    positive = [median for median in medians if median > 0]
    is_log = len(positive) == len(medians) > 0 and max(medians) > LOG_RATIO * min(medians)
    scale = scale_for(group.unit, percentile(medians, 50) if medians else 1.0)

    def quantiles(row: Row | None) -> dict[str, Any] | None:
        if row is None or not row.starts:
            return None
        known = known_percentiles(row.samples, _OVERVIEW)
        values = [known[q] / scale.factor if q in known else None for q in _OVERVIEW]
        few = [] if 25 in known else [sample / scale.factor for sample in row.samples]
        return {"quantiles": values, "few": few, "starts": len(row.starts), "samples": len(row.samples)}

    rows = [
        {
            "label": group.label(index),
            "series": [quantiles(row) for row in line],
            "failed": [row.error if row is not None else None for row in line],
        }
        for index, line in enumerate(group.rows)
    ]
    return {"unit": scale.unit, "isLog": is_log, "rows": rows}


def bars_data(line: Sequence[Row | None]) -> dict[str, Any]:
    """Percentiles of one row in every report, to stand beside each other."""
    present = [row for row in line if row is not None and row.starts]
    scale = scale_for(present[0].unit, percentile(present[0].samples, 50)) if present else scale_for("", 1.0)
    reports: list[list[float | None] | None] = []
    for row in line:
        known = known_percentiles(row.samples) if row is not None else {}
        values = [known[q] / scale.factor if q in known else None for q in PERCENTILES]
        reports.append(values if known else None)
    return {"unit": scale.unit, "names": [f"p{q}" for q in PERCENTILES], "reports": reports}


def spread_data(line: Sequence[Row | None]) -> dict[str, Any]:
    """All samples of one row by process start, in every report."""
    rows = [row if row is not None and row.starts else None for row in line]
    present = [row for row in rows if row is not None]
    if not present:
        return {"unit": "", "reports": [None for _ in rows]}
    scale = scale_for(present[0].unit, percentile(present[0].samples, 50))
    share = max(8, MAX_SAMPLES // sum(len(row.starts) for row in present))
    reports = [
        None
        if row is None
        else {
            "median": percentile(row.samples, 50) / scale.factor,
            "medians": [median / scale.factor for median in start_medians(row)],
            "starts": [[sample / scale.factor for sample in thin(start, share)] for start in row.starts],
        }
        for row in rows
    ]
    return {"unit": scale.unit, "reports": reports}


def thin(samples: Sequence[float], limit: int) -> list[float]:
    """At most `limit` samples, evenly spaced in time, the smallest and largest among them."""
    if len(samples) <= limit:
        return list(samples)
    keep = {round(index * (len(samples) - 1) / (limit - 3)): True for index in range(limit - 2)}
    keep[min(range(len(samples)), key=lambda index: samples[index])] = True
    keep[max(range(len(samples)), key=lambda index: samples[index])] = True
    return [samples[index] for index in sorted(keep)]


def forest_data(diff: Diff) -> list[dict[str, Any]]:
    """The change of every row with its interval."""
    shared = shared_key(row.baseline for row in diff.rows)
    has_metrics = len({row.baseline.metric: True for row in diff.rows}) > 1
    points = []
    for row in diff.rows:
        label = short_label(row.baseline, shared)
        if has_metrics and label != row.baseline.metric:
            label += f" · {row.baseline.metric}"
        judgement = row.judgement
        points.append(
            {
                "label": label,
                "change": judgement.change_percent,
                "low": judgement.low_percent,
                "high": judgement.high_percent,
                "verdict": row.verdict.value,
                "text": verdict_text(row),
            }
        )
    return points


# --- lines: along an axis, over the number of workers, percentiles ---

AXES = {
    "step": ("steps", ""),
    "s": ("seconds", "s"),
    "bytes": ("bytes sent", "B"),
    "ping_s": ("mean delay of a layer", "s"),
}
"""What an axis is called, and its unit."""
_OF_A_COURSE = ("step", "s", "bytes")
MIN_SAMPLES = 20
"""Fewer have no percentiles worth a line."""
QUANTILES = tuple(range(100))

Colours = dict[str, int]
"""The colour of each contender, through a whole chapter."""


class Chart:
    """One plot of lines, in its making: values in their own units until `data` scales them."""

    def __init__(self, group: Group, axes: Sequence[str]) -> None:
        self.metric, self.unit, self.direction = group
        self.axes = axes
        self.lines: list[list[dict[str, Any]]] = [[] for _ in axes]

    def add(self, axis: int, line: Line, **about: Any) -> None:
        """`about`: `series`, `report` and `style` ('line', 'points', 'predicted' or 'ideal')."""
        band = {"low": line.low, "high": line.high} if line.has_band else {}
        self.lines[axis].append(
            {"x": line.x, "y": line.mean, **band, "starts": line.num_starts, "style": "line"} | about
        )

    def data(self, number: int) -> dict[str, Any]:
        """Return what the page draws; `number` is the set's."""
        values = [y for lines in self.lines for line in lines for y in line["y"]]
        scale = scale_for(self.unit, percentile([abs(value) for value in values], 50) if values else 1.0)
        is_log, has_zeros = _wants_log(values)
        is_share = self.unit in {"", "1", "%"} and bool(values) and min(values) >= 0 and not is_log
        title = " · ".join(part for part in (metric_words(self.metric), scale.unit) if part)
        if is_log:
            title += " (log, without zeros)" if has_zeros else " (logarithmic)"
        views = [self._view(axis, lines, scale) for axis, lines in zip(self.axes, self.lines, strict=True)]
        y = {"title": title, "unit": scale.unit, "isLog": is_log, "isShare": is_share}
        return {"set": number, "y": y, "views": views}

    def _view(self, axis: str, lines: list[dict[str, Any]], scale: Scale) -> dict[str, Any]:
        title, unit = _called(axis), AXES.get(axis, ("", ""))[1]
        ends = [max(line["x"]) for line in lines if max(line["x"]) > 0]
        along = scale_for(unit, max(ends, default=1.0))
        # those who send much and those who send little are both to be seen
        is_log = axis == "bytes" and bool(ends) and max(ends) > LOG_RATIO / 2 * min(ends)
        named = f"{title}{f' ({along.unit})' if along.unit and along.unit != unit else ''}"
        factors = {"x": along.factor, **dict.fromkeys(("y", "low", "high"), scale.factor)}
        shown = [
            {
                name: [number / factors[name] for number in value] if name in factors else value
                for name, value in line.items()
            }
            for line in lines
        ]
        x = {"title": named, "unit": along.unit, "isLog": is_log, "isDoubling": axis == WORKERS}
        return {"x": x, "lines": shown}


def _wants_log(values: Sequence[float]) -> tuple[bool, bool]:
    """Whether a logarithmic axis shows them better, and whether it leaves zeros out."""
    positive = [value for value in values if value > 0]
    if len(positive) < 0.5 * len(values) or not positive or min(values) < 0:
        return False, False
    return max(positive) > 5 * LOG_RATIO * min(positive), len(positive) < len(values)


def curves_title(shown: Sequence[Shown]) -> tuple[str, str]:
    """What `curve_plots` is called, by what its lines go along, and what a line and its band are."""
    axes = _axes([curve for _, curve in _drawn_curves(shown)])
    if not axes or any(axis in _OF_A_COURSE for axis in axes):
        return "Over time", "mean over the starts, band: all starts"
    return f"Over the {' and the '.join(map(_called, axes))}", "mean over the repeats, band: all of them"


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
        group = _group(curve)
        chart = charts.setdefault((group, contest.setting(curve.key)), Chart(group, axes))
        for position, axis in enumerate(axes):
            line = averaged(curve, axis)
            if line is not None:
                chart.add(position, line, **series.about(contest.contender(curve.key), index))
    tabs = figures.tabs(number, "along", [_called(axis) for axis in axes])
    return (
        f'<div class="controls">{tabs}{figures.legend(number)}</div>'
        f"{series.key_to_reports()}{_grid(charts, figures, number)}"
    )


def _group(figure: Row | Curve) -> Group:
    return figure.metric, figure.unit, figure.direction


def _drawn_curves(shown: Sequence[Shown]) -> list[tuple[int, Curve]]:
    """Those with an axis of their own, and the number of their report."""
    return [
        (index, curve) for index, item in enumerate(shown) for curve in item.report.curves if _axes([curve])
    ]


def _axes(curves: Sequence[Curve]) -> list[str]:
    return [axis for axis in axes_of(curves) if axis != WORKERS]


def _called(axis: str) -> str:
    return AXES.get(axis, (axis.replace("_", " "), ""))[0]


def scaling_groups(shown: Sequence[Shown]) -> list[Group]:
    """The metrics of which a report has figures for several numbers of workers, or a prediction of them."""
    numbers: dict[tuple[int, Group], dict[Scalar, bool]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if _is_scaling(row):
                group = _group(row)
                numbers.setdefault((index, group), {})[row.key[WORKERS]] = True
        for curve in item.report.curves:
            if WORKERS in axes_of([curve]):
                group = _group(curve)
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
        if _is_scaling(row) and _group(row) in groups
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
        name = (_group(row), contest.setting(row.key), contest.contender(row.key), index)
        measured.setdefault(name, []).append(row)
    for (group, setting, contender, index), found in measured.items():
        chart = charts.setdefault((group, setting), Chart(group, (WORKERS,)))
        chart.add(0, _over_workers(found), **series.about(contender, index), style="points")
    for index, curve in predicted:
        group = _group(curve)
        chart = charts.setdefault((group, contest.setting(curve.key)), Chart(group, (WORKERS,)))
        line = averaged(curve, WORKERS)
        if line is not None:
            about = series.about(contest.contender(curve.key), index)
            chart.add(0, line, **about, style="predicted")
    for chart in charts.values():
        _add_ideal(chart)
    lines = ["points and lines: measured"] + ["dashed: predicted"] * bool(predicted) + ["dotted: ideal"]
    return (
        f'<div class="controls">{figures.legend(number)}</div>{series.key_to_reports()}'
        f'<p class="how">{"; ".join(lines)}</p>{_grid(charts, figures, number)}'
    )


def _over_workers(rows: list[Row]) -> Line:
    ordered = sorted(rows, key=lambda row: float(row.key[WORKERS]))
    medians = [start_medians(row) for row in ordered]
    return Line(
        x=[float(row.key[WORKERS]) for row in ordered],
        mean=[percentile(row.samples, 50) for row in ordered],
        low=[min(values) for values in medians],
        high=[max(values) for values in medians],
        num_starts=max(len(row.starts) for row in ordered),
    )


def _add_ideal(chart: Chart) -> None:
    """What the fewest workers did, multiplied: for rates only. The fastest there sets it."""
    lines = [line for line in chart.lines[0] if line["x"][0] > 0]
    if not chart.unit.endswith("/s") or chart.direction != "higher" or not lines:
        return
    origin = min(lines, key=lambda line: (line["x"][0], -line["y"][0]))
    reach = max(line["x"][-1] for line in lines)
    x = [origin["x"][0], reach]
    y = [origin["y"][0] * at / origin["x"][0] for at in x]
    if reach > x[0]:
        chart.add(0, Line(x, y, y, y, 1), series=-1, report=0, style="ideal")


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


def _grid(charts: dict[tuple[Group, str], Chart], figures: PageFigures, number: int) -> str:
    """Metric by metric, the settings of each beside one another."""
    groups = list({group: True for group, _ in charts})
    ordered = sorted(charts.items(), key=lambda item: groups.index(item[0][0]))
    parts = []
    for ((metric, _, direction), setting), chart in ordered:
        title = f"{metric_words(metric)}, {direction} is better{f' · {setting}' if setting else ''}"
        parts.append(titled(title, figures.place("lines", **chart.data(number))))
    return beside_one_another(*parts)


def percentile_plot(rows: Sequence[tuple[str, Row]], figures: PageFigures, colours: Sequence[int]) -> str:
    """The share of samples up to each time, a line for each named row; '' without enough samples."""
    enough = [
        (name, row, colour)
        for (name, row), colour in zip(rows, colours, strict=True)
        if row.unit == "s" and len(row.samples) >= MIN_SAMPLES
    ]
    if not enough:
        return ""
    number = figures.open_set((name, colour) for name, _, colour in enough)
    plot = figures.place("lines", set=number, **percentile_view([row for _, row, _ in enough]))
    return titled("percentiles", figures.legend(number) + plot)


def percentile_view(rows: Sequence[Row | None]) -> dict[str, Any]:
    """The lines of rows of one unit; a row that is missing leaves its series empty."""
    present = [(series, row) for series, row in enumerate(rows) if row is not None and row.starts]
    quantiles = {series: percentiles(row.samples, QUANTILES) for series, row in present}
    ends = [value for values in quantiles.values() for value in (values[1], values[-1])]
    scale = scale_for(present[0][1].unit if present else "", percentile(ends, 50) if ends else 1.0)
    is_log = bool(ends) and min(ends) > 0 and max(ends) > LOG_RATIO * min(ends)
    lines = [
        {
            "series": series,
            "report": 0,
            "style": "line",
            "starts": len(row.starts),
            "x": [value / scale.factor for value in quantiles[series]],
            "y": list(QUANTILES),
        }
        for series, row in present
    ]
    title = f"{scale.unit}, up to p99{' (logarithmic)' if is_log else ''}"
    x = {"title": title, "unit": scale.unit, "isLog": is_log, "isDoubling": False}
    y = {"title": "% of samples", "unit": "%", "isLog": False, "isShare": True, "isPercentile": True}
    return {"y": y, "views": [{"x": x, "lines": lines}]}


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
        names = (item.label, "" if is_alone else contender, contest.setting(row.key))
        title = " · ".join(name for name in names if name)
        found.setdefault(title, (colour, []))[1].append(row)
    parts = [titled(title, _bars(of_one, colour, figures)) for title, (colour, of_one) in found.items()]
    return beside_one_another(*parts)


def _bars(rows: Sequence[Row], colour: int, figures: PageFigures) -> str:
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


# --- who waited for whom ---

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
        names = (item.label, contest.contender(row.key), contest.setting(row.key))
        maps.setdefault(" · ".join(name for name in names if name), []).append(row)
    longest = max(mean_of(row.samples) for _, row in rows)
    parts = [titled(name, _wait_map(found, longest, figures)) for name, found in maps.items()]
    return beside_one_another(*parts, kind="narrow")


def _wait_map(rows: list[Row], longest: float, figures: PageFigures) -> str:
    scale = scale_for(rows[0].unit, longest)
    workers = sorted(
        {value: True for row in rows for value in (row.key[WAITING], row.key[AWAITED])}, key=_worker_order
    )
    cells = {(row.key[WAITING], row.key[AWAITED]): mean_of(row.samples) for row in rows}
    data: dict[str, Any] = {
        "names": [text(worker) for worker in workers],
        "values": [
            [
                None if (waiting, awaited) not in cells else cells[waiting, awaited] / scale.factor
                for awaited in workers
            ]
            for waiting in workers
        ],
        "unit": scale.unit,
        "longest": longest / scale.factor,
    }
    return figures.place("waits", **data) + f'<p class="how">{_waits_said(cells, workers, scale.format)}</p>'


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
    name = text(worker) if isinstance(worker, str) else f"rank {worker}"
    share = 100 * by_awaited[worker] / total
    return escape(f"{shown(total)} of waiting in all, {share:.0f}% for {name} ({shown(by_awaited[worker])}).")
