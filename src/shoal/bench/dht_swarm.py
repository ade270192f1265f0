"""The peers of `shoal bench dht` as its modes see them: by number, and asked through whoever hosts them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.bench.dht_config import DhtConfig
from shoal.bench.dht_fleet import Details, Fleet
from shoal.bench.dht_hosting import Totals
from shoal.bench.dht_peers import memory
from shoal.bench.frame import Tell
from shoal.core import Address, Clock, Deadline, Peer, PeerId, fanout, running_clock
from shoal.dht.wire import PING, Ping
from shoal.transport import Endpoint

_ASKED_AT_ONCE = 64
_ALIVE_S = 3.0  # for a peer to say that it lives
_NUM_PAIRS = 200
_MAX_KNOWN = 1000


class Swarm:
    """All peers, as a mode of the benchmark sees them: by number."""

    def __init__(self, fleet: Fleet, config: DhtConfig, seed: int, tell: Tell) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.peers: dict[int, Peer] = {}
        self.clock: Clock = running_clock()
        self.memory_bytes = 0
        """The most that hosts and this process together were seen to have."""
        self.peak_rss_bytes = 0
        """The most that each of them ever had, added up."""
        self._fleet = fleet
        self._tell = tell

    async def create(self) -> float:
        """Begin all peers, each joining by some that are there; seconds from the first to the last."""
        await self._to_all("totals")  # whoever answers has started and imported what it needs
        num_peers, num_ranks = self.config.num_peers, self._fleet.num_ranks
        began_s = self.clock.now_s()
        advance = self.counted("peers created", num_peers)

        def on_answer(created: Sequence[tuple[int, str, str]]) -> None:
            for number, address, peer_id in created:
                self.peers[number] = Peer(Address.parse(address), PeerId.parse(peer_id))
            advance(len(created))

        await self._fleet.deal("create", self._queues({self.rank_of(0): [self._newcomers([0])]}), on_answer)
        shares: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
        for number in range(1, num_peers):
            shares[self.rank_of(number)].append(number)
        queues = {rank: self._creations(share) for rank, share in shares.items()}
        await self._fleet.deal("create", self._queues(queues), on_answer)
        took_s = self.clock.now_s() - began_s
        await self._to_all("settle")
        await self.look_at_memory()
        return took_s

    def _creations(self, numbers: Sequence[int]) -> Iterator[Details]:
        """No more at once than there are peers to join by."""
        start = 0
        while start < len(numbers):
            size = min(self._fleet.at_once, len(self.peers))
            yield self._newcomers(numbers[start : start + size])
            start += size

    def _newcomers(self, numbers: Sequence[int]) -> Details:
        known = list(self.peers.values())[-_MAX_KNOWN:]
        num_each = min(self.config.initial_peers, len(known))
        joins = [[str(peer.address) for peer in self.random.sample(known, num_each)] for _ in numbers]
        return {"numbers": list(numbers), "joins": joins}

    # --- orders ---

    def rank_of(self, number: int) -> int:
        """The host of a peer."""
        if not self.config.has_askers_apart:
            return number % self._fleet.num_ranks
        num_shared = self._fleet.num_ranks - 1
        return num_shared if number >= self.config.num_peers - 2 else number % num_shared

    @property
    def num_ranks(self) -> int:
        """Hosts of peers."""
        return self._fleet.num_ranks

    async def ask(self, number: int, order: str, **details: Any) -> Any:
        """Have one peer do something."""
        answers: list[Any] = []
        queues = self._queues({self.rank_of(number): [{"number": number, **details}]})
        await self._fleet.deal(order, queues, answers.append)
        return answers[0]

    async def work_off(
        self, order: str, queues: Mapping[int, Iterable[Details]], advance: Callable[[int], None]
    ) -> list[Any]:
        """Have hosts work their queues off, by rank; everything that they answer, in no order."""
        results: list[Any] = []

        def collect(answer: list[Any]) -> None:
            results.extend(answer)
            advance(len(answer))

        await self._fleet.deal(order, self._queues(queues), collect)
        return results

    async def kill(self, numbers: Sequence[int]) -> None:
        """End peers without a word, and let hosts know where nobody answers any more."""
        await self._to_all("kill", numbers=list(numbers))
        await self.bury(numbers)

    async def bury(self, numbers: Sequence[int]) -> None:
        """Let hosts know who is dead."""
        await self._to_all("bury", addresses=[str(self.peers[number].address) for number in numbers])

    async def totals(self) -> Totals:
        """What all peers have done so far."""
        return sum((Totals(*answer) for answer in await self._to_all("totals")), Totals())

    async def look_at_memory(self) -> None:
        """Keep the most that was ever seen."""
        each = [*await self._to_all("memory"), memory()]
        self.memory_bytes = max(self.memory_bytes, sum(now_bytes for now_bytes, _ in each))
        self.peak_rss_bytes = sum(peak_bytes for _, peak_bytes in each)

    async def round_trips(self, alive: Sequence[int]) -> list[float]:
        """Have peers ping others, pairs of living ones at random; seconds of each round trip."""
        queues: dict[int, list[tuple[int, str, str]]] = {}
        for _ in range(_NUM_PAIRS):
            number, other = self.random.sample(alive, 2)
            peer = self.peers[other]
            queues.setdefault(self.rank_of(number), []).append((number, str(peer.address), str(peer.id)))
        limit = 1 if self.config.profile is None else _NUM_PAIRS  # on cores they would wait for each other
        orders = {rank: [{"pairs": pairs, "limit": limit}] for rank, pairs in queues.items()}
        return await self.work_off("round_trips", orders, lambda _: None)

    async def ask_who_lives(self) -> list[int]:
        """Ask every peer that was ever created; those that answer."""
        self._tell(f"asking all {len(self.peers)} peers whether they live")
        async with self._fleet.outsider() as outsider:
            calls = [self._ping(outsider, number) for number in sorted(self.peers)]
            outcomes = await fanout(calls, Deadline.never(), limit=_ASKED_AT_ONCE)
        return [outcome for outcome in outcomes if isinstance(outcome, int)]

    async def _ping(self, outsider: Endpoint, number: int) -> int:
        deadline = Deadline.after(_ALIVE_S, self.clock)
        await outsider.datagrams.call(self.peers[number], PING, Ping(0), deadline=deadline)
        return number

    def _queues(self, by_rank: Mapping[int, Iterable[Details]]) -> list[Iterable[Details]]:
        return [by_rank.get(rank, ()) for rank in range(self._fleet.num_ranks)]

    async def _to_all(self, order: str, **details: Any) -> list[Any]:
        answers: list[Any] = []
        await self._fleet.deal(order, [[details]] * self._fleet.num_ranks, answers.append)
        return answers

    def counted(self, what: str, total: int) -> Callable[[int], None]:
        """A bar: call it with how many more are done."""
        done = 0

        def advance(num_more: int) -> None:
            nonlocal done
            done += num_more
            self._tell(f"{what}: {done} of {total}")

        return advance
