"""`shoal bench latency`: what a model's throughput becomes when the network between its blocks is slow.

After Learning@home's throughput scripts (Ryabinin & Gusev 2020, section 4.1). The parts: `latency_config` is
what it is told, `latency_baseline` model parallelism in this process, `latency_fleet` servers and clients in
others, `latency_virtual` the same sweep simulated, `latency_summary` what came of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.bench.frame import Measured, MeasuredCurve, RowKey, Tell
from shoal.bench.latency_config import LatencyConfig, Method, Passes
from shoal.core import BenchmarkError
from shoal.core.placement import num_cores

if TYPE_CHECKING:
    from shoal.bench.latency_fleet import Fleet

AXIS = "ping_s"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one ping."""

    method: Method
    passes: Passes
    ping_s: float
    latency_s: list[float] = []
    samples_per_s: list[float] = []
    error: str | None = None

    def rows(self) -> Iterator[Measured]:
        """For the report."""
        key: RowKey = {"method": self.method, "passes": self.passes, "ping_ms": round(1e3 * self.ping_s, 6)}
        yield Measured(
            key=key,
            metric="throughput",
            unit="samples/s",
            direction="higher",
            samples=self.samples_per_s,
            error=self.error,
        )
        if self.error is None:
            yield Measured(
                key=key, metric="latency", unit="s", direction="lower", samples=self.latency_s, error=None
            )


class LatencyScenario:
    """One start: every method at every ping."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), LatencyConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Measured | MeasuredCurve]:
        """Measure, or simulate, and tell row after row, then all of them as curves."""
        all_found = []
        for found in self._simulated(tell) if self._config.is_virtual else self._measured(tell):
            all_found.append(found)
            yield from found.rows()
        yield from curves(all_found, self._config.pings_s)

    def _measured(self, tell: Tell) -> Iterator[Found]:
        if self._config.methods != ("ours",):
            yield from self._baselines(tell)
        if "ours" in self._config.methods:
            yield from self._ours(tell)

    def _baselines(self, tell: Tell) -> Iterator[Found]:
        from shoal.bench.latency_baseline import Baseline
        from shoal.bench.latency_flow import Pings

        config = self._config
        tell(f"making {config.num_layers} blocks")
        baseline = Baseline(config, self._seed)
        for method, pings_s in (("fast", [0.0]), ("slow", config.pings_s)):
            if method not in config.methods:
                continue
            baseline.place(in_turn=method == "slow")
            for index, ping_s in enumerate(pings_s):
                for passes in config.passes:
                    tell(_point_text(method, passes, index, len(pings_s)))
                    alone, flow = (
                        Pings(ping_s, self._seed, f"{phase} {passes} slow") if method == "slow" else None
                        for phase in ("latency", "throughput")
                    )
                    yield Found(
                        method=method,
                        passes=passes,
                        ping_s=ping_s,
                        latency_s=baseline.latencies(passes, alone),
                        samples_per_s=baseline.rates(passes, flow),
                    )

    def _ours(self, tell: Tell) -> Iterator[Found]:
        """Servers that do not answer at all fail every point; other methods keep theirs."""
        from shoal.bench.latency_fleet import opened_fleet

        config = self._config
        points = [(ping_s, passes) for ping_s in config.pings_s for passes in config.passes]
        with contextlib.ExitStack() as stack:
            try:
                fleet = stack.enter_context(opened_fleet(config, self._seed, tell))
            except BenchmarkError as error:
                text = " ".join(str(error).split())
                for ping_s, passes in points:
                    yield Found(method="ours", passes=passes, ping_s=ping_s, error=text)
                return
            for ping_s, passes in points:
                tell(_point_text("ours", passes, config.pings_s.index(ping_s), len(config.pings_s)))
                yield _asked(fleet, ping_s, passes)

    def _simulated(self, tell: Tell) -> Iterator[Found]:
        from shoal.bench.workers import run_tasks

        config = self._config
        tasks = [
            {"method": method, "passes": passes, "ping_s": ping_s}
            for method in config.methods
            for ping_s in (config.pings_s if method != "fast" else [0.0])
            for passes in config.passes
        ]
        shared = {"config": msgspec.to_builtins(config), "seed": self._seed}
        num_processes = max(1, min(num_cores(), len(tasks)))
        results = run_tasks(
            "shoal.bench.latency_virtual:run_point",
            [{**shared, **task} for task in tasks],
            num_processes=num_processes,
            tell=tell,
        )
        for number, (task, result) in enumerate(zip(tasks, results, strict=True), 1):
            tell(f"methods at pings, in virtual time: {number} of {len(tasks)}")
            told = {"error": result.what} if isinstance(result, BenchmarkError) else result
            yield msgspec.convert({**task, **told}, Found)


def _asked(fleet: Fleet, ping_s: float, passes: Passes) -> Found:
    try:
        latency_s, samples_per_s = fleet.latencies(ping_s, passes), fleet.rates(ping_s, passes)
    except BenchmarkError as error:
        return Found(method="ours", passes=passes, ping_s=ping_s, error=error.what)
    return Found(
        method="ours", passes=passes, ping_s=ping_s, latency_s=latency_s, samples_per_s=samples_per_s
    )


def curves(all_found: Sequence[Found], pings_s: Sequence[float]) -> Iterator[MeasuredCurve]:
    """A line over the pings for each method: one for each run, and each measured batch, so that they differ.

    What has no delay is as fast at every ping.
    """
    lines: dict[tuple[Method, Passes], list[Found]] = {}
    for found in all_found:
        if found.error is None:
            lines.setdefault((found.method, found.passes), []).append(found)
    for metric, unit in (("throughput", "samples/s"), ("latency", "s")):
        for (method, passes), points in lines.items():
            at = points * len(pings_s) if method == "fast" else points
            axis = list(pings_s) if method == "fast" else [point.ping_s for point in points]
            values = [point.samples_per_s if metric == "throughput" else point.latency_s for point in at]
            for repeat in zip(*values, strict=True):
                yield MeasuredCurve(
                    key={"method": method, "passes": passes},
                    metric=metric,
                    unit=unit,
                    direction="higher" if metric == "throughput" else "lower",
                    points={"value": list(repeat), AXIS: axis},
                )


def _point_text(method: str, passes: str, index: int, num_points: int) -> str:
    return f"{method}, {passes}, ping: {index + 1} of {num_points}"
