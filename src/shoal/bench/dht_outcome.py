"""What one run of `shoal bench dht` found out, as rows of a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from shoal.bench.dht_config import DhtConfig
from shoal.bench.dht_fleet import Swarm
from shoal.bench.dht_hosting import Totals
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
    hops: list[int] = field(default_factory=list)
    """Answers that followed from each other, of every key that was looked up."""
    meeting_dead_s: list[float] = field(default_factory=list)
    """Of the operations that sent something to a dead peer."""
    num_tried: int = 0
    num_right: int = 0
    total_s: float = 0.0
    """In experts mode of all batches together, in keys mode from the first operation to the last."""
    traffic: Totals = field(default_factory=Totals)
    """Of all peers while it lasted, whatever they did it for."""

    def rows(self, key: RowKey) -> Iterator[Measured]:
        """Raw samples, and figures that are one number each."""
        raw = (
            ("latency", "s", self.latencies_s),
            ("round", "s", self.rounds_s),
            ("hops", "", [float(hops) for hops in self.hops]),
        )
        for metric, unit, samples in raw:
            if samples:
                yield _row(key, f"{self.what}_{metric}", unit, samples)
        figures = (
            ("tried", "", float(self.num_tried)),
            ("right", "", float(self.num_right)),
            ("total", "s", self.total_s),
            ("met_dead", "", float(len(self.meeting_dead_s))),
            ("slowest_met_dead", "s", max(self.meeting_dead_s, default=0.0)),
            ("packets", "", float(self.traffic.packets)),
            ("traffic", "B", float(self.traffic.size_bytes)),
            ("requests", "", float(self.traffic.requests)),
        )
        for metric, unit, figure in figures:
            yield _row(key, f"{self.what}_{metric}", unit, [figure])


@dataclass
class Outcome:
    """Everything."""

    store: Phase = field(default_factory=lambda: Phase("store"))
    get: Phase = field(default_factory=lambda: Phase("get"))
    create_s: float = 0.0
    num_alive: int = 0
    """Peers that answered at the end."""
    round_trips_s: list[float] = field(default_factory=list)
    """Of a request to each of them."""
    memory_bytes: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    """Counts and settings beside those."""
    simulated_s: float | None = None
    """How long the virtual world has lasted; None on sockets."""

    def rows(self, config: DhtConfig, wall_s: float) -> Iterator[Measured]:
        """For the report."""
        key: RowKey = {"scenario": config.mode, "num_peers": config.num_peers}
        if config.profile is not None:
            key["profile"] = config.profile
        yield _row(key, "create", "s", [self.create_s])
        yield from self.store.rows(key)
        yield from self.get.rows(key)
        yield _row(key, "alive", "", [float(self.num_alive)])
        if self.round_trips_s:
            yield _row(key, "round_trip", "s", self.round_trips_s)
        yield _row(key, "memory", "B", [float(self.memory_bytes)])
        for metric, figure in self.figures.items():
            yield _row(key, metric, "", [figure])
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


_MORE_IS_BETTER = ("alive", "store_tried", "store_right", "get_tried", "get_right", "unique_experts")
