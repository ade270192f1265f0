"""What a scaling report lets expect of more workers: its figures, the cost model, and a curve to 1,024.

Compute times come from the workers that share nothing ('none'). Links are assumed, or a profile's; what the
model cannot know is calibrated by the few workers that were measured. Under a profile the model is held
against the measured iterations too, with nothing fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import NONE
from shoal.bench.forecast.cost_model import (
    Method,
    ModelLink,
    ModelNetwork,
    Terms,
    Work,
    fit,
    iteration_s,
    shaped_network,
)
from shoal.bench.scaling import EFFICIENCY, MIXING, SPEED, ScalingConfig, options_for
from shoal.core import ReportError, UsageError
from shoal.report import Curve, Report
from shoal.report.schema import Scalar, rows_of
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits
from shoal.report.views import Items
from shoal.report.words import METRICS
from shoal.strategies.registry import find

# --- from a report to a forecast ---

MOST_WORKERS = 1024
INSIDE = {"cpu": ModelLink(20e-6, 8e9), "cuda": ModelLink(10e-6, 25e9)}
"""Assumed of a machine: shared memory, and one NVLink."""
BETWEEN = ModelLink(50e-6, 25e9 / 8)
"""Assumed between machines: 25 Gb/s."""
_MOST_PEERS = 16  # of a profile, among whom the slowest link is looked for
_ALL_REDUCING = ("all-reduce", "ddp", "horovod", "sma")
_SHARES = (1 / 16, 1 / 4, 1, 4)  # of the assumed pace between machines, where fitting begins

Seconds = dict[tuple[int, int], float]
"""Of an iteration, by batch size and number of workers."""


def forecast_of(report: Report) -> Forecast:
    """ReportError for a report that holds no scaling figures."""
    try:
        config = msgspec.convert(report.config, ScalingConfig)
    except msgspec.ValidationError as error:
        raise ReportError(
            f"the report's configuration is not one of `shoal bench scaling`: {error}",
            next_step="give a report that this version has written.",
        ) from None
    scene = _ScalingFigures(config, report)
    lanes: list[StrategyForecast] = []
    checks: list[ProfileCheck] = []
    for strategy in config.strategies:
        try:
            lanes += scene.lanes(strategy)
            checks += scene.checks(strategy)
        except UsageError as error:
            lanes.append(StrategyForecast(strategy, 0, error=error.what))
    network = scene.network(max(config.num_workers))
    where = ForecastLinks(
        network, config.profile, config.between if config.profile is not None else "machines"
    )
    return Forecast(config.model, scene.size_bytes, where, lanes, checks, scene.notes())


class _ScalingFigures:
    """What was measured, and over which links."""

    def __init__(self, config: ScalingConfig, report: Report) -> None:
        from shoal.models.registry import model_named

        self._config = config
        self._networks: dict[int, ModelNetwork] = {}
        self._measured = _iterations(report)
        self._compute = _compute(report, self._measured.get(NONE, {}))
        if not self._compute:
            raise ReportError(
                "the report holds no images a second of workers that share nothing.",
                next_step="run `shoal bench scaling --predict`.",
            )
        entry = model_named(config.model).at(config.image_size, config.num_classes, config.sequence_length)
        self.size_bytes = 4 * entry.num_parameters()
        self._mixings = {
            int(row.key["num_workers"]): statistics.median(row.samples) for row in rows_of(report, MIXING)
        }
        """By number of workers: the seconds of going through a model once, all at the same time."""

    def _mates(self, num_workers: int) -> int:
        """Workers that the strategies take for those of one machine."""
        config = self._config
        on_machine = config.workers_per_machine or config.workers_on_machine
        if on_machine is not None:
            return min(num_workers, on_machine)
        return num_workers if self._is_each_apart else min(num_workers, max(config.num_workers))

    @property
    def _is_each_apart(self) -> bool:
        """Whether every worker is a peer of a profile."""
        return self._config.profile is not None and self._config.between == "workers"

    @property
    def _workers_per_machine(self) -> int:
        """Workers that share cores where more are predicted than there are."""
        return 1 if self._is_each_apart else self._mates(MOST_WORKERS)

    def notes(self) -> list[str]:
        """What a reader must know to believe it."""
        mates = self._workers_per_machine
        if max(self._config.num_workers) <= mates:
            return []
        whose = "Each worker is" if mates == 1 else f"Every {mates} workers are"
        return [f"{whose} predicted with cores of their own; the measured ones shared these."]

    def lanes(self, strategy: str) -> list[StrategyForecast]:
        """One for each batch size; all of them are calibrated together. UsageError without a formula."""
        self._method(strategy, max(self._config.num_workers))
        here = self._measured.get(strategy, {})
        fitted = self._calibrate(strategy)
        found = []
        for batch_size in self._config.batch_sizes:
            if (batch_size, 1) in self._compute:
                points = self._points(strategy, batch_size, fitted, here)
                found.append(StrategyForecast(strategy, batch_size, points, fitted))
        return found

    def checks(self, strategy: str) -> list[ProfileCheck]:
        """Under a profile: compute as measured, links as described, nothing fitted."""
        if self._config.profile is None:
            return []
        found = []
        for (batch_size, size), measured_s in self._shared(strategy).items():
            if size <= self._workers_per_machine:
                continue  # inside of a machine, where the profile does nothing
            compute_s = self._compute[batch_size, size]
            predicted_s = self._iteration_s(strategy, compute_s, size, Fitted())
            found.append(ProfileCheck(strategy, batch_size, size, compute_s, predicted_s, measured_s))
        return found

    def network(self, num_workers: int) -> ModelNetwork:
        """The links that so many workers have between them, under the profile where there is one."""
        config, inside, mates = self._config, INSIDE[self._config.device], self._mates(num_workers)
        if config.profile is None:
            return ModelNetwork(inside=inside, between=BETWEEN, workers_per_machine=mates)
        if num_workers not in self._networks:
            num_peers = min(num_workers, _MOST_PEERS * (1 if self._is_each_apart else mates))
            made = shaped_network(config.profile, inside, config.between, num_peers, mates)
            self._networks[num_workers] = made
        return self._networks[num_workers]

    def _shared(self, strategy: str) -> Seconds:
        """The measured iterations in which something was shared, and whose compute is known."""
        return {
            (batch_size, size): seconds
            for (batch_size, size), seconds in self._measured.get(strategy, {}).items()
            if size > 1 and (batch_size, size) in self._compute
        }

    def _points(self, strategy: str, batch_size: int, fitted: Fitted, here: Seconds) -> list[ForecastPoint]:
        alone_s = self._compute[batch_size, 1]
        points = []
        for size in self._sizes():
            # of a worker whose machine is filled as far as it can be: the most that was measured of that
            mates = min(size, self._workers_per_machine)
            known = [known for batch, known in self._compute if batch == batch_size and known <= mates]
            compute_s = self._compute[batch_size, max(known)]
            try:
                nominal_s = self._iteration_s(strategy, compute_s, size, Fitted())
                predicted_s = self._iteration_s(strategy, compute_s, size, fitted)
            except UsageError:
                continue  # a topology that has no such size
            measured_s = here.get((batch_size, size))
            points.append(
                ForecastPoint(
                    size,
                    batch_size * size / predicted_s,
                    alone_s / predicted_s,
                    alone_s / nominal_s,
                    None if measured_s is None else alone_s / measured_s,
                )
            )
        return points

    def _sizes(self) -> list[int]:
        """Powers of two up to a machine, then machines by doubling, and what was measured."""
        mates = self._mates(max(self._config.num_workers))
        sizes = [2**power for power in range(mates.bit_length())]
        while mates <= MOST_WORKERS:
            sizes.append(mates)
            mates *= 2
        return sorted(dict.fromkeys([*sizes, *self._config.num_workers]))

    def _calibrate(self, strategy: str) -> Fitted:
        """Overhead; the link between machines, if several were measured; what grows with each doubling."""
        here = self._shared(strategy)
        sizes = dict.fromkeys(size for _, size in here)
        if not sizes:
            return Fitted()
        is_across = self._config.profile is None and max(sizes) > self._workers_per_machine
        num_parameters = min(len(sizes), 3 if is_across else 2)

        def fitted_by(parameters: Sequence[float]) -> Fitted:
            values, link = [*parameters, 0.0, 0.0], None
            if is_across and num_parameters > 1:
                link = ModelLink(BETWEEN.latency_s, 1 / max(values.pop(1), 1e-15))
            return Fitted(Terms(values[0], values[1]), link, len(sizes))

        def times_s(parameters: Sequence[float]) -> list[float]:
            fitted = fitted_by(parameters)
            return [self._iteration_s(strategy, self._compute[key], key[1], fitted) for key in here]

        paces = [1 / BETWEEN.bytes_per_s / share for share in _SHARES] if is_across else []
        beginnings = [(0.001, pace, 0.001)[:num_parameters] for pace in paces or [0.001]]
        return fitted_by(fit(times_s, list(here.values()), beginnings))

    def _iteration_s(self, strategy: str, compute_s: float, size: int, fitted: Fitted) -> float:
        method = self._method(strategy, size)
        network = self.network(size)
        if fitted.between is not None:
            network = msgspec.structs.replace(network, between=fitted.between)
        work = Work(compute_s, self.size_bytes, self._mix_s(size))
        return iteration_s(work, method, network, size, fitted.terms)

    def _mix_s(self, num_workers: int) -> float:
        """As measured by as many workers of a machine, or the most that there are; nothing on a device."""
        if num_workers in self._mixings:
            return self._mixings[num_workers]
        mates = min(num_workers, self._workers_per_machine)
        known = [size for size in self._mixings if size <= mates]
        return self._mixings[max(known)] if known else 0.0

    def _method(self, strategy: str, num_workers: int) -> Method:
        """UsageError for a strategy that the model has no formula for."""
        mates = self._mates(num_workers)
        info, _ = find(strategy)
        name = info.name
        local_sizes = [mates] * max(1, num_workers // mates)
        options = options_for(strategy, self._config, local_sizes)
        if options.get("local_steps", 1) != 1:
            raise UsageError("the model shares in every step, and this strategy does not.")
        is_shaped = self._config.profile is not None
        if name in _ALL_REDUCING:
            mib = options.get("bucket_mib", getattr(info.options(), "bucket_mib", 25.0))
            return Method(
                kind="all-reduce",
                leaves="after-step" if name == "sma" else "as-layers-finish",
                bucket_bytes=mib * 2**20,
                speaks="worker" if is_shaped or name in ("ddp", "horovod") else "machine",
            )
        if name not in ("neighbor", "hierarchical"):
            raise UsageError(f"the model has no formula for {name}.")
        return Method(
            kind="neighbor" if name == "neighbor" else "hierarchical",
            leaves="after-forward" if options["order"] == "adapt-while-combine" else "after-step",
            topology=str(options["topology"]),
            speaks="worker" if is_shaped else "machine",
        )


def _iterations(report: Report) -> dict[str, Seconds]:
    """By strategy."""
    found: dict[str, Seconds] = {}
    for row in rows_of(report, SPEED):
        batch_size, size = int(row.key["batch_size"]), int(row.key["num_workers"])
        seconds = batch_size * size / statistics.median(row.samples)
        found.setdefault(str(row.key["strategy"]), {})[batch_size, size] = seconds
    return found


def _compute(report: Report, none: Seconds) -> Seconds:
    """Of workers that share nothing; one alone is what efficiencies were measured by."""
    found = dict(none)
    for row in rows_of(report, EFFICIENCY):
        if row.key["strategy"] == NONE:
            key = int(row.key["batch_size"]), int(row.key["num_workers"])
            if key in none:
                found.setdefault((key[0], 1), none[key] * statistics.median(row.samples))
    return found


# --- how it is shown ---

TOLERANCE = 0.15
"""Of an iteration's time under a profile."""
_SHOWN = (16, 64, 256, 1024)
"""Sizes in the table, beside those that were measured; the curves have more."""


