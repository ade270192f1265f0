"""`shoal bench dht`: peers of a DHT that store and look up, on sockets in some processes or in virtual time.

The parts: `dht_config` is what it is told, `dht_hosting`, `dht_grounds` and `dht_peers` host peers,
`dht_fleet` and `dht_swarm` order them about, `dht_experts` and `dht_keys` are the two modes, `dht_outcome`
and `dht_summary` say what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.bench.dht_config import DhtConfig, ExpertsPlan
from shoal.bench.dht_experts import run_experts
from shoal.bench.dht_fleet import ProcessFleet, VirtualFleet
from shoal.bench.dht_keys import run_keys
from shoal.bench.dht_outcome import Outcome
from shoal.bench.dht_swarm import Swarm
from shoal.bench.frame import Measured, Tell
from shoal.core import LoopThread
from shoal.core.virtual import run_virtual


class DhtScenario:
    """One start: one swarm, from its first peer to the last question whether everybody lives."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), DhtConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Let it live, and tell what it took."""
        began_s = time.perf_counter()
        if self._config.profile is not None:
            outcome = run_virtual(self._live(tell))
        else:
            with LoopThread() as loop:  # for orders alone: the peers have loops of their own
                outcome = loop.run(self._live(tell))
        yield from outcome.rows(self._config, time.perf_counter() - began_s)

    async def _live(self, tell: Tell) -> Outcome:
        config = self._config
        fleet = ProcessFleet(config) if config.profile is None else VirtualFleet(config, self._seed)
        async with fleet:
            swarm = Swarm(fleet, config, self._seed, tell)
            plan = config.plan
            work = run_experts(swarm, plan) if isinstance(plan, ExpertsPlan) else run_keys(swarm, plan)
            outcome = await work
            alive = await swarm.ask_who_lives()
            outcome.num_alive = len(alive)
            if len(alive) > 1:
                outcome.round_trips_s = await swarm.round_trips(alive)
            await swarm.look_at_memory()
            outcome.memory_bytes, outcome.peak_rss_bytes = swarm.memory_bytes, swarm.peak_rss_bytes
            if config.profile is not None:
                outcome.simulated_s = swarm.clock.now_s()
        return outcome
