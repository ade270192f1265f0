"""Draws one metric of a report over one axis as an SVG image, for a README or a paper.

The image needs no script and no network. Every line is the mean over independent runs, with a band from the
lowest to the highest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.errors import ReportError
from shoal.report.curves import WORKERS, Line, averaged, axes_of
from shoal.report.html.figures import AXES, PALETTE, axis_title, shade
from shoal.report.html.markup import Markup, element, joined
from shoal.report.html.plots import Contest
from shoal.report.schema import Curve, Report
from shoal.report.units import scale_for

WIDTH, HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 170, 64, 52
_LOG_RATIO = 5
"""Lines whose ends lie further apart than this are drawn over a logarithmic axis."""
_LABEL_GAP = 17
"""The least vertical distance in pixels between two names at the ends of lines."""
_INK, _MUTED, _RULE = PALETTE["ink"], PALETTE["muted"], PALETTE["line"]


@dataclass(frozen=True)
class _Scale:
    """Maps values of one axis to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values between both ends, about five of them."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if self.high / self.low < 1e4 else (1,)
            marks = [factor * 10.0**decade for decade in decades for factor in factors]
            return [mark for mark in marks if self.low <= mark <= self.high]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (factor * step) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def draw(report: Report, metric: str | None = None, axis: str | None = None, title: str | None = None) -> str:
    """Return the SVG of one metric of the report's curves; the default is the first one, over seconds.

    Raises ReportError when the report has no such curves.
    """
    curves, axis = _chosen(report, metric, axis)
    contest = Contest(curve.key for curve in curves)
    lines = [
        (f"{contest.contender(curve.key)} {contest.setting(curve.key)}".strip() or curve.metric, line)
        for curve in curves
        if (line := averaged(curve, axis)) is not None
    ]
    unit = AXES.get(axis, ("", ""))[1]
    along = scale_for(unit, max(line.x[-1] for _, line in lines))
    label = axis_title(axis, along.unit)
    is_share = curves[0].unit in ("", "1") and all(
        0 <= value <= 1 for _, line in lines for value in line.high
    )
    ends_at = [line.x[-1] / along.factor for _, line in lines]
    # a run that is over soon would be a stroke at the left edge of a linear axis
    is_log = 0 < _LOG_RATIO * min(ends_at) < max(ends_at)
    x = _scale([v / along.factor for _, line in lines for v in line.x], _LEFT, WIDTH - _RIGHT, is_log=is_log)
    heights = [value for _, line in lines for value in (*line.low, *line.high)] + [1.0] * is_share
    y = _scale(heights, HEIGHT - _BOTTOM, _TOP)
    metric_label = curves[0].metric.replace("_", " ") + (f" ({curves[0].unit})" if curves[0].unit else "")
    runs = max(line.num_starts for _, line in lines)
    note = f"mean of {runs} runs, band: lowest to highest" if runs > 1 else "one run"
    along_x = label + (" (logarithmic)" if x.is_log else "")
    parts = [
        element("rect", width=WIDTH, height=HEIGHT, fill=PALETTE["paper"]),
        _text(_LEFT, 26, title or f"{metric_label} over {label}", size=17, weight=600),
        _text(_LEFT, 46, f"{metric_label} over {label}; {note}" if title else note, fill=_MUTED),
        *_grid(x, y, is_share=is_share),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 12, along_x, fill=_MUTED, anchor="middle"),
    ]
    ends: list[tuple[float, str, str]] = []
    for number, (contender, line) in enumerate(lines):
        colour = shade(number)
        scaled = [value / along.factor for value in line.x]
        parts += _drawn(scaled, line, x, y, colour)
        ends.append((y(line.mean[-1]), contender, colour))
    return (
        element(
            "svg",
            joined([*parts, *_names(ends)], "\n"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            width=WIDTH,
            height=HEIGHT,
            font_family="system-ui, -apple-system, Segoe UI, sans-serif",
            font_size=13,
            role="img",
            aria_label=title or metric_label,
        )
        + "\n"
    )


def _chosen(report: Report, metric: str | None, axis: str | None) -> tuple[list[Curve], str]:
    curves = [curve for curve in report.curves if any(name != WORKERS for name in axes_of([curve]))]
    if metric is None and curves:
        metric = curves[0].metric
    chosen = [curve for curve in curves if curve.metric == metric]
    axes = [name for name in axes_of(chosen) if name != WORKERS]
    if axis is None:
        axis = "s" if "s" in axes else next(iter(axes), None)
    chosen = [curve for curve in chosen if axis is not None and averaged(curve, axis) is not None]
    if axis is None or not chosen:
        known = ", ".join({curve.metric: True for curve in curves}) or "none"
        raise ReportError(
            f"the report of {report.benchmark} has no curve of {metric or 'a metric'} over {axis or 'time'}.",
            next_step=f"choose one of its curves: {known}; axes: {', '.join(axes_of(curves)) or 'none'}.",
        )
    return chosen, axis


def _scale(values: Sequence[float], start: float, end: float, *, is_log: bool = False) -> _Scale:
    if is_log:
        values = [value for value in values if value > 0]
    low, high = min(values), max(values)
    if is_log and low < high:
        return _Scale(low, high, start, end, is_log=True)
    if low > 0 and low < high / 2:
        low = 0.0
    if high - low <= abs(high) * 1e-9:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return _Scale(low, high, start, end)


def _grid(x: _Scale, y: _Scale, *, is_share: bool) -> list[Markup]:
    parts = []
    for tick in y.ticks:
        at = f"{y(tick):.1f}"
        parts.append(element("line", x1=x.start, x2=x.end, y1=at, y2=at, stroke=_RULE))
        label = f"{tick:.0%}" if is_share else f"{tick:,.6g}"
        parts.append(_text(x.start - 8, y(tick) + 4, label, fill=_MUTED, anchor="end"))
    parts += [_text(x(tick), y.start + 18, f"{tick:,.6g}", fill=_MUTED, anchor="middle") for tick in x.ticks]
    return [*parts, element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, stroke="#959da8")]


