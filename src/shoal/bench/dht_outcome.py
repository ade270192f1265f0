"""What one run of `shoal bench dht` found out, as rows of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.bench.dht_config import DhtConfig
from shoal.bench.dht_hosting import Totals
from shoal.bench.dht_swarm import Swarm
from shoal.bench.frame import Measured, RowKey


@dataclass
class Phase:
    """All stores, or all gets."""

    what: str
    """'store' or 'get': what rows are named by."""
    latencies_s: list[float] = field(default_factory=list)
    """Of every operation, a batch in experts mode."""
    rounds_s: list[float] = field(default_factory=list)
    """The slowest operation of each round, in keys mode."""
    replicas: list[int] = field(default_factory=list)
    """Peers that took each record."""
    hops: list[int] = field(default_factory=list)
    """Answers that followed from each other, of every key that was looked up."""
    failures: dict[str, int] = field(default_factory=dict)
    """Records that nobody took, by the reason."""
    meeting_dead_s: list[float] = field(default_factory=list)
    """Of the operations during which their peer sent something to a dead one, perhaps for another."""
    num_tried: int = 0
    """Records, or keys; all of them are in `replicas`, or in `hops`."""
    num_right: int = 0
    total_s: float = 0.0
    """In experts mode of all batches together, in keys mode from the first operation to the last."""
    traffic: Totals = field(default_factory=Totals)
    """Of all peers while it lasted, whatever they did it for."""

    def note_failures(self, failures: Mapping[str, int]) -> None:
        """Some more records that nobody took."""
        for reason, count in failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + count

    def rows(self, key: RowKey, *, has_deaths: bool) -> Iterator[Measured]:
        """Raw samples, and figures that are one number each."""
        raw = (
            ("latency", "s", self.latencies_s),
            ("round", "s", self.rounds_s),
            ("replicas", "", [float(count) for count in self.replicas]),
            ("hops", "", [float(hops) for hops in self.hops]),
        )
        for metric, unit, samples in raw:
            if samples:
                yield _row(key, f"{self.what}_{metric}", unit, samples)
        traffic = self.traffic
        figures = [
            ("success", "", float(self.num_right)),
            ("time_per_key", "s", self.total_s),
            ("messages", "", float(traffic.messages)),
            ("datagrams", "", float(traffic.datagrams)),
            ("bytes", "B", float(traffic.size_bytes)),
        ]
        for metric, unit, total in figures:
            yield _row(key, f"{self.what}_{metric}", unit, [total / self.num_tried])
        if has_deaths and self.what == "get":
            yield _row(key, "get_met_dead_at_most", "", [float(len(self.meeting_dead_s))])
            yield _row(key, "get_slowest_met_dead", "s", [max(self.meeting_dead_s, default=0.0)])
        for reason, count in self.failures.items():
            yield _row({**key, "reason": reason}, f"{self.what}_failures", "", [float(count)])


@dataclass
class Outcome:
    """Everything."""

    store: Phase = field(default_factory=lambda: Phase("store"))
    get: Phase = field(default_factory=lambda: Phase("get"))
    create_s: float = 0.0
    num_alive: int = 0
    """Peers that answered at the end."""
    round_trips_s: list[float] = field(default_factory=list)
    """Between pairs of them."""
    memory_bytes: int = 0
    peak_rss_bytes: int = 0
    num_expired_batches: int = 0
    """In experts mode, of those that were read."""
    simulated_s: float | None = None
    """How long the virtual world has lasted; None on sockets."""

    def rows(self, config: DhtConfig, wall_s: float) -> Iterator[Measured]:
        """For the report: what was measured. Failures and expired batches are there where there are any."""
        key: RowKey = {"scenario": config.mode, "num_peers": config.num_peers}
        if config.profile is not None:
            key["profile"] = config.profile
        yield _row(key, "create", "s", [self.create_s])
        for phase in (self.store, self.get):
            yield from phase.rows(key, has_deaths=config.num_victims > 0)
        yield _row(key, "survival", "", [self.num_alive / config.num_peers])
        if self.round_trips_s:
            yield _row(key, "round_trip", "s", self.round_trips_s)
        yield _row(key, "memory", "B", [float(self.memory_bytes)])
        yield _row(key, "peak_rss", "B", [float(self.peak_rss_bytes)])
        if self.num_expired_batches:
            yield _row(key, "expired_batches", "", [float(self.num_expired_batches)])
        if self.simulated_s is not None:
            yield _row(key, "simulated", "s", [self.simulated_s])
        yield _row(key, "wall", "s", [wall_s])


class Watched:
    """A phase of a swarm while it lasts: `async with` it, and its traffic and time are noted."""

    def __init__(self, swarm: Swarm, phase: Phase) -> None:
        self._swarm = swarm
        self._phase = phase
        self._before = Totals()

    async def __aenter__(self) -> None:
        self._before = await self._swarm.totals()

    async def __aexit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self._phase.traffic += await self._swarm.totals() - self._before
            await self._swarm.look_at_memory()


def _row(key: RowKey, metric: str, unit: str, samples: list[float]) -> Measured:
    direction: Literal["higher", "lower"] = "higher" if metric in _MORE_IS_BETTER else "lower"
    return Measured(key=key, metric=metric, unit=unit, direction=direction, samples=samples)


_MORE_IS_BETTER = ("survival", "store_success", "store_replicas", "get_success")
