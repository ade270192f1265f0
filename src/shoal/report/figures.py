"""Figures of plotly as plain dictionaries: a page draws them, and `Report.figure` returns them.

Colours are those of a page's light theme: the page exchanges them where it is dark, and fits ticks and labels
to its width (`assets/drawing.js`). Also what people who work in Python ask for: reports as tables of pandas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.core.errors import ReportError, UsageError, did_you_mean
from shoal.report.curves import WORKERS, Histogram, Line, averaged, axes_of
from shoal.report.diff import TONES, RowDiff
from shoal.report.schema import Curve, Report, Row, Scalar
from shoal.report.statistics import (
    PERCENTILES,
    half_interval,
    is_known,
    known_percentiles,
    mean_of,
    percentile,
    percentiles,
    start_medians,
)
from shoal.report.storage import load
from shoal.report.units import Scale, counted, scale_for
from shoal.report.views import Group, group_of, shared_key, short_label, verdict_text
from shoal.report.words import benchmark_words, key_words, metric_words, scale_of, sentence_case

Figure = dict[str, Any]
"""`data` and `layout` as plotly has them. `layout.meta` says what kind it is and what a page has to fit."""

# --- from Python ---


def read_report(path: Path | str) -> Report:
    """Opens a report that a benchmark has saved, also an earlier version's. ReportError for what is none."""
    return load(path)


def to_pandas(report: Report) -> Any:
    """A DataFrame with a line for each sample: the entries of its key, metric, unit, start and value.

    A row that failed has one line, without a value, and with its error. ReportError where pandas is missing.
    """
    pandas = _library("pandas", "pip install pandas")
    lines: list[dict[str, Any]] = []
    for row in report.rows:
        about = {**row.key, "metric": row.metric, "unit": row.unit, "direction": row.direction}
        for number, samples in enumerate(row.starts):
            lines += [{**about, "start": number, "value": value} for value in samples]
        if row.error is not None:
            lines.append({**about, "error": row.error})
    return pandas.DataFrame(lines)


def figure(report: Report, metric: str | None = None, over: str | None = None) -> Any:
    """A figure of plotly: a line with its band for each curve of a metric, or else a bar for each row.

    `metric` is the first curve's, or the first row's, unless it is given; `over` is the axis of curves (`s`,
    `bytes`, `step`, …). UsageError for what the report does not have, ReportError where plotly is missing.
    """
    plotly = _library("plotly.graph_objects", "pip install 'shoal[report]'")
    curves = {curve.metric: True for curve in report.curves}
    rows = {row.metric: True for row in report.rows if row.starts}
    chosen = metric or next(iter((*curves, *rows)), "")
    if chosen in curves:
        drawn = _curves_figure([curve for curve in report.curves if curve.metric == chosen], over)
    elif chosen in rows:
        found = [row for row in report.rows if row.metric == chosen and row.starts]
        shared = shared_key(found)
        drawn = bars_figure([bar_of(row, _called(row, shared), number) for number, row in enumerate(found)])
    else:
        known = list(dict.fromkeys((*curves, *rows)))
        raise UsageError(
            f"The report has no {chosen!r}.{did_you_mean(chosen, known)}",
            next_step=f"choose one of {', '.join(known)}.",
        )
    title = f"{benchmark_words(report.benchmark).title}: {metric_words(chosen)}"
    margin = {**drawn["layout"]["margin"], "t": 60, "l": 40}
    extra = {"title": {"text": title}, "template": "plotly_white", "showlegend": True, "margin": margin}
    return plotly.Figure(data=drawn["data"], layout={**drawn["layout"], **extra})


def _curves_figure(curves: Sequence[Curve], over: str | None) -> Figure:
    axes = axes_of(curves)
    axis = over or axes[0]
    if axis not in axes:
        raise UsageError(f"The curves have no {axis!r}.", next_step=f"choose one of {', '.join(axes)}.")
    shared = shared_key(curves)
    chart = Chart(group_of(curves[0]), [axis])
    for number, curve in enumerate(curves):
        line = averaged(curve, axis)
        if line is not None:
            chart.add(0, line, series=number)
    return chart.figures([(_called(curve, shared), number) for number, curve in enumerate(curves)])[0]


def _called(item: Row | Curve, shared: Mapping[str, Scalar]) -> str:
    """What tells it apart: the value alone where that is one entry of its key."""
    own = [value for name, value in item.key.items() if name not in shared]
    return str(own[0]) if len(own) == 1 else short_label(item, dict(shared))