def _drawn(scaled: Sequence[float], line: Line, x: _Scale, y: _Scale, colour: str) -> list[Markup]:
    def points(values: Sequence[float]) -> list[str]:
        pairs = zip(scaled, values, strict=True)
        return [f"{x(at):.1f},{y(value):.1f}" for at, value in pairs if at > 0 or not x.is_log]

    parts = []
    if line.has_band:
        band = " ".join([*points(line.high), *reversed(points(line.low))])
        parts.append(element("polygon", points=band, fill=colour, opacity="0.13"))
    mean = " ".join(points(line.mean))
    parts.append(element("polyline", points=mean, fill="none", stroke=colour, stroke_width="2.2"))
    end = {"cx": f"{x(scaled[-1]):.1f}", "cy": f"{y(line.mean[-1]):.1f}"}
    return [*parts, element("circle", **end, r="3.4", fill=colour)]


def _names(ends: Sequence[tuple[float, str, str]]) -> list[Markup]:
    """Lists the names of the lines at the right, each near the height of its line's end, none on another."""
    parts, last = [], -math.inf
    ordered = sorted(ends)
    room = HEIGHT - _BOTTOM - _LABEL_GAP * (len(ordered) - 1)
    for number, (height, name, colour) in enumerate(ordered):
        at = max(min(height, room + _LABEL_GAP * number), last + _LABEL_GAP)
        last = at
        parts.append(_text(WIDTH - _RIGHT + 16, at + 4, name, fill=colour, weight=600))
    return parts


def _text(
    x: float,
    y: float,
    content: str,
    *,
    fill: str = _INK,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
) -> Markup:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text_anchor": anchor}
    return element("text", content, fill=fill, font_size=size, font_weight=weight, **place)
