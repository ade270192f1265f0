"""The *keys* mode of `shoal bench dht`: many peers store and get single keys, and some of the others die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.dht_config import KeysPlan
from shoal.bench.dht_fleet import Details
from shoal.bench.dht_outcome import Outcome, Phase, Watched
from shoal.bench.dht_swarm import Swarm

_BATCH = 200  # operations that a host is given at once where nobody waits for others


@dataclass
class _Round:
    """One key: who stores what under it, and who gets it."""

    index: int
    name: str
    values: dict[int, int]
    """By the number of the peer that stores it."""
    getters: list[int]
    stored: dict[str, int] = field(default_factory=dict)
    """What was taken, by subkey."""


async def run_keys(swarm: Swarm, plan: KeysPlan) -> Outcome:
    """Create, store, kill, get; in rounds, or one after the other where the plan has a number of keys."""
    outcome = Outcome(create_s=await swarm.create())
    numbers = sorted(swarm.peers)
    victims = swarm.random.sample(numbers, swarm.config.num_victims)
    doomed = frozenset(victims)
    survivors = [number for number in numbers if number not in doomed]
    rounds = [_draw(swarm, plan, index, survivors) for index in range(plan.num_keys or plan.total_num_rounds)]
    keys = _Keys(swarm, plan, outcome, rounds)
    if plan.num_keys is not None:
        await keys.store(rounds)
        await swarm.kill(victims)
        await asyncio.sleep(plan.delay_s)
        await keys.get(rounds)
        return outcome
    dies_in = sorted(swarm.random.randrange(len(rounds)) for _ in victims)
    for start in range(0, len(rounds), plan.num_threads):
        some = rounds[start : start + plan.num_threads]
        dying = [
            victim for victim, index in zip(victims, dies_in, strict=True) if 0 <= index - start < len(some)
        ]
        await keys.store(some, dying)
        await asyncio.sleep(plan.delay_s)
        await keys.get(some)
        await asyncio.sleep(plan.wait_after_iteration_s)
    return outcome


def _draw(swarm: Swarm, plan: KeysPlan, index: int, survivors: Sequence[int]) -> _Round:
    """Those who get are others than those who store, where there are enough."""
    draw = swarm.random
    storing = draw.sample(survivors, min(plan.num_store_peers, len(survivors)))
    others = [number for number in survivors if number not in storing]
    able = others if len(others) >= plan.num_get_peers else survivors
    return _Round(
        index,
        name=f"bench/{draw.getrandbits(64):016x}",
        values={number: draw.getrandbits(32) for number in storing},
        getters=draw.sample(able, min(plan.num_get_peers, len(able))),
    )


class _Keys:
    def __init__(self, swarm: Swarm, plan: KeysPlan, outcome: Outcome, rounds: Sequence[_Round]) -> None:
        self._swarm = swarm
        self._plan = plan
        self._store, self._get = outcome.store, outcome.get
        self._on_stored = swarm.counted("stored", sum(len(round_.values) for round_ in rounds))
        self._on_got = swarm.counted("got", sum(len(round_.getters) for round_ in rounds))

    async def store(self, rounds: Sequence[_Round], dying: Sequence[int] = ()) -> None:
        """Store all keys of these rounds, while some peers die."""
        swarm, plan, phase = self._swarm, self._plan, self._store
        work = [
            (round_.index, number, round_.name, value)
            for round_ in rounds
            for number, value in round_.values.items()
        ]
        details = {"expiration_s": swarm.config.expiration_s, "limit": self._limit(plan.num_store_peers)}
        queues = {
            rank: _orders(share, {**details, "deaths": []}) for rank, share in self._shares(work).items()
        }
        by_rank: dict[int, list[Details]] = {rank: list(orders) for rank, orders in queues.items()}
        for victim in dying:
            orders = by_rank.setdefault(swarm.rank_of(victim), [{**details, "work": [], "deaths": []}])
            orders[0]["deaths"] = [*orders[0]["deaths"], victim]
        async with Watched(swarm, phase):
            began_s = swarm.clock.now_s()
            answers = await swarm.work_off("store", by_rank, self._on_stored)
            phase.total_s += swarm.clock.now_s() - began_s
        await swarm.bury(dying)
        by_index = {round_.index: round_ for round_ in rounds}
        for index, number, _, num_replicas, verdict in answers:
            if num_replicas:
                by_index[index].stored[str(number)] = by_index[index].values[number]
                phase.num_right += 1
            else:
                phase.note_failures({verdict: 1})
            phase.replicas.append(num_replicas)
        phase.num_tried += len(answers)
        self._note(phase, [(index, took_s) for index, _, took_s, _, _ in answers])

    async def get(self, rounds: Sequence[_Round]) -> None:
        """Get all keys of these rounds; all that was stored under one must come back."""
        swarm, plan, phase = self._swarm, self._plan, self._get
        work = [
            (round_.index, number, round_.name, round_.stored)
            for round_ in rounds
            for number in round_.getters
        ]
        details = {"latest": plan.latest, "limit": self._limit(plan.num_get_peers)}
        queues = {rank: list(_orders(share, details)) for rank, share in self._shares(work).items()}
        async with Watched(swarm, phase):
            began_s = swarm.clock.now_s()
            answers = await swarm.work_off("get", queues, self._on_got)
            phase.total_s += swarm.clock.now_s() - began_s
        phase.num_tried += len(answers)
        phase.num_right += sum(is_right for _, _, is_right, _, _ in answers)
        phase.hops += [hops for _, _, _, hops, _ in answers]
        phase.meeting_dead_s += [took_s for _, took_s, _, _, num_to_dead in answers if num_to_dead]
        self._note(phase, [(index, took_s) for index, took_s, *_ in answers])

    def _limit(self, num_peers: int) -> int:
        """Operations of one host at once."""
        return max(1, round(self._plan.num_threads * num_peers / self._swarm.num_ranks))

    def _shares(self, work: Sequence[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
        """By the host of the peer that is to do it."""
        shares: dict[int, list[tuple[Any, ...]]] = {}
        for item in work:
            shares.setdefault(self._swarm.rank_of(item[1]), []).append(item)
        return shares

    def _note(self, phase: Phase, times: Sequence[tuple[int, float]]) -> None:
        phase.latencies_s += [took_s for _, took_s in times]
        slowest: dict[int, float] = {}
        for index, took_s in times:
            slowest[index] = max(took_s, slowest.get(index, 0.0))
        phase.rounds_s += slowest.values()


def _orders(work: Sequence[Any], details: Details) -> Iterator[Details]:
    for start in range(0, len(work), _BATCH):
        yield {**details, "work": work[start : start + _BATCH]}