class Fitted(msgspec.Struct, frozen=True):
    """What was calibrated for one strategy; nothing, where nothing was."""

    terms: Terms = Terms()
    between: ModelLink | None = None
    """The effective link, where workers of several machines were measured."""
    num_sizes: int = 0
    """Numbers of workers that it was calibrated by."""


class ForecastPoint(msgspec.Struct, frozen=True):
    """One number of workers."""

    num_workers: int
    images_per_s: float
    efficiency: float
    """Against as many times what one worker does alone, as the others."""
    nominal_efficiency: float
    """The efficiency with nothing calibrated."""
    measured_efficiency: float | None = None


class StrategyForecast(msgspec.Struct, frozen=True):
    """One strategy at one batch size, or why there is no prediction."""

    strategy: str
    batch_size: int
    points: list[ForecastPoint] = []
    fitted: Fitted = Fitted()
    error: str | None = None


class ProfileCheck(msgspec.Struct, frozen=True):
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


class ForecastLinks(msgspec.Struct, frozen=True):
    """The links over which iterations are predicted."""

    network: ModelNetwork
    profile: str | None = None
    """That the links are of, where they are not assumed."""
    between: Literal["workers", "machines"] = "machines"
    """Whether they are links of workers or of machines."""


class Forecast(msgspec.Struct, frozen=True):
    """All that is predicted, with what it was predicted from."""

    model: str
    parameter_bytes: int
    where: ForecastLinks
    lanes: list[StrategyForecast]
    checks: list[ProfileCheck]
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
            _, unit, direction, _ = METRICS[metric]
            key: dict[str, Scalar] = {"strategy": lane.strategy, "batch_size": lane.batch_size}
            starts = [{"num_workers": sizes, "value": along}]
            curves.append(Curve(key=key, metric=metric, unit=unit, direction=direction, starts=starts))
    return curves


def forecast_result(forecast: Forecast) -> dict[str, Any]:
    """Say what is predicted for the RESULT line."""
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
    by_whom = "assumed" if where.profile is None else f"by the profile {where.profile}"
    inside = _link_text(network.inside)
    return [
        *lines,
        f"Machines of {counted(network.workers_per_machine, 'worker')}; links inside, assumed: {inside}.",
        f"Links between machines, {by_whom}: {between}.",
    ]


def _check_table(checks: list[ProfileCheck]) -> Table:
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
        sizes = counted(fitted.num_sizes, "measured size")
        text = f"{lane.strategy}: calibrated by {sizes}: "
        text += f"{1e3 * terms.overhead_s:.2f} ms not hidden"
        text += f", {1e3 * terms.straggler_s:.2f} ms for each doubling" if terms.straggler_s else ""
        text += f", between machines {_link_text(fitted.between)}" if fitted.between else ""
        lines[lane.strategy] = text + "."
    return list(lines.values())


def _link_text(link: ModelLink) -> str:
    delay = f"{digits(1e3 * link.latency_s)} ms"
    rate = link.bytes_per_s
    return f"no limit, {delay}" if rate == float("inf") else f"{digits(rate / 1e6)} MB/s, {delay}"
