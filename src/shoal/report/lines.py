"""Plots of lines: curves along an axis, figures over the number of workers, percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from shoal.report.curves import WORKERS, Line, averaged, axes_of
from shoal.report.figures import Contest, Figures, Shown, beside_one_another, titled
from shoal.report.schema import Curve, Row, Scalar
from shoal.report.statistics import percentile, percentiles, start_medians
from shoal.report.units import Scale, scale_for
from shoal.report.views import Group

LOG_RATIO = 20
"""Values further apart than this are drawn on a logarithmic axis."""
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
        """For the page; `number` is the set's."""
        values = [y for lines in self.lines for line in lines for y in line["y"]]
        scale = scale_for(self.unit, percentile([abs(value) for value in values], 50) if values else 1.0)
        is_log, has_zeros = _wants_log(values)
        is_share = self.unit in {"", "1", "%"} and bool(values) and min(values) >= 0 and not is_log
        title = " · ".join(part for part in (self.metric, scale.unit) if part)
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
        shown = [_scaled(line, along.factor, scale.factor) for line in lines]
        x = {"title": named, "unit": along.unit, "isLog": is_log, "isDoubling": axis == WORKERS}
        return {"x": x, "lines": shown}


def _scaled(line: dict[str, Any], x: float, y: float) -> dict[str, Any]:
    factors = {"x": x, "y": y, "low": y, "high": y}
    return {
        name: [number / factors[name] for number in value] if name in factors else value
        for name, value in line.items()
    }


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


def curve_plots(shown: Sequence[Shown], figures: Figures, colours: Colours) -> str:
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return is_number and bool(row.starts) and "rank" not in row.key


def scaling_plots(shown: Sequence[Shown], figures: Figures, colours: Colours) -> str:
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


def _grid(charts: dict[tuple[Group, str], Chart], figures: Figures, number: int) -> str:
    """Metric by metric, the settings of each beside one another."""
    groups = list({group: True for group, _ in charts})
    ordered = sorted(charts.items(), key=lambda item: groups.index(item[0][0]))
    parts = []
    for ((metric, _, direction), setting), chart in ordered:
        title = f"{metric}, {direction} is better{f' · {setting}' if setting else ''}"
        parts.append(titled(title, figures.place("lines", **chart.data(number))))
    return beside_one_another(*parts)


def percentile_plot(rows: Sequence[tuple[str, Row]], figures: Figures, colours: Sequence[int]) -> str:
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
