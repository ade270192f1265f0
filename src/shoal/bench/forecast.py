"""What a prediction of scaling says, as data, as tables, as curves, and on the RESULT line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shoal.bench.cost_model import Link, Network, Terms
from shoal.bench.scaling import EFFICIENCY, METRICS, SPEED
from shoal.report import Curve
from shoal.report.tables import Column, Table
from shoal.report.units import digits
from shoal.report.views import Items

TOLERANCE = 0.15
"""Of an iteration's time under a profile."""
_SHOWN = (16, 64, 256, 1024)
"""Sizes in the table, beside those that were measured; the curves have more."""


class Fitted(msgspec.Struct, frozen=True):
    """What was calibrated for one strategy; nothing, where nothing was."""

    terms: Terms = Terms()
    between: Link | None = None
    """The effective link, where workers of several machines were measured."""
    num_sizes: int = 0
    """Numbers of workers that it was calibrated by."""


class Point(msgspec.Struct, frozen=True):
    """One number of workers."""

    num_workers: int
    images_per_s: float
    efficiency: float
    """Against as many times what one worker does alone, as the others."""
    nominal_efficiency: float
    """With nothing calibrated."""
    measured_efficiency: float | None = None


class Lane(msgspec.Struct, frozen=True):
    """One strategy at one batch size, or why there is no prediction."""

    strategy: str
    batch_size: int
    points: list[Point] = []
    fitted: Fitted = Fitted()
    error: str | None = None


class Check(msgspec.Struct, frozen=True):
    """An iteration over shaped links: measured compute and the profile's links beside what was measured."""

    strategy: str
    batch_size: int
    num_workers: int
    compute_s: float
    predicted_s: float
    measured_s: float

    @property
    def off(self) -> float:
        """0.1: the prediction is a tenth longer."""
        return self.predicted_s / self.measured_s - 1


class Where(msgspec.Struct, frozen=True):
    """Over which links it is predicted."""

    network: Network
    profile: str | None = None
    """That the links are of, where they are not assumed."""
    between: Literal["workers", "machines"] = "machines"
    """Whose links they are."""


class Forecast(msgspec.Struct, frozen=True):
    """All of it, with its inputs."""

    model: str
    parameter_bytes: int
    where: Where
    lanes: list[Lane]
    checks: list[Check]
    notes: list[str] = []


def forecast_items(forecast: Forecast) -> Items:
    """The check under a profile, the predicted sizes, and what the prediction stands on."""
    items: Items = [("Predicted by the cost model", "bold"), *_inputs(forecast), ""]
    if forecast.checks:
        items.append(_check_table(forecast.checks))
    for batch_size in dict.fromkeys(lane.batch_size for lane in forecast.lanes if lane.points):
        items.append(_size_table(forecast, batch_size))
    failed = [lane for lane in forecast.lanes if lane.error is not None]
    items += [f"{lane.strategy}: no prediction, {lane.error}" for lane in failed]
    items += [
        "of linear: of as many times what one worker does alone; nominal: with nothing calibrated.",
        *_calibrations(forecast),
        *forecast.notes,
        "",
    ]
    return items


def forecast_curves(forecast: Forecast) -> list[Curve]:
    """Images a second and efficiency along `num_workers`, under the keys of the measured rows."""
    curves = []
    for lane in forecast.lanes:
        if not lane.points:
            continue
        sizes = [float(point.num_workers) for point in lane.points]
        values = {
            SPEED: [point.images_per_s for point in lane.points],
            EFFICIENCY: [point.efficiency for point in lane.points],
        }
        for metric, along in values.items():
            unit, direction = METRICS[metric]
            curves.append(
                Curve(
                    key={"strategy": lane.strategy, "batch_size": lane.batch_size},
                    metric=metric,
                    unit=unit,
                    direction=direction,
                    starts=[{"num_workers": sizes, "value": along}],
                )
            )
    return curves


