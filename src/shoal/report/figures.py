"""Reports for people who work in Python: as tables of pandas, and as figures of plotly."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.core.errors import ReportError, UsageError, did_you_mean
from shoal.report.curves import averaged, axes_of
from shoal.report.schema import Curve, Report, Row, Scalar
from shoal.report.statistics import start_medians
from shoal.report.storage import load
from shoal.report.views import shared_key, short_label
from shoal.report.words import benchmark_words, metric_words, sentence_case


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
    `bytes`, `step`, …). UsageError for what the report does not have.
    """
    curves = {curve.metric: True for curve in report.curves}
    rows = {row.metric: True for row in report.rows if row.starts}
    chosen = metric or next(iter((*curves, *rows)), "")
    if chosen in curves:
        return _lines(report, [curve for curve in report.curves if curve.metric == chosen], over)
    if chosen in rows:
        return _bars(report, [row for row in report.rows if row.metric == chosen and row.starts])
    known = list(dict.fromkeys((*curves, *rows)))
    raise UsageError(
        f"The report has no {chosen!r}.{did_you_mean(chosen, known)}",
        next_step=f"choose one of {', '.join(known)}.",
    )


def _lines(report: Report, curves: Sequence[Curve], over: str | None) -> Any:
    axes = axes_of(curves)
    axis = over or axes[0]
    if axis not in axes:
        raise UsageError(f"The curves have no {axis!r}.", next_step=f"choose one of {', '.join(axes)}.")
    drawn = _empty(report, curves[0])
    for number, curve in enumerate(curves):
        line = averaged(curve, axis)
        if line is None:
            continue
        name = _called(curve, shared_key(curves))
        colour = _COLOURS[number % len(_COLOURS)]
        if line.has_band:
            drawn.add_scatter(
                x=[*line.x, *reversed(line.x)],
                y=[*line.high, *reversed(line.low)],
                fill="toself",
                fillcolor=colour,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
            )
        drawn.add_scatter(x=line.x, y=line.mean, name=name, legendgroup=name, line={"color": colour})
    return drawn.update_layout(xaxis_title=axis)


def _bars(report: Report, rows: Sequence[Row]) -> Any:
    """The mean over the starts, and how far they lie apart."""
    drawn = _empty(report, rows[0])
    shared = shared_key(rows)
    for number, row in enumerate(rows):
        medians = start_medians(row)
        mean = sum(medians) / len(medians)
        drawn.add_bar(
            x=[_called(row, shared)],
            y=[mean],
            error_y={"array": [max(medians) - mean], "arrayminus": [mean - min(medians)]},
            marker_color=_COLOURS[number % len(_COLOURS)],
            showlegend=False,
        )
    return drawn


def _called(figure: Row | Curve, shared: dict[str, Scalar]) -> str:
    """What tells it apart: the value alone where that is one entry of its key."""
    own = [value for name, value in figure.key.items() if name not in shared]
    return str(own[0]) if len(own) == 1 else short_label(figure, shared)


def _empty(report: Report, first: Row | Curve) -> Any:
    plotly = _library("plotly.graph_objects", "pip install 'shoal[report]'")
    unit = f" ({first.unit})" if first.unit else ""
    better = f", {first.direction} is better" if first.direction else ""
    return plotly.Figure(
        layout={
            "title": benchmark_words(report.benchmark).title,
            "yaxis_title": sentence_case(metric_words(first.metric)) + unit + better,
            "template": "plotly_white",
        }
    )


def _library(name: str, install: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ReportError(f"This needs {package}, which is not installed", next_step=install) from error


_COLOURS = ("#2f6fde", "#d9822b", "#2b9a66", "#8e4ec6", "#ce2c31", "#7c6f64", "#0d74ce", "#b45f9a")
