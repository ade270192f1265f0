"""Figures of plotly as plain dictionaries: a page draws them, and `Report.figure` returns them.

Colours are those of a page's light theme: the page exchanges them where it is dark, and fits ticks and labels
to its width (`assets/drawing.js`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shoal.core.errors import UsageError, did_you_mean
from shoal.report.curves import WORKERS, Histogram, Line, averaged, axes_of
from shoal.report.diff import RowDiff
from shoal.report.schema import Curve, Report, Row, Scalar, library
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
from shoal.report.units import Scale, counted, scale_for
from shoal.report.views import Group, group_of, shared_key, short_label, verdict_text
from shoal.report.words import benchmark_words, key_words, metric_title, metric_words, scale_of, sentence_case

Trace = dict[str, Any]
Figure = dict[str, Any]
"""`data` and `layout` as plotly has them. `layout.meta` says what kind it is and what a page has to fit."""

# --- from Python ---


def figure(report: Report, metric: str | None = None, over: str | None = None) -> Any:
    """A figure of plotly: a line with its band for each curve of a metric, or else a bar for each row.

    `metric` is the first curve's, or the first row's, unless it is given; `over` is the axis of curves (`s`,
    `bytes`, `step`, …). UsageError for what the report does not have, ReportError where plotly is missing.
    """
    plotly = library("plotly.graph_objects", "pip install 'shoal[report]'")
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


def short(values: Iterable[float]) -> list[float]:
    """Numbers in as many digits as a picture shows, so that pages stay small."""
    rounded = [found if math.isfinite(found := float(f"{value:.4g}")) else value for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _safe(words: str) -> str:
    """Words of a report in a text of plotly, which knows some markup and templates."""
    return escape(words, quote=False).replace("%{", "&#37;{")


def _figure(
    kind: str,
    height: float,
    traces: list[Trace],
    x: dict[str, Any],
    y: dict[str, Any],
    margin: Mapping[str, int] | None = None,
    **layout: Any,
) -> Figure:
    """A figure of some height in pixels; `layout` may have what `meta` says beside the kind."""
    layout = {
        "height": height,
        "margin": {"l": 6, "r": 14, "t": 8, "b": 36, **(margin or {})},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": x,
        "yaxis": y,
        **layout,
        "meta": {"kind": kind, **layout.get("meta", {})},
    }
    return {"data": traces, "layout": layout}


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": _safe(title), "standoff": 6}, "zeroline": False, **more}


def _points(mode: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    """A trace of plotly's kind 'scatter': lines, markers or text at points."""
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **more}