def forecast_result(forecast: Forecast) -> dict[str, Any]:
    """For the RESULT line."""
    result: dict[str, Any] = {
        "parameter_bytes": forecast.parameter_bytes,
        "where": msgspec.to_builtins(forecast.where),
        "lanes": [
            {
                "strategy": lane.strategy,
                "batch_size": lane.batch_size,
                "calibrated": msgspec.to_builtins(lane.fitted),
                "efficiency": {str(point.num_workers): round(point.efficiency, 4) for point in lane.points},
                **({"error": lane.error} if lane.error is not None else {}),
            }
            for lane in forecast.lanes
        ],
    }
    if forecast.checks:
        worst = max(forecast.checks, key=lambda check: abs(check.off))
        result["checks"] = [
            {**msgspec.to_builtins(check), "off": round(check.off, 4)} for check in forecast.checks
        ]
        result["checks_within"] = round(abs(worst.off), 4)
    return result


def _inputs(forecast: Forecast) -> list[str]:
    where = forecast.where
    network = where.network
    between = _link_text(network.between)
    lines = [f"{forecast.model}, {forecast.parameter_bytes / 1e6:.1f} MB of parameters."]
    if where.between == "workers":
        return [*lines, f"Links between workers, by the profile {where.profile}: {between}."]
    plural = "worker" if network.workers_per_machine == 1 else "workers"
    by_whom = "assumed" if where.profile is None else f"by the profile {where.profile}"
    inside = _link_text(network.inside)
    return [
        *lines,
        f"Machines of {network.workers_per_machine} {plural}; links inside, assumed: {inside}.",
        f"Links between machines, {by_whom}: {between}.",
    ]


def _check_table(checks: list[Check]) -> Table:
    heads = ("batch", "workers", "compute", "predicted", "measured", "off", "")
    table = Table(
        "Iterations over the profile's links, nothing fitted",
        (Column("strategy", "left"), *map(Column, heads)),
    )
    for check in checks:
        times = (check.compute_s, check.predicted_s, check.measured_s)
        table.rows.append(
            (
                check.strategy,
                str(check.batch_size),
                str(check.num_workers),
                *(f"{1e3 * seconds:.1f} ms" for seconds in times),
                f"{check.off:+.1%}",
                "" if abs(check.off) <= TOLERANCE else f"over {TOLERANCE:.0%}",
            )
        )
    return table


def _size_table(forecast: Forecast, batch_size: int) -> Table:
    heads = ("workers", "images/s", "of linear", "nominal", "measured")
    table = Table(f"Batch {batch_size}", (Column("strategy", "left"), *map(Column, heads)))
    for lane in forecast.lanes:
        for point in lane.points if lane.batch_size == batch_size else ():
            measured = point.measured_efficiency
            if measured is None and point.num_workers not in _SHOWN and point is not lane.points[-1]:
                continue
            table.rows.append(
                (
                    lane.strategy,
                    f"{point.num_workers:,}",
                    digits(point.images_per_s),
                    f"{point.efficiency:.1%}",
                    f"{point.nominal_efficiency:.1%}",
                    "-" if measured is None else f"{measured:.1%}",
                )
            )
    return table


def _calibrations(forecast: Forecast) -> list[str]:
    lines = {}
    for lane in forecast.lanes:
        fitted = lane.fitted
        if lane.error is not None:
            continue
        if not fitted.num_sizes:
            lines[lane.strategy] = (
                f"{lane.strategy}: nothing calibrated, for several workers were not measured."
            )
            continue
        terms = fitted.terms
        plural = "size" if fitted.num_sizes == 1 else "sizes"
        text = f"{lane.strategy}: calibrated by {fitted.num_sizes} measured {plural}: "
        text += f"{1e3 * terms.overhead_s:.2f} ms not hidden"
        text += f", {1e3 * terms.straggler_s:.2f} ms for each doubling" if terms.straggler_s else ""
        text += f", between machines {_link_text(fitted.between)}" if fitted.between else ""
        lines[lane.strategy] = text + "."
    return list(lines.values())


def _link_text(link: Link) -> str:
    delay = f"{digits(1e3 * link.latency_s)} ms"
    rate = link.bytes_per_s
    return f"no limit, {delay}" if rate == float("inf") else f"{digits(rate / 1e6)} MB/s, {delay}"