def _library(name: str, install: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ReportError(f"This needs {package}, which is not installed", next_step=install) from error


# --- colours, text, axes ---

NUM_COLOURS = 12
PALETTE = {
    "paper": "#ffffff", "ink": "#1b1f24", "muted": "#646c76", "line": "#e3e6ea", "faint": "#f6f7f9",
    "good": "#17794a", "bad": "#b3261e", "unsure": "#8a5a00", "quiet": "#59616b",
    "s0": "#2563c9", "s1": "#d2691e", "s2": "#1f8a5b", "s3": "#8457c9", "s4": "#b8860b", "s5": "#c2417c",
    "s6": "#0e8a9a", "s7": "#6b7280", "s8": "#7a9a1e", "s9": "#a0522d", "s10": "#2b3038", "s11": "#8f1d2c",
}  # fmt: skip
"""The light theme of `assets/page.css`, by the names of its variables."""
LOG_RATIO = 20
"""Values further apart than this are drawn on a logarithmic axis."""
AXES = {
    "step": ("steps", ""),
    "s": ("seconds", "s"),
    "bytes": ("bytes sent by all workers", "B"),
    "ping_s": ("mean delay of a layer", "s"),
    "num_clients": ("clients at once", ""),
}
"""What an axis is called, and its unit."""
_NUMBER = ",.3~r"
_DASHES = ("solid", "dash", "dashdot")
_SMALL = 11


def shade(number: int) -> str:
    """The colour of a series, in the light theme."""
    return PALETTE[f"s{number % NUM_COLOURS}"]


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def short(values: Sequence[float]) -> list[float]:
    """Numbers in as many digits as a picture shows, so that pages stay small."""
    rounded = [found if math.isfinite(found := float(f"{value:.4g}")) else value for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _safe(words: str) -> str:
    """Words of a report in a text of plotly, which knows some markup and templates."""
    return escape(words, quote=False).replace("%{", "&#37;{")


def _title(words: str) -> dict[str, Any]:
    return {"text": _safe(words), "standoff": 6}


def _layout(kind: str, height: int, **parts: Any) -> dict[str, Any]:
    margin = {"l": 6, "r": 14, "t": 8, "b": 36}
    meta = {"kind": kind, **parts.pop("meta", {})}
    return {
        "height": height,
        "margin": margin,
        "showlegend": False,
        "hovermode": "closest",
        "meta": meta,
    } | parts


def _decades(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2, 5 where there are few decades."""
    ends = [value for value in values if math.isfinite(value)] or [1.0]
    low, high = math.log10(min(ends)), math.log10(max(ends))
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    every = max(1, round((high - low) / 12))
    powers = range(max(-307, math.floor(low)), min(307, math.ceil(high)) + 1, every)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [_tick(value) for value in ticks]}


def _doublings(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at the powers of two, for numbers of workers and clients."""
    least, most = min(values), max(values)
    powers = [2.0**power for power in range(min(1023, max(0, math.ceil(math.log2(most)))) + 1)]
    ticks = sorted({*(tick for tick in powers if tick <= most), *(values if len(set(values)) < 8 else ())})
    margin = (math.log10(most) - math.log10(least)) * 0.04 + 0.02
    reach = [math.log10(least) - margin, math.log10(most) + margin]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.0f}" for tick in ticks], "range": reach}


def _tick(value: float) -> str:
    return f"{value:,.6g}" if 1e-3 <= value < 1e6 else f"{value:.0e}".replace("e+0", "e").replace("e-0", "e−")


def _axis_title(metric: str, unit: str) -> str:
    return _with_unit(sentence_case(metric_words(metric)), unit)


def _with_unit(words: str, unit: str) -> str:
    """Words of rates say themselves that they are of a second."""
    return words if unit in {"", "/s"} else f"{words} ({unit})"


# --- lines ---


class Chart:
    """A plot of lines in its making, along one or several axes: values in their own units until `figures`."""

    def __init__(self, group: Group, axes: Sequence[str]) -> None:
        self.metric, self.unit, self.direction = group
        self.axes = axes
        self.lines: list[list[_Drawn]] = [[] for _ in axes]

    def add(self, axis: int, line: Line, *, series: int, report: int = 0, style: str = "line") -> None:
        """`style` is 'line', 'points', 'predicted' or 'ideal'; the ideal belongs to no series."""
        self.lines[axis].append(_Drawn(line, series, report, style))

    def figures(self, series: Sequence[tuple[str, int]]) -> list[Figure]:
        """One for each axis; `series` has the label and the number of the colour of each."""
        values = [y for lines in self.lines for drawn in lines for y in drawn.line.mean]
        scale = scale_of(self.metric, self.unit, values)
        return [
            self._figure(axis, lines, scale, series, values)
            for axis, lines in zip(self.axes, self.lines, strict=True)
        ]

    def _figure(
        self,
        axis: str,
        lines: Sequence[_Drawn],
        scale: Scale,
        series: Sequence[tuple[str, int]],
        values: Sequence[float],
    ) -> Figure:
        is_log, has_zeros = _wants_log(values)
        ends = [max(drawn.line.x) for drawn in lines if max(drawn.line.x) > 0]
        unit = AXES.get(axis, ("", ""))[1]
        along = scale_for(unit, max(ends, default=1.0))
        # those who send much and those who send little are both to be seen
        is_log_x = axis == "bytes" and bool(ends) and max(ends) > LOG_RATIO / 2 * min(ends)
        x: dict[str, Any] = {"title": _title(_axis_words(axis, along.unit, unit)), "zeroline": False}
        along_values = [value / along.factor for drawn in lines for value in drawn.line.x if value > 0]
        if axis in (WORKERS, "num_clients") and along_values:
            x |= _doublings(along_values)
        elif is_log_x and along_values:
            x |= _decades(along_values)
        y: dict[str, Any] = {"zeroline": False}
        title = _axis_title(self.metric, scale.unit)
        unseen: list[str] = []
        if is_log:
            unseen = [
                series[drawn.series][0] for drawn in lines if drawn.series >= 0 and not any(drawn.line.mean)
            ]
            title += ", logarithmic" + (", without zeros" if has_zeros else "")
            y |= _decades([value / scale.factor for value in values if value > 0])
        elif len(self.axes) == 1 and values and min(values) >= 0:
            y["rangemode"] = "tozero"
        y["title"] = _title(title)
        traces: list[dict[str, Any]] = []
        for drawn in lines:
            traces += drawn.traces(series, _Axes(along, scale, axis, is_log_x, is_log))
        layout = _layout("lines", 300, xaxis=x, yaxis=y)
        if unseen:
            said = f"{' and '.join(map(_safe, dict.fromkeys(unseen)))}: always 0, not drawn"
            layout["annotations"] = [
                {
                    "xref": "paper", "x": 1, "xanchor": "right", "yref": "paper", "y": 1.02,
                    "yanchor": "bottom", "showarrow": False, "text": said,
                    "font": {"size": _SMALL, "color": PALETTE["muted"]},
                }
            ]  # fmt: skip
            layout["margin"] |= {"t": 22}
        return {"data": traces, "layout": layout}


@dataclass(frozen=True)
class _Axes:
    """What the two axes of a chart have in common for all its lines."""

    x: Scale
    y: Scale
    along: str
    is_log_x: bool
    is_log_y: bool


@dataclass(frozen=True)
class _Drawn:
    """A line of a chart, and how it is drawn."""

    line: Line
    series: int
    report: int
    style: str

    def traces(self, series: Sequence[tuple[str, int]], axes: _Axes) -> list[dict[str, Any]]:
        """The line, after its band where it has one."""
        is_ideal = self.style == "ideal"
        name, number = ("ideal", 0) if is_ideal else series[self.series]
        colour = PALETTE["muted"] if is_ideal else shade(number)
        about: dict[str, Any] = {"type": "scatter", "legendgroup": name, "meta": {"series": self.series}}
        kept = [index for index, x in enumerate(self.line.x) if not (axes.is_log_x and x <= 0)]
        x = short([self.line.x[index] / axes.x.factor for index in kept])
        y = self._scaled(self.line.mean, kept, axes)
        low, high = (self._scaled(side, kept, axes) for side in (self.line.low, self.line.high))
        traces = []
        has_band = self.line.has_band and not is_ideal
        if has_band and self.style == "line":
            whole = [at for at in range(len(x)) if low[at] is not None and high[at] is not None]
            traces.append(
                about
                | {
                    "mode": "lines",
                    "x": [x[at] for at in whole] + [x[at] for at in reversed(whole)],
                    "y": [high[at] for at in whole] + [low[at] for at in reversed(whole)],
                    "fill": "toself",
                    "fillcolor": _faded(colour, 0.14),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
            )
        is_short = len(x) < 25 and self.style == "line"
        dash = {"ideal": "dot", "predicted": "dash"}.get(self.style, _DASHES[self.report % len(_DASHES)])
        said = f"{_safe(name)}{', predicted' if self.style == 'predicted' else ''}"
        where = f"%{{x:{_NUMBER}}} {_safe(axes.x.unit or axis_name(axes.along))}"
        hover = f"<b>{said}</b><br>%{{y:{_NUMBER}}} {_safe(axes.y.unit)} at {where}"
        trace = about | {
            "mode": "lines+markers" if self.style == "points" or is_short else "lines",
            "name": _safe(name),
            "x": x,
            "y": y,
            "line": {"color": colour, "width": 1.25 if is_ideal else 2, "dash": dash},
            "marker": {"size": 4 if is_short else 7, "color": colour},
        }
        if has_band:
            trace["customdata"] = [[low[at], high[at]] for at in range(len(x))]
            hover += f"<br>runs: %{{customdata[0]:{_NUMBER}}} to %{{customdata[1]:{_NUMBER}}}"
            if self.style == "points":
                trace["error_y"] = _error_bars(self.line, axes.y.factor, colour)
        return [*traces, trace | {"hovertemplate": f"{hover}<extra></extra>"}]

    @staticmethod
    def _scaled(values: Sequence[float], kept: Sequence[int], axes: _Axes) -> list[float | None]:
        numbers = short([values[index] / axes.y.factor for index in kept])
        return [None if axes.is_log_y and number <= 0 else number for number in numbers]


def _error_bars(line: Line, factor: float, colour: str) -> dict[str, Any]:
    above = short([(high - mean) / factor for high, mean in zip(line.high, line.mean, strict=True)])
    below = short([(mean - low) / factor for low, mean in zip(line.low, line.mean, strict=True)])
    style = {"type": "data", "symmetric": False, "color": colour, "thickness": 1, "width": 3}
    return style | {"array": [max(0, each) for each in above], "arrayminus": [max(0, each) for each in below]}


def axis_name(axis: str) -> str:
    """What an axis is called for people."""
    return AXES[axis][0] if axis in AXES else key_words(axis)


def _axis_words(axis: str, unit: str, own: str) -> str:
    return sentence_case(axis_name(axis)) + (f" ({unit})" if unit and unit != own else "")


def _wants_log(values: Sequence[float]) -> tuple[bool, bool]:
    """Whether a logarithmic axis shows them better, and whether it leaves zeros out."""
    positive = [value for value in values if value > 0]
    if len(positive) < 0.5 * len(values) or not positive or min(values) < 0:
        return False, False
    return max(positive) > 5 * LOG_RATIO * min(positive), len(positive) < len(values)


# --- rows, each under its label ---

_ROW = 16
"""Pixels of a label's line, and of the marks of one report below it."""


@dataclass(frozen=True)
class IntervalBar:
    """A value with its interval, or without; `note` stands beside the label."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    colour: int = 0
    metric: str = ""
    unit: str = ""
    is_reach: bool = False
    """Whether the ends are the least and the most that was measured, and no interval."""


FEW = 7
"""Up to so many measurements of one run are said to reach from their least to their most."""


def bar_of(row: Row, label: str, colour: int = 0, least_deviation: float = 0.0) -> IntervalBar:
    """The mean over the starts with its 95 % interval, or of a single one how far its few samples reach.

    `least_deviation` is the share of the mean that a start deviates by at least, as in `lead_of`.
    """
    medians = start_medians(row)
    mean, is_single = mean_of(medians), len(medians) < 2
    half = half_interval(medians, 0.0, least_deviation * abs(mean))
    low, high = (None, None) if is_single else (mean - half, mean + half)
    note = "one run" if is_single else f"{len(medians)} runs"
    is_few = is_single and 1 < len(row.samples) <= FEW and min(row.samples) < max(row.samples)
    if is_few:
        note += f", {len(row.samples)} measurements"
        low, high = min(row.samples), max(row.samples)
    return IntervalBar(label, mean, low, high, note, colour, row.metric, row.unit, is_few)


def bars_figure(bars: Sequence[IntervalBar], what: str = "") -> Figure:
    """A bar for each label from zero, its interval as a line; those without a value say why in their note.

    `what` names the axis where the bars are of several metrics.
    """
    first = bars[0]
    scale = scale_of(first.metric, first.unit, [bar.value for bar in bars if bar.value is not None])
    labels, traces = [], []
    for number, bar in enumerate(bars):
        if bar.value is None:
            labels.append(f"{bar.label}: {bar.note}")
            continue
        about = scale.format(bar.value)
        if bar.low is not None and bar.high is not None:
            is_even = not bar.is_reach and math.isclose(
                bar.high - bar.value, bar.value - bar.low, rel_tol=1e-6, abs_tol=1e-12
            )
            about += (
                f" ± {scale.number(bar.high - bar.value)}"
                if is_even
                else f" ({scale.number(bar.low)} to {scale.number(bar.high)})"
            )
        about += f" · {bar.note}" if bar.note else ""
        labels.append(f"{bar.label}: {about}")
        colour = shade(bar.colour)
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": _safe(bar.label),
            "x": short([bar.value / scale.factor]),
            "y": [number + 0.5],
            "width": 0.3,
            "marker": {"color": _faded(colour, 0.75)},
            "hovertemplate": f"<b>{_safe(bar.label)}</b><br>{_safe(about)}<extra></extra>",
        }
        if bar.low is not None and bar.high is not None:
            # an interval that reaches below zero is cut where the bar begins
            low, high = (max(0.0, bar.low) if bar.value >= 0 else bar.low), bar.high
            trace["error_x"] = {
                "type": "data", "symmetric": False, "color": PALETTE["ink"], "thickness": 1.5, "width": 4,
                "array": short([(high - bar.value) / scale.factor]),
                "arrayminus": short([(bar.value - low) / scale.factor]),
            }  # fmt: skip
        traces.append(trace)
    title = _with_unit(what or sentence_case(metric_words(first.metric)), scale.unit)
    x = {"title": _title(title), "rangemode": "tozero", "zeroline": False}
    return {"data": traces, "layout": _stacked("bars", labels, 1, x)}


def rows_figure(
    unit_of: Group,
    labels: Sequence[str],
    rows: Sequence[Sequence[Row | None]],
    reports: Sequence[tuple[str, int]],
) -> Figure:
    """All rows of a metric on one axis; a line of `rows` has one row for each report, or None.

    Percentiles are drawn where there are samples enough for them; the samples themselves where there are not.
    """
    metric, unit, _ = unit_of
    medians = [percentile(row.samples, 50) for line in rows for row in line if row is not None and row.starts]
    positive = [median for median in medians if median > 0]
    is_log = len(positive) == len(medians) > 0 and max(medians) > LOG_RATIO * min(medians)
    scale = scale_of(metric, unit, medians)
    traces: list[dict[str, Any]] = []
    count, named = len(reports), []
    for line, label in zip(rows, labels, strict=True):
        failed = any(row is not None and row.error is not None for row in line)
        named.append(label + (": failed" if failed else ""))
    for number, (name, colour) in enumerate(reports):
        marks = _Marks(is_log)
        for place, line in enumerate(rows):
            row = line[number]
            if row is not None and row.starts:
                at = place + 0.5 + 0.3 * (number - (count - 1) / 2) / max(count, 2)
                marks.add(
                    row, at, scale, f"<b>{_safe(labels[place])}</b>{f' · {_safe(name)}' if name else ''}"
                )
        traces += marks.traces(shade(colour), name)
    words = _axis_title(metric, scale.unit) + (", logarithmic" if is_log else "")
    x: dict[str, Any] = {"title": _title(words), "zeroline": False}
    values = [value for trace in traces for value in trace["x"] if value is not None]
    if is_log:
        x |= _decades([value for value in values if value > 0])
    elif values and min(values) < max(values):
        margin = 0.04 * (max(values) - min(values))
        x["range"] = [min(values) - margin, max(values) + margin]
    return {"data": traces, "layout": _stacked("rows", named, count, x)}


class _Marks:
    """The marks of one report: dots for medians, lines for the middle half and for nine tenths."""

    def __init__(self, is_log: bool) -> None:
        self._is_log = is_log
        self._segments: dict[str, tuple[list[float | None], list[float | None]]] = {
            "thin": ([], []),
            "thick": ([], []),
        }
        self._samples: tuple[list[float], list[float]] = ([], [])
        self._dots: tuple[list[float], list[float], list[str]] = ([], [], [])

    def add(self, row: Row, at: float, scale: Scale, name: str) -> None:
        samples = row.samples
        median = percentile(samples, 50)
        lines = [name, f"median <b>{_safe(scale.format(median))}</b>"]
        for kind, low, high in (("thick", 25, 75), ("thin", 5, 95)):
            if is_known(len(samples), high):
                ends = short([end / scale.factor for end in percentiles(samples, (low, high))])
                if not self._is_log or min(ends) > 0:
                    self._segments[kind][0].extend((*ends, None))
                    self._segments[kind][1].extend((at, at, None))
                shown = " to ".join(scale.number(end * scale.factor) for end in ends)
                lines.append(f"p{low} to p{high}: {shown} {_safe(scale.unit)}")
        if len(samples) > 1 and not is_known(len(samples), 75):
            kept = [sample for sample in samples if not self._is_log or sample > 0]
            self._samples[0].extend(short([sample / scale.factor for sample in kept]))
            self._samples[1].extend([at] * len(kept))
        lines.append(f"{counted(len(samples), 'measurement')} of {counted(len(row.starts), 'run')}")
        self._dots[0].extend(short([median / scale.factor]))
        self._dots[1].append(at)
        self._dots[2].append("<br>".join(lines))

    def traces(self, colour: str, name: str) -> list[dict[str, Any]]:
        """Only those that draw anything."""
        base = {"type": "scatter", "name": _safe(name)}
        found = []
        for kind, width, opacity in (("thin", 1.25, 0.55), ("thick", 5, 0.45)):
            x, y = self._segments[kind]
            if x:
                line = {"color": colour, "width": width}
                found.append(base | {"mode": "lines", "x": x, "y": y, "line": line, "opacity": opacity})
                found[-1]["hoverinfo"] = "skip"
        if self._samples[0]:
            marker = {"color": colour, "size": 6, "opacity": 0.6, "symbol": "circle-open"}
            found.append(
                base | {"mode": "markers", "x": self._samples[0], "y": self._samples[1], "marker": marker}
            )
            found[-1]["hoverinfo"] = "skip"
        if self._dots[0]:
            at_x, at_y, text = self._dots
            marker = {"color": colour, "size": 8}
            found.append(base | {"mode": "markers", "x": at_x, "y": at_y, "text": text, "marker": marker})
            found[-1]["hovertemplate"] = "%{text}<extra></extra>"
        return found


def _stacked(kind: str, labels: Sequence[str], num_marks: int, x: dict[str, Any]) -> dict[str, Any]:
    """Rows below each other, each label above its marks: readable at any width, and never cut."""
    row = _ROW * (1 + num_marks) + 10
    annotations = [
        {
            "xref": "paper", "x": 0, "xanchor": "left", "yref": "y", "y": place + 0.5, "yanchor": "bottom",
            "yshift": _ROW * num_marks / 2, "showarrow": False, "text": _safe(label), "align": "left",
            "font": {"size": 11.5},
        }
        for place, label in enumerate(labels)
    ]  # fmt: skip
    y = {
        "range": [len(labels), 0],
        "showgrid": False,
        "zeroline": False,
        "showticklabels": False,
        "fixedrange": True,
    }
    return _layout(
        kind,
        row * len(labels) + 60,
        xaxis=x,
        yaxis=y,
        annotations=annotations,
        meta={"labels": list(labels), "marks": num_marks},
    ) | {"margin": {"l": 6, "r": 14, "t": 14, "b": 36}}


def changes_figure(labels: Sequence[str], rows: Sequence[RowDiff]) -> Figure:
    """The change of every row of a comparison with its interval, in percent; left of zero is worse."""
    traces: list[dict[str, Any]] = []
    reach = 2.0
    for place, (label, row) in enumerate(zip(labels, rows, strict=True)):
        found = row.judgement
        change, low, high = found.change_percent, found.low_percent, found.high_percent
        if change is None:
            continue
        colour, at = PALETTE[TONES[row.verdict]], place + 0.5
        inside = PALETTE["paper"]
        if low is not None and high is not None:
            inside, line = colour, {"color": colour, "width": 2.5}
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "x": short([low, high]), "y": [at, at],
                    "line": line, "hoverinfo": "skip",
                }
            )  # fmt: skip
        marker = {"size": 9, "color": inside, "line": {"color": colour, "width": 2}}
        hover = f"<b>{_safe(label)}</b><br>{_safe(verdict_text(row))}<extra></extra>"
        traces.append(
            {
                "type": "scatter", "mode": "markers", "x": short([change]), "y": [at], "marker": marker,
                "hovertemplate": hover, "meta": {"verdict": row.verdict.value},
            }
        )  # fmt: skip
        reach = max(reach, abs(change), abs(low or 0.0), abs(high or 0.0))
    x = {
        "title": _title("Change of the median; left of zero is worse"), "ticksuffix": "%",
        "range": [-1.08 * reach, 1.08 * reach], "zeroline": True, "zerolinewidth": 1.5,
    }  # fmt: skip
    return {"data": traces, "layout": _stacked("changes", labels, 1, x)}


# --- bars beside each other, samples, counts, who waited ---


def percentiles_figure(row_of: Group, named: Sequence[tuple[str, int, Row]]) -> Figure:
    """Percentiles of several rows beside one another; those without samples enough are left out."""
    metric, unit, _ = row_of
    scale = scale_of(metric, unit, named[0][2].samples if named else ())
    traces = []
    for name, colour, row in named:
        known = known_percentiles(row.samples)
        values = list(known.values())
        shown = [scale.number(value) for value in values]
        traces.append(
            {
                "type": "bar", "name": _safe(name), "x": [f"p{q}" for q in known],
                "y": short([value / scale.factor for value in values]), "marker": {"color": shade(colour)},
                "text": shown, "textposition": "outside", "cliponaxis": False, "textfont": {"size": _SMALL},
                "hovertemplate": f"<b>{_safe(name)}</b> %{{x}}: %{{text}} {_safe(scale.unit)}<extra></extra>",
            }
        )  # fmt: skip
    x = {"type": "category", "categoryarray": [f"p{q}" for q in PERCENTILES], "showgrid": False}
    y = {"title": _title(_axis_title(metric, scale.unit)), "rangemode": "tozero", "zeroline": False}
    layout = _layout("percentiles", 290, xaxis=x, yaxis=y, barmode="group", bargap=0.28, bargroupgap=0.06)
    return {"data": traces, "layout": layout | {"margin": {"l": 6, "r": 12, "t": 22, "b": 30}}}


def quantiles_figure(named: Sequence[tuple[str, int, Row]]) -> Figure:
    """The share of samples up to each time, a line for each row, as far as its samples reach."""
    found = []
    for name, colour, row in named:
        qs = [q for q in range(100) if is_known(len(row.samples), q)]
        found.append((name, colour, qs, percentiles(row.samples, qs)))
    ends = [end for *_, values in found for end in (values[0], values[-1])]
    scale = scale_for(named[0][2].unit, percentile(ends, 50))
    is_log = min(ends) > 0 and max(ends) > LOG_RATIO * min(ends)
    traces = []
    for series, (name, colour, qs, values) in enumerate(found):
        hover = f"<b>{_safe(name)}</b><br>%{{y}} % within %{{x:{_NUMBER}}} {_safe(scale.unit)}<extra></extra>"
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": _safe(name), "meta": {"series": series},
                "x": short([value / scale.factor for value in values]), "y": qs,
                "line": {"color": shade(colour), "width": 2}, "hovertemplate": hover,
            }
        )  # fmt: skip
    words = sentence_case(metric_words(named[0][2].metric))
    x: dict[str, Any] = {
        "title": _title(f"{words} ({scale.unit}){', logarithmic' if is_log else ''}"), "zeroline": False,
    }  # fmt: skip
    if is_log:
        x |= _decades([end / scale.factor for end in ends])
    y = {
        "range": [0, 101], "tickvals": [0, 25, 50, 75, 100], "zeroline": False,
        "title": _title(f"Share of {'calls' if named[0][2].metric == 'latency' else 'measurements'} (%)"),
    }  # fmt: skip
    return {"data": traces, "layout": _layout("quantiles", 300, xaxis=x, yaxis=y)}


def samples_figure(
    metric: str, unit: str, reports: Sequence[tuple[str, int, Row | None]], share: int
) -> Figure:
    """All samples of one row by process start, in every report; of each start at most `share` are drawn."""
    present = [row for _, _, row in reports if row is not None and row.starts]
    scale = scale_of(metric, unit, present[0].samples if present else ())
    traces, shapes, annotations, ticks = [], [], [], []
    offset, unit_words = 0, _safe(scale.unit)
    for name, number, row in reports:
        if row is None or not row.starts:
            continue
        colour, x, y, starts = shade(number), [], [], []
        for start, samples in enumerate(row.starts, 1):
            kept = thin(samples, share)
            for index, sample in enumerate(kept):
                along = index / (len(kept) - 1) - 0.5 if len(kept) > 1 else 0.0
                x.append(round(offset + start + 0.76 * along, 3))
                y.append(sample / scale.factor)
                starts.append(start)
            ticks.append((offset + start, str(start)))
        traces.append(
            {
                "type": "scatter", "mode": "markers", "x": x, "y": short(y), "customdata": starts,
                "marker": {"color": colour, "size": 3.5, "opacity": 0.4},
                "hovertemplate": f"run %{{customdata}}: %{{y:{_NUMBER}}} {unit_words}<extra></extra>",
            }
        )  # fmt: skip
        for start, median in enumerate(start_medians(row), 1):
            at = median / scale.factor
            line = {"color": colour, "width": 2.5}
            ends = {"x0": offset + start - 0.4, "x1": offset + start + 0.4, "y0": at, "y1": at}
            shapes.append({"type": "line", "line": line, **ends})
        at = percentile(row.samples, 50) / scale.factor
        line = {"color": PALETTE["muted"], "width": 1, "dash": "dot"}
        ends = {"x0": offset + 0.5, "x1": offset + len(row.starts) + 0.5, "y0": at, "y1": at}
        shapes.append({"type": "line", "line": line, **ends})
        if len(reports) > 1:
            annotations.append(
                {
                    "xref": "x", "x": offset + 0.6, "xanchor": "left", "yref": "paper", "y": 1,
                    "yanchor": "bottom", "showarrow": False, "text": f"<b>{_safe(name)}</b>",
                    "font": {"color": colour, "size": 12},
                }
            )  # fmt: skip
        offset += len(row.starts) + 1
    xaxis = {
        "title": _title("Run"), "range": [0.3, max(offset - 0.3, 1.7)], "showgrid": False,
        "tickvals": [at for at, _ in ticks], "ticktext": [text for _, text in ticks], "zeroline": False,
    }  # fmt: skip
    yaxis = {"title": _title(_axis_title(metric, scale.unit)), "zeroline": False}
    layout = _layout("samples", 300, xaxis=xaxis, yaxis=yaxis, shapes=shapes, annotations=annotations)
    return {"data": traces, "layout": layout | {"margin": {"l": 6, "r": 12, "t": 26, "b": 40}}}


def thin(samples: Sequence[float], limit: int) -> list[float]:
    """At most `limit` samples, evenly spaced in time, the smallest and largest among them."""
    if len(samples) <= limit:
        return list(samples)
    keep = {round(index * (len(samples) - 1) / (limit - 3)): True for index in range(limit - 2)}
    keep[min(range(len(samples)), key=lambda index: samples[index])] = True
    keep[max(range(len(samples)), key=lambda index: samples[index])] = True
    return [samples[index] for index in sorted(keep)]


def histogram_figure(histogram: Histogram, colour: int, axis: str, what: str) -> Figure:
    """Which share of all is in each class; `axis` names what is counted, `what` follows a class's name."""
    total = histogram.total or 1.0
    classes = list(histogram.counts)
    shares = [100 * count / total for count in histogram.counts.values()]
    names = [histogram.name(each) + ("" if histogram.is_ahead(each) else what) for each in classes]
    text = [
        f"{name}: <b>{share:.3g}%</b><br>{count:,.0f} in all runs"
        for name, share, count in zip(names, shares, histogram.counts.values(), strict=True)
    ]
    trace = {
        "type": "bar", "x": [behind + (histogram.width - 1) / 2 for behind in classes], "y": short(shares),
        "width": 0.92 * histogram.width, "marker": {"color": shade(colour)}, "text": text,
        "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    # every bar has its tick: the page thins them where there is no room
    ticks = list(range(min(classes), max(*classes, min(classes) + 5 * histogram.width) + 1, histogram.width))
    x: dict[str, Any] = {
        "title": _title(axis), "zeroline": False, "showgrid": False,
        "tickvals": [tick + (histogram.width - 1) / 2 for tick in ticks],
        "ticktext": list(map(histogram.name, ticks)),
        "range": [ticks[0] - 0.5, ticks[-1] + histogram.width - 0.5],
    }  # fmt: skip
    y = {"title": _title("Share of all (%)"), "rangemode": "tozero", "zeroline": False}
    return {"data": [trace], "layout": _layout("histogram", 260, xaxis=x, yaxis=y)}


def waits_figure(
    names: Sequence[str], values: Sequence[Sequence[float | None]], scale: Scale, longest: float
) -> Figure:
    """A square for each pair: who stands in the row waited for who stands in the column, in `scale`."""
    x, y, waits, hover = [], [], [], []
    nobody: tuple[list[int], list[int]] = ([], [])
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value is not None:
                x.append(column)
                y.append(row)
                waits.append(value / scale.factor)
                waited = f"{_safe(names[row])} waited <b>{_safe(scale.format(value))}</b>"
                hover.append(f"{waited} for {_safe(names[column])}")
            elif row != column:
                nobody[0].append(column)
                nobody[1].append(row)
    most = longest / scale.factor or 1.0
    trace = {
        "type": "scatter", "mode": "markers+text", "x": x, "y": y, "customdata": hover,
        "text": [f"{value:.2g}" for value in waits],
        "textfont": {
            "size": _SMALL,
            # on a square of nearly full colour, ink cannot be read
            "color": [PALETTE["paper" if value > 0.65 * most else "ink"] for value in waits],
        },
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "symbol": "square", "size": 40, "color": short(waits), "cmin": 0,
            "cmax": most, "showscale": False, "line": {"width": 0},
            "colorscale": [[0, PALETTE["faint"]], [1, PALETTE["s0"]]],
        },
    }  # fmt: skip
    blank = {
        "type": "scatter", "mode": "text", "x": nobody[0], "y": nobody[1], "text": ["–"] * len(nobody[0]),
        "textfont": {"size": _SMALL, "color": PALETTE["muted"]}, "hoverinfo": "skip", "marker": {"size": 40},
    }  # fmt: skip
    ticks = {"tickvals": list(range(len(names))), "ticktext": list(map(_safe, names))}
    count = len(names)
    shared = {**ticks, "showgrid": False, "zeroline": False, "fixedrange": True}
    xaxis = {**shared, "title": _title("For which worker"), "range": [-0.5, count - 0.5]}
    yaxis = {**shared, "title": _title("Worker that waited"), "range": [count - 0.5, -0.5]}
    layout = _layout("waits", 44 * count + 62, xaxis=xaxis, yaxis=yaxis, meta={"cells": count})
    return {"data": [trace, blank] if nobody[0] else [trace], "layout": layout}
