"""Who carries out the orders of `shoal bench dht`: processes that host peers on sockets, or a virtual world.

What is ordered, and in which order, is the modes' (`dht_experts`, `dht_keys`); they see a `Swarm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from shoal.bench.children import Child, child
from shoal.bench.dht_config import DhtConfig
from shoal.bench.dht_hosting import Host, MemoryGround, Totals
from shoal.bench.dht_peers import dht_settings, memory_bytes
from shoal.bench.frame import Tell
from shoal.core import Address, BenchmarkError, Clock, Deadline, Peer, PeerId, Scope, fanout, running_clock
from shoal.core.identity import Identity, new_secret
from shoal.dht.messages import PING, Ping
from shoal.transport import Conditions, Endpoint, Membership, MemoryNetwork, Profile, SwarmSecret

Details = dict[str, Any]
_ANSWER_S = 600.0
_AT_ONCE, _VIRTUAL_AT_ONCE = 32, 256
_ASKED_AT_ONCE = 64
_ALIVE_S = 3.0  # for a peer to say that it lives
_MAX_KNOWN = 1000


class Fleet(Protocol):
    """Hosts of peers, by rank; open it with `async with`."""

    num_ranks: int
    at_once: int
    """Peers that one host may begin at once."""

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """Give each host the orders of its queue one after another; `on_answer` hears what they say."""

    def outsider(self) -> Endpoint:
        """An endpoint that belongs to no host, and is not open yet."""


class ProcessFleet:
    """Processes, each with a share of the peers, on real sockets."""

    at_once = _AT_ONCE

    def __init__(self, config: DhtConfig) -> None:
        self.num_ranks = config.num_processes + config.has_askers_apart
        self._secret = new_secret()
        self._arguments = {
            "secret": self._secret,
            "wait_timeout_s": config.wait_timeout_s,
            "has_deaths": config.num_victims > 0,
        }
        self._children: list[Child] = []
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for rank in range(self.num_ranks):
                name = f"Process {rank + 1} of {self.num_ranks}"
                hosting = child("shoal.bench.dht_peers:host", self._arguments, name=name)
                self._children.append(stack.enter_context(hosting))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hosting in self._children:  # all of them, before one is waited for
            hosting.end() if error is None else hosting.kill()
        self._stack.__exit__(kind, error, trace)

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """Hosts work side by side, each at its own pace."""
        async with Scope("fleet") as scope:
            for hosting, queue in zip(self._children, queues, strict=True):
                scope.start(self._work_off(hosting, order, queue, on_answer))

    async def _work_off(
        self, hosting: Child, order: str, queue: Iterable[Details], on_answer: Callable[[Any], None]
    ) -> None:
        for details in queue:
            hosting.order(order=order, details=details)
            await _readable(hosting, order)
            on_answer(hosting.expect()["answer"])

    def outsider(self) -> Endpoint:
        """A member of the swarm that no process hosts."""
        return Endpoint(membership=Membership(Identity.generate(), SwarmSecret.parse(self._secret)))


class VirtualFleet:
    """One host in a simulated network, in virtual time."""

    num_ranks = 1
    at_once = _VIRTUAL_AT_ONCE

    def __init__(self, config: DhtConfig, seed: int) -> None:
        assert config.profile is not None
        self._network = MemoryNetwork(Conditions(Profile.load(config.profile), seed=seed), seed)
        settings = dht_settings(config.wait_timeout_s)
        self._host = Host(MemoryGround(self._network), settings, has_deaths=config.num_victims > 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._host.close()

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """The same orders, without a process between."""
        if order in ("settle", "memory"):
            return  # of processes
        for details in queues[0]:
            on_answer(await getattr(self._host, order)(**details))

    def outsider(self) -> Endpoint:
        """A host of its own."""
        return Endpoint(network=self._network.host("outsider"))


async def _readable(hosting: Child, order: str) -> None:
    """Wait until a child has something to say."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(hosting.fileno(), ready.set)
    try:
        async with asyncio.timeout(_ANSWER_S):
            await ready.wait()
    except TimeoutError:
        raise BenchmarkError(
            f"A process did not answer '{order}' within {_ANSWER_S:g} s.",
            cause="the machine is overloaded, or out of memory.",
            next_step="run it with fewer peers.",
        ) from None
    finally:
        loop.remove_reader(hosting.fileno())


class Swarm:
    """All peers, as a mode of the benchmark sees them: by number."""

    def __init__(self, fleet: Fleet, config: DhtConfig, seed: int, tell: Tell) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.peers: dict[int, Peer] = {}
        self.clock: Clock = running_clock()
        self.memory_bytes = 0
        """The most that all processes together were seen to have."""
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

        await self._fleet.deal("create", self._queues({0: [self._newcomers([0])]}), on_answer)
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
        of_hosts = sum(await self._to_all("memory"))
        self.memory_bytes = max(self.memory_bytes, of_hosts + memory_bytes())

    async def ask_who_lives(self) -> list[float]:
        """Ask every peer that was ever created; the round trips of those that answer."""
        self._tell(f"asking all {len(self.peers)} peers whether they live")
        async with self._fleet.outsider() as outsider:
            calls = [self._ping(outsider, peer) for peer in self.peers.values()]
            outcomes = await fanout(calls, Deadline.never(), limit=_ASKED_AT_ONCE)
        return [outcome for outcome in outcomes if isinstance(outcome, float)]

    async def _ping(self, outsider: Endpoint, peer: Peer) -> float:
        """Twice, and the second time counts: by then they have been introduced."""
        began_s = 0.0
        for _ in range(2):
            began_s = self.clock.now_s()
            deadline = Deadline.after(_ALIVE_S, self.clock)
            await outsider.datagrams.call(peer, PING, Ping(0), deadline=deadline)
        return self.clock.now_s() - began_s

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
