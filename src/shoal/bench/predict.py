"""What a scaling report lets expect of more workers: its figures, the cost model, and a curve to 1,024.

Compute times come from the workers that share nothing ('none'). Links are assumed, or a profile's; what the
model cannot know is calibrated by the few workers that were measured. Under a profile the model is held
against the measured iterations too, with nothing fitted. How it is shown is `forecast`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from shoal.bench.calibration import fit
from shoal.bench.contenders import NONE
from shoal.bench.cost_model import Link, Method, Network, Terms, Work, iteration_s
from shoal.bench.forecast import (
    Check,
    Fitted,
    Forecast,
    Lane,
    Point,
    Where,
    forecast_curves,
    forecast_items,
    forecast_result,
)
from shoal.bench.profile_links import shaped_network
from shoal.bench.scaling import EFFICIENCY, MIXING, SPEED, ScalingConfig
from shoal.bench.scaling_options import options_for
from shoal.core import ReportError, UsageError
from shoal.report import Report
from shoal.strategies.registry import find

__all__ = ["forecast_curves", "forecast_items", "forecast_of", "forecast_result"]

MOST_WORKERS = 1024
INSIDE = {"cpu": Link(20e-6, 8e9), "cuda": Link(10e-6, 25e9)}
"""Assumed of a machine: shared memory, and one NVLink."""
BETWEEN = Link(50e-6, 25e9 / 8)
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
    scene = Scene(config, report)
    lanes: list[Lane] = []
    checks: list[Check] = []
    for strategy in config.strategies:
        try:
            lanes += scene.lanes(strategy)
            checks += scene.checks(strategy)
        except UsageError as error:
            lanes.append(Lane(strategy, 0, error=error.what))
    network = scene.network(max(config.num_workers))
    where = Where(network, config.profile, config.between if config.profile is not None else "machines")
    return Forecast(config.model, scene.size_bytes, where, lanes, checks, scene.notes())


class Scene:
    """What was measured, and over which links."""

    def __init__(self, config: ScalingConfig, report: Report) -> None:
        self._config = config
        self._networks: dict[int, Network] = {}
        self._measured = _iterations(report)
        self._compute = _compute(report, self._measured.get(NONE, {}))
        if not self._compute:
            raise ReportError(
                "the report holds no images a second of workers that share nothing.",
                next_step="run `shoal bench scaling --predict`.",
            )
        self.size_bytes = _parameter_bytes(config)
        self._mixings = _mixings(report)

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

    def lanes(self, strategy: str) -> list[Lane]:
        """One for each batch size; all of them are calibrated together. UsageError without a formula."""
        self._method(strategy, max(self._config.num_workers))
        here = self._measured.get(strategy, {})
        fitted = self._calibrate(strategy)
        found = []
        for batch_size in self._config.batch_sizes:
            if (batch_size, 1) in self._compute:
                points = self._points(strategy, batch_size, fitted, here)
                found.append(Lane(strategy, batch_size, points, fitted))
        return found

    def checks(self, strategy: str) -> list[Check]:
        """Under a profile: compute as measured, links as described, nothing fitted."""
        if self._config.profile is None:
            return []
        found = []
        for (batch_size, size), measured_s in self._shared(strategy).items():
            if size <= self._workers_per_machine:
                continue  # inside of a machine, where the profile does nothing
            compute_s = self._compute[batch_size, size]
            predicted_s = self._iteration_s(strategy, compute_s, size, Fitted())
            found.append(Check(strategy, batch_size, size, compute_s, predicted_s, measured_s))
        return found

    def network(self, num_workers: int) -> Network:
        """The links that so many workers have between them, under the profile where there is one."""
        if num_workers not in self._networks:
            self._networks[num_workers] = self._make_network(num_workers)
        return self._networks[num_workers]

    def _make_network(self, num_workers: int) -> Network:
        config, inside = self._config, INSIDE[self._config.device]
        mates = self._mates(num_workers)
        if config.profile is None:
            return Network(inside=inside, between=BETWEEN, workers_per_machine=mates)
        num_peers = _MOST_PEERS * (1 if self._is_each_apart else mates)
        return shaped_network(config.profile, inside, config.between, min(num_workers, num_peers), mates)

    def _shared(self, strategy: str) -> Seconds:
        """The measured iterations in which something was shared, and whose compute is known."""
        return {
            (batch_size, size): seconds
            for (batch_size, size), seconds in self._measured.get(strategy, {}).items()
            if size > 1 and (batch_size, size) in self._compute
        }

    def _points(self, strategy: str, batch_size: int, fitted: Fitted, here: Seconds) -> list[Point]:
        alone_s = self._compute[batch_size, 1]
        points = []
        for size in self._sizes():
            compute_s = self._compute_apart_s(batch_size, size)
            try:
                nominal_s = self._iteration_s(strategy, compute_s, size, Fitted())
                predicted_s = self._iteration_s(strategy, compute_s, size, fitted)
            except UsageError:
                continue  # a topology that has no such size
            measured_s = here.get((batch_size, size))
            points.append(
                Point(
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

    def _compute_apart_s(self, batch_size: int, num_workers: int) -> float:
        """Of a worker whose machine is filled as far as it can be: the most that was measured of that."""
        mates = min(num_workers, self._workers_per_machine)
        known = [size for batch, size in self._compute if batch == batch_size and size <= mates]
        return self._compute[batch_size, max(known)]

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
                link = Link(BETWEEN.latency_s, 1 / max(values.pop(1), 1e-15))
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
    for row in report.rows:
        if row.metric == SPEED and row.samples:
            batch_size, size = int(row.key["batch_size"]), int(row.key["num_workers"])
            seconds = batch_size * size / statistics.median(row.samples)
            found.setdefault(str(row.key["strategy"]), {})[batch_size, size] = seconds
    return found


def _compute(report: Report, none: Seconds) -> Seconds:
    """Of workers that share nothing; one alone is what efficiencies were measured by."""
    found = dict(none)
    for row in report.rows:
        if row.metric == EFFICIENCY and row.samples and row.key["strategy"] == NONE:
            key = int(row.key["batch_size"]), int(row.key["num_workers"])
            if key in none:
                found.setdefault((key[0], 1), none[key] * statistics.median(row.samples))
    return found


def _mixings(report: Report) -> dict[int, float]:
    """By number of workers: the seconds of going through a model once, all at the same time."""
    rows = [row for row in report.rows if row.metric == MIXING and row.samples]
    return {int(row.key["num_workers"]): statistics.median(row.samples) for row in rows}


def _parameter_bytes(config: ScalingConfig) -> int:
    from shoal.models.registry import model_named

    return 4 * model_named(config.model).at(config.image_size, config.num_classes).num_parameters()