def _bars(x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Trace:
    return {"type": "bar", "x": x, "y": y, "marker": {"color": colour}, **more}


def _note(text: str, x: float, y: float, yref: str = "paper", **more: Any) -> dict[str, Any]:
    """An annotation without an arrow, above its place."""
    return {"x": x, "y": y, "yref": yref, "yanchor": "bottom", "showarrow": False, "text": text, **more}


def _whiskers(
    values: Sequence[float], lows: Sequence[float], highs: Sequence[float], factor: float, **look: Any
) -> dict[str, Any]:
    """Error bars from the lows to the highs."""
    above = short((high - value) / factor for high, value in zip(highs, values, strict=True))
    below = short((value - low) / factor for low, value in zip(lows, values, strict=True))
    ends = {"array": [max(0, each) for each in above], "arrayminus": [max(0, each) for each in below]}
    return {"type": "data", "symmetric": False, **look, **ends}


def _decades(values: Iterable[float]) -> dict[str, Any]:
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


def _with_unit(words: str, unit: str) -> str:
    """A title of an axis; words of rates say themselves that they are of a second."""
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
        title = _with_unit(metric_title(self.metric), scale.unit)
        is_log, has_zeros = _wants_log(values)
        y = _axis(title)
        if is_log:
            title += ", logarithmic" + (", without zeros" if has_zeros else "")
            y = _axis(title, **_decades(value / scale.factor for value in values if value > 0))
        elif len(self.axes) == 1 and values and min(values) >= 0:
            y["rangemode"] = "tozero"
        pairs = zip(self.axes, self.lines, strict=True)
        return [self._along(axis, lines, y, scale, series, is_log=is_log) for axis, lines in pairs]

    def _along(
        self,
        axis: str,
        lines: Sequence[_Drawn],
        y: dict[str, Any],
        scale: Scale,
        series: Sequence[tuple[str, int]],
        *,
        is_log: bool,
    ) -> Figure:
        ends = [end for drawn in lines if (end := max(drawn.line.x)) > 0]
        unit = AXES.get(axis, ("", ""))[1]
        along = scale_for(unit, max(ends, default=1.0))
        # those who send much and those who send little are both to be seen
        is_log_x = axis == "bytes" and bool(ends) and max(ends) > LOG_RATIO / 2 * min(ends)
        x = _axis(sentence_case(axis_title(axis, along.unit)))
        places = [value / along.factor for drawn in lines for value in drawn.line.x if value > 0]
        if axis in (WORKERS, "num_clients") and places:
            x |= _doublings(places)
        elif is_log_x:
            x |= _decades(places)
        axes = _Axes(along, scale, axis, is_log_x, is_log)
        traces = [trace for drawn in lines for trace in drawn.traces(series, axes)]
        unseen = [
            series[drawn.series][0] for drawn in lines if drawn.series >= 0 and not any(drawn.line.mean)
        ]
        if not is_log or not unseen:
            return _figure("lines", 300, traces, x, y)
        said = f"{' and '.join(map(_safe, dict.fromkeys(unseen)))}: always 0, not drawn"
        font = {"size": _SMALL, "color": PALETTE["muted"]}
        note = _note(said, 1, 1.02, xref="paper", xanchor="right", font=font)
        return _figure("lines", 300, traces, x, y, {"t": 22}, annotations=[note])


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

    def traces(self, series: Sequence[tuple[str, int]], axes: _Axes) -> list[Trace]:
        """The line, after its band where it has one."""
        is_ideal = self.style == "ideal"
        name, number = ("ideal", 0) if is_ideal else series[self.series]
        colour = PALETTE["muted"] if is_ideal else shade(number)
        about: dict[str, Any] = {"legendgroup": name, "meta": {"series": self.series}}
        kept = [index for index, x in enumerate(self.line.x) if x > 0 or not axes.is_log_x]
        x = short(self.line.x[index] / axes.x.factor for index in kept)
        y, low, high = (
            [
                None if axes.is_log_y and number <= 0 else number
                for number in short(side[index] / axes.y.factor for index in kept)
            ]
            for side in (self.line.mean, self.line.low, self.line.high)
        )
        traces = []
        has_band = self.line.has_band and not is_ideal
        if has_band and self.style == "line":
            whole = [at for at in range(len(x)) if low[at] is not None and high[at] is not None]
            there_and_back = [x[at] for at in whole] + [x[at] for at in reversed(whole)]
            edge = [high[at] for at in whole] + [low[at] for at in reversed(whole)]
            band: dict[str, Any] = {"fill": "toself", "fillcolor": _faded(colour, 0.14), "line": {"width": 0}}
            band |= {"hoverinfo": "skip", "showlegend": False}
            traces.append(_points("lines", there_and_back, edge, **about, **band))
        is_short = len(x) < 25 and self.style == "line"
        dash = {"ideal": "dot", "predicted": "dash"}.get(self.style, _DASHES[self.report % len(_DASHES)])
        said = f"{_safe(name)}{', predicted' if self.style == 'predicted' else ''}"
        where = f"%{{x:{_NUMBER}}} {_safe(axes.x.unit or axis_name(axes.along))}"
        hover = f"<b>{said}</b><br>%{{y:{_NUMBER}}} {_safe(axes.y.unit)} at {where}"
        more: dict[str, Any] = {}
        if has_band:
            hover += f"<br>runs: %{{customdata[0]:{_NUMBER}}} to %{{customdata[1]:{_NUMBER}}}"
            more["customdata"] = [list(ends) for ends in zip(low, high, strict=True)]
        if has_band and self.style == "points":
            mean, least, most = self.line.mean, self.line.low, self.line.high
            look = {"color": colour, "thickness": 1, "width": 3}
            more["error_y"] = _whiskers(mean, least, most, axes.y.factor, **look)
        line = _points(
            "lines+markers" if self.style == "points" or is_short else "lines",
            x,
            y,
            name=_safe(name),
            line={"color": colour, "width": 1.25 if is_ideal else 2, "dash": dash},
            marker={"size": 4 if is_short else 7, "color": colour},
            hovertemplate=f"{hover}<extra></extra>",
            **about,
            **more,
        )
        return [*traces, line]


def axis_name(axis: str) -> str:
    """What an axis is called for people."""
    return AXES[axis][0] if axis in AXES else key_words(axis)


def axis_title(axis: str, unit: str) -> str:
    """What an axis is called where its values are in `unit`: seconds in ms are 'time (ms)'."""
    own = AXES.get(axis, ("", ""))[1]
    if unit in {"", own}:
        return axis_name(axis)
    return f"{'time' if axis == 's' else axis_name(axis)} ({unit})"


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
    ends: tuple[float, float] | None = None
    note: str = ""
    colour: int = 0
    metric: str = ""
    unit: str = ""
    is_reach: bool = False
    """Whether the ends are the least and the most that was measured, and no interval."""

    def said(self, scale: Scale) -> str:
        """What stands in its label: '2.00 s ± 0.48 · 3 runs'; a bar without a value has its note alone."""
        if self.value is None:
            return self.note
        said = scale.format(self.value)
        if self.ends is not None:
            low, high = self.ends
            above, below = high - self.value, self.value - low
            if not self.is_reach and math.isclose(above, below, rel_tol=1e-6, abs_tol=1e-12):
                said += f" ± {scale.number(above)}"
            else:
                said += f" ({scale.number(low)} to {scale.number(high)})"
        return said + (f" · {self.note}" if self.note else "")


FEW = 7
"""Up to so many measurements of one run are said to reach from their least to their most."""


def bar_of(row: Row, label: str, colour: int = 0, least_deviation: float = 0.0) -> IntervalBar:
    """The mean over the starts with its 95 % interval, or of a single one how far its few samples reach.

    `least_deviation` is the share of the mean that a start deviates by at least, as in `lead_of`.
    """
    medians = start_medians(row)
    mean = mean_of(medians)
    if len(medians) > 1:
        half = half_interval(medians, 0.0, least_deviation * abs(mean))
        ends, note = (mean - half, mean + half), f"{len(medians)} runs"
        return IntervalBar(label, mean, ends, note, colour, row.metric, row.unit)
    if not 1 < len(row.samples) <= FEW or min(row.samples) == max(row.samples):
        return IntervalBar(label, mean, None, "one run", colour, row.metric, row.unit)
    ends, note = (min(row.samples), max(row.samples)), f"one run, {len(row.samples)} measurements"
    return IntervalBar(label, mean, ends, note, colour, row.metric, row.unit, is_reach=True)


def bars_figure(bars: Sequence[IntervalBar], what: str = "") -> Figure:
    """A bar for each label from zero, its interval as a line; those without a value say why in their note.

    `what` names the axis where the bars are of several metrics.
    """
    first = bars[0]
    scale = scale_of(first.metric, first.unit, [bar.value for bar in bars if bar.value is not None])
    traces: list[Trace] = []
    for place, bar in enumerate(bars):
        if bar.value is None:
            continue
        name, colour = _safe(bar.label), _faded(shade(bar.colour), 0.75)
        hover = f"<b>{name}</b><br>{_safe(bar.said(scale))}<extra></extra>"
        about: dict[str, Any] = {"name": name, "orientation": "h", "width": 0.3, "hovertemplate": hover}
        trace = _bars(short([bar.value / scale.factor]), [place + 0.5], colour, **about)
        if bar.ends is not None:
            # an interval that reaches below zero is cut where the bar begins
            low = max(0.0, bar.ends[0]) if bar.value >= 0 else bar.ends[0]
            look = {"color": PALETTE["ink"], "thickness": 1.5, "width": 4}
            trace["error_x"] = _whiskers([bar.value], [low], [bar.ends[1]], scale.factor, **look)
        traces.append(trace)
    x_axis = _axis(_with_unit(what or metric_title(first.metric), scale.unit), rangemode="tozero")
    return _stacked("bars", [f"{bar.label}: {bar.said(scale)}" for bar in bars], 1, traces, x_axis)


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
    is_log = bool(medians) and min(medians) > 0 and max(medians) > LOG_RATIO * min(medians)
    scale = scale_of(metric, unit, medians)
    count, traces = len(reports), []
    for number, (name, colour) in enumerate(reports):
        marks = _Marks(_safe(name), shade(colour), scale, is_log)
        for place, line in enumerate(rows):
            if (row := line[number]) is not None and row.starts:
                at = place + 0.5 + 0.3 * (number - (count - 1) / 2) / max(count, 2)
                marks.add(row, at, f"<b>{_safe(labels[place])}</b>{f' · {_safe(name)}' if name else ''}")
        traces += marks.traces()
    x = _axis(_with_unit(metric_title(metric), scale.unit) + (", logarithmic" if is_log else ""))
    values = [value for trace in traces for value in trace["x"] if value is not None]
    if is_log:
        x |= _decades(value for value in values if value > 0)
    elif values and min(values) < max(values):
        margin = 0.04 * (max(values) - min(values))
        x["range"] = [min(values) - margin, max(values) + margin]
    failed = [any(row is not None and row.error is not None for row in line) for line in rows]
    named = [label + ": failed" * each for label, each in zip(labels, failed, strict=True)]
    return _stacked("rows", named, count, traces, x)


class _Marks:
    """The marks of one report: dots for medians, lines for the middle half and for nine tenths."""

    def __init__(self, name: str, colour: str, scale: Scale, is_log: bool) -> None:
        self._scale, self._is_log = scale, is_log
        ring = {"color": colour, "size": 6, "opacity": 0.6, "symbol": "circle-open"}
        quiet = {"name": name, "hoverinfo": "skip"}
        self._nine_tenths = _points(
            "lines", [], [], line={"color": colour, "width": 1.25}, opacity=0.55, **quiet
        )
        self._middle_half = _points(
            "lines", [], [], line={"color": colour, "width": 5}, opacity=0.45, **quiet
        )
        self._samples = _points("markers", [], [], marker=ring, **quiet)
        dot = {"marker": {"color": colour, "size": 8}, "hovertemplate": "%{text}<extra></extra>"}
        self._medians = _points("markers", [], [], name=name, text=[], **dot)

    def add(self, row: Row, at: float, name: str) -> None:
        samples, scale = row.samples, self._scale
        median = percentile(samples, 50)
        said = [name, f"median <b>{_safe(scale.format(median))}</b>"]
        for trace, low, high in ((self._middle_half, 25, 75), (self._nine_tenths, 5, 95)):
            if is_known(len(samples), high):
                ends = short(end / scale.factor for end in percentiles(samples, (low, high)))
                if not self._is_log or min(ends) > 0:
                    trace["x"] += [*ends, None]
                    trace["y"] += [at, at, None]
                shown = " to ".join(scale.number(end * scale.factor) for end in ends)
                said.append(f"p{low} to p{high}: {shown} {_safe(scale.unit)}")
        if len(samples) > 1 and not is_known(len(samples), 75):
            kept = [sample / scale.factor for sample in samples if not self._is_log or sample > 0]
            self._samples["x"] += short(kept)
            self._samples["y"] += [at] * len(kept)
        said.append(f"{counted(len(samples), 'measurement')} of {counted(len(row.starts), 'run')}")
        self._medians["x"] += short([median / scale.factor])
        self._medians["y"].append(at)
        self._medians["text"].append("<br>".join(said))

    def traces(self) -> list[Trace]:
        """Only those that draw anything."""
        found = (self._nine_tenths, self._middle_half, self._samples, self._medians)
        return [trace for trace in found if trace["x"]]


def _stacked(
    kind: str, labels: Sequence[str], num_marks: int, traces: list[Trace], x: dict[str, Any]
) -> Figure:
    """Rows below each other, each label above its marks: readable at any width, and never cut."""
    row = _ROW * (1 + num_marks) + 10
    left = {"xref": "paper", "xanchor": "left", "align": "left", "font": {"size": 11.5}}
    annotations = [
        _note(_safe(label), 0, place + 0.5, "y", yshift=_ROW * num_marks / 2, **left)
        for place, label in enumerate(labels)
    ]
    y = {
        "range": [len(labels), 0],
        "showgrid": False,
        "zeroline": False,
        "showticklabels": False,
        "fixedrange": True,
    }
    meta = {"labels": list(labels), "marks": num_marks}
    return _figure(kind, row * len(labels) + 60, traces, x, y, {"t": 14}, annotations=annotations, meta=meta)


def changes_figure(labels: Sequence[str], rows: Sequence[RowDiff]) -> Figure:
    """The change of every row of a comparison with its interval, in percent; left of zero is worse."""
    traces: list[Trace] = []
    reach = 2.0
    for place, (label, row) in enumerate(zip(labels, rows, strict=True)):
        found = row.judgement
        change, low, high = found.change_percent, found.low_percent, found.high_percent
        if change is None:
            continue
        colour, at = PALETTE[row.verdict.tone], place + 0.5
        inside = PALETTE["paper"]
        if low is not None and high is not None:
            inside, line = colour, {"color": colour, "width": 2.5}
            traces.append(_points("lines", short([low, high]), [at, at], line=line, hoverinfo="skip"))
        marker = {"size": 9, "color": inside, "line": {"color": colour, "width": 2}}
        hover = f"<b>{_safe(label)}</b><br>{_safe(verdict_text(row))}<extra></extra>"
        meta = {"verdict": row.verdict.value}
        traces.append(
            _points("markers", short([change]), [at], marker=marker, hovertemplate=hover, meta=meta)
        )
        reach = max(reach, abs(change), abs(low or 0.0), abs(high or 0.0))
    x = _axis("Change of the median; left of zero is worse", ticksuffix="%", zeroline=True, zerolinewidth=1.5)
    return _stacked("changes", labels, 1, traces, x | {"range": [-1.08 * reach, 1.08 * reach]})


# --- bars beside each other, samples, counts, who waited ---


def percentiles_figure(row_of: Group, named: Sequence[tuple[str, int, Row]]) -> Figure:
    """Percentiles of several rows beside one another; those without samples enough are left out."""
    metric, unit, _ = row_of
    scale = scale_of(metric, unit, named[0][2].samples if named else ())
    traces: list[Trace] = []
    for name, colour, row in named:
        known = known_percentiles(row.samples)
        hover = f"<b>{_safe(name)}</b> %{{x}}: %{{text}} {_safe(scale.unit)}<extra></extra>"
        text = {"text": [scale.number(value) for value in known.values()], "textposition": "outside"}
        look = {"cliponaxis": False, "textfont": {"size": _SMALL}, "hovertemplate": hover}
        y = short(value / scale.factor for value in known.values())
        traces.append(_bars([f"p{q}" for q in known], y, shade(colour), name=_safe(name), **text, **look))
    x = {"type": "category", "categoryarray": [f"p{q}" for q in PERCENTILES], "showgrid": False}
    y_axis = _axis(_with_unit(metric_title(metric), scale.unit), rangemode="tozero")
    gaps = {"barmode": "group", "bargap": 0.28, "bargroupgap": 0.06}
    return _figure("percentiles", 290, traces, x, y_axis, {"r": 12, "t": 22, "b": 30}, **gaps)


def quantiles_figure(named: Sequence[tuple[str, int, Row]]) -> Figure:
    """The share of samples up to each time, a line for each row, as far as its samples reach."""
    found = []
    for name, colour, row in named:
        qs = [q for q in range(100) if is_known(len(row.samples), q)]
        found.append((_safe(name), {"color": shade(colour), "width": 2}, qs, percentiles(row.samples, qs)))
    ends = [end for *_, values in found for end in (values[0], values[-1])]
    first = named[0][2]
    scale = scale_for(first.unit, percentile(ends, 50))
    is_log = min(ends) > 0 and max(ends) > LOG_RATIO * min(ends)
    traces = []
    for series, (name, line, qs, values) in enumerate(found):
        hover = f"<b>{name}</b><br>%{{y}} % within %{{x:{_NUMBER}}} {_safe(scale.unit)}<extra></extra>"
        x = short(value / scale.factor for value in values)
        about: dict[str, Any] = {"name": name, "meta": {"series": series}, "line": line}
        traces.append(_points("lines", x, qs, hovertemplate=hover, **about))
    x_axis = _axis(f"{metric_title(first.metric)} ({scale.unit}){', logarithmic' if is_log else ''}")
    if is_log:
        x_axis |= _decades(end / scale.factor for end in ends)
    what = "calls" if first.metric == "latency" else "measurements"
    y_axis = _axis(f"Share of {what} (%)", range=[0, 101], tickvals=[0, 25, 50, 75, 100])
    return _figure("quantiles", 300, traces, x_axis, y_axis)


def samples_figure(
    metric: str, unit: str, reports: Sequence[tuple[str, int, Row | None]], share: int
) -> Figure:
    """All samples of one row by process start, in every report; of each start at most `share` are drawn."""
    present = [(name, shade(number), row) for name, number, row in reports if row is not None and row.starts]
    scale = scale_of(metric, unit, present[0][2].samples if present else ())
    traces, shapes, annotations = [], [], []
    ticks: dict[int, str] = {}
    offset = 0

    def level(value: float, colour: str, begin: float, end: float, **look: Any) -> None:
        """A line across some starts at a median."""
        at = {"x0": begin, "x1": end, "y0": value / scale.factor, "y1": value / scale.factor}
        shapes.append({"type": "line", "line": {"color": colour, **look}, **at})

    for name, colour, row in present:
        x: list[float] = []
        y: list[float] = []
        starts: list[int] = []
        for start, samples in enumerate(row.starts, 1):
            kept = thin(samples, share)
            last = max(1, len(kept) - 1)
            along = [index / last - 0.5 if len(kept) > 1 else 0.0 for index in range(len(kept))]
            x += [round(offset + start + 0.76 * each, 3) for each in along]
            y += [sample / scale.factor for sample in kept]
            starts += [start] * len(kept)
            ticks[offset + start] = str(start)
        marker = {"color": colour, "size": 3.5, "opacity": 0.4}
        hover = f"run %{{customdata}}: %{{y:{_NUMBER}}} {_safe(scale.unit)}<extra></extra>"
        traces.append(_points("markers", x, short(y), customdata=starts, marker=marker, hovertemplate=hover))
        for start, median in enumerate(start_medians(row), offset + 1):
            level(median, colour, start - 0.4, start + 0.4, width=2.5)
        whole = percentile(row.samples, 50)
        level(whole, PALETTE["muted"], offset + 0.5, offset + len(row.starts) + 0.5, width=1, dash="dot")
        if len(reports) > 1:
            look: dict[str, Any] = {"xref": "x", "xanchor": "left", "font": {"color": colour, "size": 12}}
            annotations.append(_note(f"<b>{_safe(name)}</b>", offset + 0.6, 1, **look))
        offset += len(row.starts) + 1
    x_axis = _axis("Run", range=[0.3, max(offset - 0.3, 1.7)], showgrid=False)
    x_axis |= {"tickvals": list(ticks), "ticktext": list(ticks.values())}
    y_axis = _axis(_with_unit(metric_title(metric), scale.unit))
    more = {"shapes": shapes, "annotations": annotations}
    return _figure("samples", 300, traces, x_axis, y_axis, {"r": 12, "t": 26, "b": 40}, **more)


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
    total, width = histogram.total or 1.0, histogram.width
    text, shares = [], []
    for each, count in histogram.counts.items():
        name = histogram.name(each) + ("" if histogram.is_ahead(each) else what)
        shares.append(100 * count / total)
        text.append(f"{name}: <b>{shares[-1]:.3g}%</b><br>{count:,.0f} in all runs")
    middle = (width - 1) / 2
    look = {"text": text, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    places = [each + middle for each in histogram.counts]
    bars = _bars(places, short(shares), shade(colour), width=0.92 * width, **look)
    # every bar has its tick: the page thins them where there is no room
    least, most = min(histogram.counts), max(histogram.counts)
    ticks = list(range(least, max(most, least + 5 * width) + 1, width))
    x = _axis(axis, showgrid=False, range=[ticks[0] - 0.5, ticks[-1] + width - 0.5])
    x |= {"tickvals": [tick + middle for tick in ticks], "ticktext": list(map(histogram.name, ticks))}
    return _figure("histogram", 260, [bars], x, _axis("Share of all (%)", rangemode="tozero"))


def waits_figure(
    names: Sequence[str], values: Sequence[Sequence[float | None]], scale: Scale, longest: float
) -> Figure:
    """A square for each pair: who stands in the row waited for who stands in the column, in `scale`."""
    safe, count = list(map(_safe, names)), len(names)
    cells = [(column, row, value) for row, line in enumerate(values) for column, value in enumerate(line)]
    waited = [(column, row, value) for column, row, value in cells if value is not None]
    never = [(column, row) for column, row, value in cells if value is None and row != column]
    most, waits = longest / scale.factor or 1.0, [value / scale.factor for *_, value in waited]
    # on a square of nearly full colour, ink cannot be read
    inks = [PALETTE["paper" if each > 0.65 * most else "ink"] for each in waits]
    marker = {"symbol": "square", "size": 40, "color": short(waits), "line": {"width": 0}, "showscale": False}
    marker |= {"cmin": 0, "cmax": most, "colorscale": [[0, PALETTE["faint"]], [1, PALETTE["s0"]]]}
    squares: Trace = {"marker": marker, "textfont": {"size": _SMALL, "color": inks}}
    squares |= {"text": [f"{each:.2g}" for each in waits], "hovertemplate": "%{customdata}<extra></extra>"}
    squares["customdata"] = [
        f"{safe[row]} waited <b>{_safe(scale.format(value))}</b> for {safe[column]}"
        for column, row, value in waited
    ]
    dashes: Trace = {"text": ["–"] * len(never), "textfont": {"size": _SMALL, "color": PALETTE["muted"]}}
    dashes |= {"hoverinfo": "skip", "marker": {"size": 40}}
    traces = [
        _points("markers+text", [cell[0] for cell in waited], [cell[1] for cell in waited], **squares),
        _points("text", [cell[0] for cell in never], [cell[1] for cell in never], **dashes),
    ]
    shared = {"tickvals": list(range(count)), "ticktext": safe, "showgrid": False, "fixedrange": True}
    x = _axis("For which worker", range=[-0.5, count - 0.5], **shared)
    y = _axis("Worker that waited", range=[count - 0.5, -0.5], **shared)
    traces = traces if never else traces[:1]
    return _figure("waits", 44 * count + 62, traces, x, y, meta={"cells": count})
