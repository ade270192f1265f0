"""`shoal bench experts`: one server process, many clients in others, loopback TCP between them.

The parts: `experts_config` is what it is told, `experts_server` and `experts_clients` are the processes,
`experts_fleet` orders clients about, `experts_summary` says what came of it. In one run the same clients send
the same bytes to a bare echo and to experts, and the server tells how fast its experts are alone. Those two
are measured before the experts are asked and again after: a machine that changes its speed meets all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.bench.experts_config import ExpertsConfig
from shoal.bench.experts_fleet import ClientFleet
from shoal.bench.experts_tally import Tally
from shoal.bench.frame import Measured, RowKey, Tell
from shoal.bench.workers import Child, child


@dataclass
class Outcome:
    """What one run found out."""

    launch_s: float
    """From nothing to a server that answers, imports and all."""
    experts_s: float
    networking_s: float
    echo: Tally = field(default_factory=Tally)
    echo_samples_per_s: list[float] = field(default_factory=list)
    asked: Tally = field(default_factory=Tally)
    asked_s: float = 0.0
    local_samples_per_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """Of the server, from before the experts are asked to after; empty where the system does not tell."""
    server: dict[str, int] = field(default_factory=dict)
    num_lost: int = 0
    complaint: str = ""

    def rows(self, config: ExpertsConfig, total_s: float) -> Iterator[Measured]:
        """For the report: what was measured, and an error where calls failed."""
        key: RowKey = {
            "scenario": config.preset,
            "expert_class": config.expert_class,
            "num_clients": config.num_clients,
            "batch_size": config.batch_size,
            "backward": config.backward,
        }
        asked, echo = self.asked, self.echo
        rows: list[tuple[str, str, list[float]]] = [
            ("samples_per_s", "1/s", [_ratio(asked.num_samples, self.asked_s)]),
            ("echo_samples_per_s", "1/s", self.echo_samples_per_s),
            ("local_samples_per_s", "1/s", self.local_samples_per_s),
            ("num_samples", "", [asked.num_samples]),
            ("asked", "s", [self.asked_s]),
            ("forward_latency", "s", [us / 1e6 for us in asked.forward_us]),
            ("backward_latency", "s", [us / 1e6 for us in asked.backward_us]),
            ("failed_calls", "", [asked.num_failed]),
            ("failed_echoes", "", [echo.num_failed]),
            ("lost_clients", "", [self.num_lost]),
            ("launch", "s", [self.launch_s]),
            ("startup_experts", "s", [self.experts_s]),
            ("startup_networking", "s", [self.networking_s]),
            ("server_processes", "", [self.server["num_processes"]]),
            ("server_rss", "B", [float(size) for size in self.rss_bytes]),
            ("total", "s", [total_s]),
        ]
        rows += [
            (f"gpu_{name}", "B", [float(self.server[f"{name}_bytes"])])
            for name in ("allocated", "reserved")
            if f"{name}_bytes" in self.server
        ]
        for metric, unit, samples in rows:
            if samples:
                yield _row(key, metric, unit, samples)
        for name, count in asked.failures.items():
            yield _row({**key, "reason": name}, "failures", "", [float(count)])
        if text := self._failure_text(config):
            yield Measured(key=key, metric="completed", unit="", direction="higher", error=text)

    def _failure_text(self, config: ExpertsConfig) -> str:
        parts = []
        num_echoes = config.num_calls * len(self.echo_samples_per_s)
        for what, num, tally in (
            ("calls", config.num_calls, self.asked),
            ("echoes", num_echoes, self.echo),
        ):
            if tally.failures:
                reasons = ", ".join(f"{name} × {count}" for name, count in tally.failures.items())
                parts.append(f"{tally.num_failed} of {num} {what} failed: {reasons}.")
        if self.num_lost:
            parts.append(f"{self.num_lost} of {config.num_clients} clients were lost: {self.complaint}")
        if first := self.asked.first_failure or self.echo.first_failure:
            parts.append(f"The first: {first}")
        return " ".join(parts)


class ExpertsScenario:
    """One start: a server, then its clients, then the end of both."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), ExpertsConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Serve and ask, and tell what it took."""
        began_s = time.perf_counter()
        config = self._config
        tell(f"starting a server of {_counted(config.num_experts, 'expert')}")
        arguments = {"config": msgspec.to_builtins(config), "seed": self._seed}
        with child("shoal.bench.experts_server:host", arguments, name="The server") as server:
            ready = server.expect()
            launch_s = time.perf_counter() - began_s
            outcome = Outcome(launch_s, ready["experts_s"], ready["networking_s"])
            self._measure(server, ready, outcome, tell)
        yield from outcome.rows(config, time.perf_counter() - began_s)

    def _measure(self, server: Child, ready: Mapping[str, Any], outcome: Outcome, tell: Tell) -> None:
        config = self._config

        def look() -> None:
            outcome.rss_bytes += _rss_bytes(ready["pid"])

        tell("experts without a network")
        outcome.local_samples_per_s.append(_asked(server, "local"))
        clients = _counted(config.num_clients, "client")
        processes = _counted(config.client_processes, "process", "processes")
        tell(f"connecting {clients} in {processes}")
        with ClientFleet(config, self._seed, ready) as fleet:
            fleet.connect()
            self._echo(fleet, outcome, tell)
            tell(f"experts, {clients}")
            look()
            outcome.asked, outcome.asked_s = fleet.phase("experts", look)
            look()
            outcome.server = _asked(server, "memory")
            self._echo(fleet, outcome, tell)
            tell("experts without a network, once more")
            outcome.local_samples_per_s.append(_asked(server, "local"))
            outcome.num_lost, outcome.complaint = fleet.num_lost, fleet.complaint

    def _echo(self, fleet: ClientFleet, outcome: Outcome, tell: Tell) -> None:
        tell(f"bare echoes, {_counted(self._config.num_clients, 'client')}")
        tally, seconds = fleet.phase("echo")
        outcome.echo_samples_per_s.append(_ratio(tally.num_samples, seconds))
        outcome.echo.add(tally)


def _asked(server: Child, order: str) -> Any:
    server.order(order=order, details={})
    return server.expect()["answer"]


def _rss_bytes(pid: int) -> list[int]:
    """Memory of a process, in a list that is empty where the system does not tell."""
    if sys.platform != "linux":
        return []
    try:
        num_pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except OSError:
        return []
    return [num_pages * os.sysconf("SC_PAGE_SIZE")]


def _row(key: RowKey, metric: str, unit: str, samples: list[float]) -> Measured:
    direction: Literal["higher", "lower"] = "higher" if metric in _MORE_IS_BETTER else "lower"
    return Measured(key=key, metric=metric, unit=unit, direction=direction, samples=samples)


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


_MORE_IS_BETTER = ("samples_per_s", "echo_samples_per_s", "local_samples_per_s", "num_samples")
