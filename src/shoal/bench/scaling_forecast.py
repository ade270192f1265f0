"""What `predict` says of a scaling benchmark, or why it says nothing: a benchmark never fails for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shoal.bench.frame import Measured, MeasuredCurve, Tell
from shoal.bench.predict import forecast_curves, forecast_items, forecast_of, forecast_result
from shoal.bench.scaling import ScalingConfig
from shoal.core import ShoalError
from shoal.report import Report, Row
from shoal.report.views import Items


def predicted_curves(config: ScalingConfig, rows: Sequence[Measured], tell: Tell) -> Iterator[MeasuredCurve]:
    """The curves to more workers than one start has measured."""
    report = Report(
        benchmark="scaling",
        created="",
        config=msgspec.to_builtins(config),
        rows=[_row(measured) for measured in rows],
    )
    try:
        curves = forecast_curves(forecast_of(report))
    except ShoalError as error:
        tell(f"no prediction: {error.what}")
        return
    for curve in curves:
        fields = {name: getattr(curve, name) for name in ("key", "metric", "unit", "direction")}
        for points in curve.starts:
            yield MeasuredCurve(**fields, points=points)


def predicted_result(report: Report) -> dict[str, Any]:
    """For the RESULT line."""
    try:
        return forecast_result(forecast_of(report))
    except ShoalError as error:
        return {"error": error.what}


def predicted_items(report: Report) -> Items:
    """For the terminal."""
    try:
        return forecast_items(forecast_of(report))
    except ShoalError as error:
        return [(f"No prediction: {error}", "yellow"), ""]


def _row(measured: Measured) -> Row:
    fields = {name: getattr(measured, name) for name in ("key", "metric", "unit", "direction", "error")}
    return Row(**fields, starts=[measured.samples] if measured.error is None else [])
