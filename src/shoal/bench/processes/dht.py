"""The peers of `shoal bench dht`, and who carries out what they are ordered to do.

`PeerHost` is many peers on one loop: the same in every process of a benchmark on sockets and in the one of a
virtual world. `ProcessFleet` and `VirtualFleet` bring orders to hosts, and `BenchSwarm` is what the two modes
of the benchmark see: peers by number. Orders and answers are what JSON carries.

At the end stand the sockets of one peer among many in a process: a `MortalNetwork` dies as a killed process
does, at once and without a word, and a `TappedNetwork` notices that a peer still sends to the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import hashlib
import random
import socket
import ssl
import sys
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import msgspec

from shoal.bench.dht import DhtConfig, Totals
from shoal.bench.frame import Tell
from shoal.bench.workers import Child, Parent, children, end_with_parent, serve
from shoal.core import (
    Address,
    BenchmarkError,
    Clock,
    Deadline,
    LoopThread,
    Peer,
    PeerId,
    Scope,
    ShoalError,
    fanout,
    results_of,
    running_clock,
)
from shoal.core.identity import SEED_BYTES, Identity, new_secret
from shoal.dht.node import DHT
from shoal.dht.records import Entry, Stored, Verdict
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import PING, Ping
from shoal.experts.names import declare_experts, get_experts
from shoal.transport import (
    Conditions,
    Endpoint,
    Membership,
    MemoryNetwork,
    Network,
    Profile,
    SocketNetwork,
    SwarmSecret,
)
from shoal.transport.network.sockets import Accepted, SocketAccepted, SocketListener

if TYPE_CHECKING:
    from typing_extensions import Buffer

# --- where peers stand ---

_LOOPBACK = "127.0.0.1"


class PeerPlace(NamedTuple):
    """Where a peer is put, and who it is."""

    network: Network
    kill: Callable[[], None]
    identity: Identity
    membership: Membership | None
    host: str


def loopback_places(secret: str) -> Callable[[int], PeerPlace]:
    """Places on loopback: a socket that can be killed and a fresh identity each, sealed by one secret."""
    swarm_secret = SwarmSecret.parse(secret)

    def place(number: int) -> PeerPlace:
        network, identity = MortalNetwork(), Identity.generate()
        return PeerPlace(network, network.kill, identity, Membership(identity, swarm_secret), _LOOPBACK)

    return place


def simulated_places(network: MemoryNetwork) -> Callable[[int], PeerPlace]:
    """Places in a simulated network: a host each, and identities that are the same in every run."""

    def place(number: int) -> PeerPlace:
        host = network.host(f"peer{number}")
        seed = hashlib.blake2b(f"{network.seed} {host.name}".encode(), digest_size=SEED_BYTES).digest()
        return PeerPlace(host, host.kill, Identity.from_seed(seed), None, host.name)

    return place


# --- peers of one process ---

T = TypeVar("T")


def dht_settings(wait_timeout_s: float | None) -> DHTSettings:
    """What the DHT ships with, but for the time after which a request has failed."""
    return DHTSettings() if wait_timeout_s is None else DHTSettings(call_s=wait_timeout_s)


@dataclass(frozen=True, slots=True)
class _Hosted:
    dht: DHT
    tap: TappedNetwork | None
    kill: Callable[[], None]
    closing: contextlib.AsyncExitStack


class PeerHost:
    """The peers of one process. Its public methods are the orders that it takes."""

    def __init__(self, place: Callable[[int], PeerPlace], settings: DHTSettings, *, has_deaths: bool) -> None:
        self._place = place
        self._settings = settings
        self._dead: set[tuple[str, int]] | None = set() if has_deaths else None
        self._peers: dict[int, _Hosted] = {}
        self._of_the_dead = Totals()

    async def create(
        self, numbers: Sequence[int], joins: Sequence[Sequence[str]]
    ) -> list[tuple[int, str, str]]:
        """Begin these peers at once, each through its own addresses; number, address and id of each."""
        await _all_of([self._open(number, join) for number, join in zip(numbers, joins, strict=True)])
        dhts = [(number, self._peers[number].dht) for number in numbers]
        return [(number, str(dht.peer.address), str(dht.peer_id)) for number, dht in dhts]

    async def _open(self, number: int, join: Sequence[str]) -> None:
        network, kill, identity, membership, host = self._place(number)
        tap = None if self._dead is None else TappedNetwork(network, self._dead)
        async with contextlib.AsyncExitStack() as opening:
            heard = network if tap is None else cast("Network", tap)
            endpoint = Endpoint(membership=membership, network=heard, peer_id=identity.peer_id)
            await opening.enter_async_context(endpoint)
            await endpoint.listen(Address(host, 0))
            dht = DHT(join=join, identity=identity, settings=self._settings, endpoint=endpoint)
            await opening.enter_async_context(dht)
            self._peers[number] = _Hosted(dht, tap, kill, opening.pop_all())

    # --- experts ---

    async def declare(
        self, number: int, uids: Sequence[str], expiration_s: float, address: str
    ) -> dict[str, Any]:
        """Have a peer declare experts as served at an address.

        Seconds, when they expire, how many peers took each record, how many records are there now, and how
        many are not for which reason.
        """
        dht = _Overheard(self._peers[number].dht)
        clock = dht.endpoint.network.clock
        expires_at_s = dht.in_s(expiration_s)
        addresses = [Address.parse(address)]
        began_s = clock.now_s()
        await declare_experts(cast("DHT", dht), uids, expires_at_s, addresses=addresses)
        took_s = clock.now_s() - began_s
        failed = [
            stored.verdict.name
            for entry, stored in dht.stored
            if not stored and (entry.is_owned or stored.verdict is not Verdict.NOT_NEWER)  # a prefix is there
        ]
        return {
            "took_s": took_s,
            "expires_at_s": expires_at_s,
            "replicas": [stored.num_stored for _, stored in dht.stored],
            "num_stored": len(dht.stored) - len(failed),
            "failed": _counted(failed),
        }

    async def fetch(
        self, number: int, uids: Sequence[str], address: str, server: str
    ) -> dict[str, float | list[int]]:
        """Have a peer look experts up, and count those that are served where and by whom they should be."""
        dht = self._peers[number].dht
        clock = dht.endpoint.network.clock
        began_s = clock.now_s()
        found = await get_experts(dht, uids)
        took_s = clock.now_s() - began_s
        hops = list(dht.last_hops)
        where, who = Address.parse(address), PeerId.parse(server)
        num_right = sum(
            expert is not None
            and str(expert.uid) == uid
            and any(peer.address == where and peer.id == who for peer in expert.peers)
            for uid, expert in zip(uids, found, strict=True)
        )
        return {"took_s": took_s, "num_right": num_right, "hops": hops, "ended_at_s": dht.wall_s()}

    # --- keys ---

    async def store(
        self,
        work: Sequence[tuple[int, int, str, int]],
        expiration_s: float,
        limit: int,
        deaths: Sequence[int],
    ) -> list[tuple[int, int, float, int, str]]:
        """Have peers store: (round, number, name, value) each, under its number as the subkey.

        Those in `deaths` die meanwhile. (Round, number, seconds, how many peers took it, verdict) of each.
        """
        stores = [self._store(*item, expiration_s) for item in work]
        deadline = Deadline.never()
        kills = [self._kill(number) for number in deaths if number in self._peers]
        step = len(stores) // (len(kills) + 1)
        mixed: list[Coroutine[Any, Any, Any]] = []
        for index, kill in enumerate(kills):
            mixed += [*stores[index * step : (index + 1) * step], kill]
        mixed += stores[len(kills) * step :]
        outcomes = await fanout(mixed, deadline, limit=limit)
        return [outcome for outcome in results_of(outcomes) if outcome is not None]

    async def _store(
        self, index: int, number: int, name: str, value: int, expiration_s: float
    ) -> tuple[int, int, float, int, str]:
        dht = self._peers[number].dht
        clock = dht.endpoint.network.clock
        began_s = clock.now_s()
        num_replicas = 0
        try:
            stored = await dht.store(name, value, dht.in_s(expiration_s), subkey=number)
            num_replicas, verdict = stored.num_stored, stored.verdict.name
        except ShoalError as error:
            verdict = type(error).__name__
        return index, number, clock.now_s() - began_s, num_replicas, verdict

    async def get(
        self, work: Sequence[tuple[int, int, str, dict[str, int]]], latest: bool, limit: int
    ) -> list[tuple[int, float, bool, int, int]]:
        """Have peers get: (round, number, name, expected value of each subkey).

        (Round, seconds, whether all is there, hops, datagrams that the peer sent to the dead meanwhile, for
        whatever) of each. Where nothing was stored there is nothing to get, and that is a failure.
        """
        return await _all_of([self._get(*item, latest) for item in work], limit)

    async def _get(
        self, index: int, number: int, name: str, expected: dict[str, int], latest: bool
    ) -> tuple[int, float, bool, int, int]:
        dht, tap = self._peers[number].dht, self._peers[number].tap
        clock = dht.endpoint.network.clock
        num_to_dead = tap.num_to_dead if tap else 0
        began_s = clock.now_s()
        found, hops = None, 0
        with contextlib.suppress(ShoalError):
            found = await dht.get(name, latest=latest)
            hops = dht.last_hops[0]
        took_s = clock.now_s() - began_s
        slots = found.value if found is not None and isinstance(found.value, dict) else {}
        values = {str(subkey): slot.value for subkey, slot in slots.items()}
        is_right = bool(expected) and values == expected
        num_to_dead = (tap.num_to_dead if tap else 0) - num_to_dead
        return index, took_s, is_right, hops, num_to_dead

    # --- death ---

    async def kill(self, numbers: Sequence[int]) -> None:
        """End these peers without a word."""
        await _all_of([self._kill(number) for number in numbers if number in self._peers])

    async def _kill(self, number: int) -> None:
        peer = self._peers.pop(number)
        self._of_the_dead += _totals_of(peer.dht)
        peer.kill()
        with contextlib.suppress(ShoalError):
            await peer.closing.aclose()

    async def bury(self, addresses: Sequence[str]) -> None:
        """Know who is dead, here and in other processes: what is still sent there is counted."""
        if self._dead is not None:
            self._dead.update((each.host, each.port) for each in map(Address.parse, addresses))

    # --- how it stands ---

    async def round_trips(self, pairs: Sequence[tuple[int, str, str]], limit: int) -> list[float]:
        """Have peers ping others: (number, address, id); seconds of each that was answered."""
        calls = [
            self._round_trip(number, Peer(Address.parse(address), PeerId.parse(peer_id)))
            for number, address, peer_id in pairs
        ]
        outcomes = await fanout(calls, Deadline.never(), limit=limit)
        return [outcome for outcome in outcomes if isinstance(outcome, float)]

    async def _round_trip(self, number: int, other: Peer) -> float:
        """Of the second ping: by then they have been introduced."""
        dht = self._peers[number].dht
        await dht.ping(other)
        return (await dht.ping(other)).round_trip_s

    async def totals(self) -> list[int]:
        """What all peers here have done, the dead ones included."""
        totals = sum((_totals_of(peer.dht) for peer in self._peers.values()), self._of_the_dead)
        return list(msgspec.structs.astuple(totals))

    def settle(self) -> None:
        """Peers have been made: hundreds of them are not garbage that is worth looking through again."""
        gc.collect()
        gc.freeze()

    def memory(self) -> tuple[int, int]:
        """What `memory` says of this process."""
        return memory()

    async def close(self) -> None:
        """End all peers, without letting each other know."""
        await self.kill(list(self._peers))


def _totals_of(dht: DHT) -> Totals:
    stats, counts = dht.endpoint.datagrams.stats, dht.counts
    num_requests = counts.num_finds + counts.num_stores + counts.num_pings
    return Totals(stats.packets_out, stats.bytes_out, num_requests + dht.num_served)


class _Overheard:
    """A peer of which it is noted what became of every record that it stored."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self.stored: list[tuple[Entry, Stored]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dht, name)

    async def store_many(self, entries: Sequence[Entry], *, deadline: Deadline | None = None) -> list[Stored]:
        outcomes = await self._dht.store_many(entries, deadline=deadline)
        self.stored += zip(entries, outcomes, strict=True)
        return outcomes


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


async def _all_of(calls: Sequence[Coroutine[Any, Any, T]], limit: int | None = None) -> list[T]:
    """Every result; the first error, once all have ended."""
    return results_of(await fanout(calls, Deadline.never(), limit=limit))


# --- a process ---


def host(arguments: dict[str, Any], parent: Parent) -> None:
    """Host peers until there are no more orders."""
    end_with_parent()
    places, settings = loopback_places(arguments["secret"]), dht_settings(arguments["wait_timeout_s"])
    peers = PeerHost(places, settings, has_deaths=arguments["has_deaths"])
    with LoopThread() as loop, contextlib.ExitStack() as closing:
        closing.callback(lambda: loop.run(peers.close()))
        serve(parent, peers, loop)


def memory() -> tuple[int, int]:
    """Bytes of this process: its proportional share of memory (PSS) now, and the most that it ever had (RSS).

    Where the system tells no PSS, both are the RSS. Pages that processes share are in the RSS of each.
    """
    try:
        return _kibibytes("smaps_rollup", "Pss:") << 10, _kibibytes("status", "VmHWM:") << 10
    except (OSError, StopIteration):
        peak_bytes = _peak_rss_bytes()
        return peak_bytes, peak_bytes


def _kibibytes(file: str, field: str) -> int:
    lines = Path("/proc/self", file).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _peak_rss_bytes() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


# --- fleets ---

Details = dict[str, Any]
_ANSWER_S = 600.0


class ProcessFleet:
    """Processes, each with a share of the peers, on real sockets; open it with `async with`."""

    at_once = 32
    """Peers that one host may begin at once."""

    def __init__(self, config: DhtConfig) -> None:
        self.num_ranks = config.num_ranks
        self._secret = new_secret()
        self._arguments = {
            "secret": self._secret,
            "wait_timeout_s": config.wait_timeout_s,
            "has_deaths": config.num_victims > 0,
        }
        self._children: list[Child] = []
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        arguments = [self._arguments] * self.num_ranks
        started = children("shoal.bench.processes.dht:host", arguments, name="Process")
        self._children = self._stack.enter_context(started)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """Give each host the orders of its queue one after another; `on_answer` hears what they say.

        Hosts work side by side, each at its own pace.
        """
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
    at_once = 256

    def __init__(self, config: DhtConfig, seed: int) -> None:
        assert config.profile is not None
        self._network = MemoryNetwork(Conditions(Profile.load(config.profile), seed=seed), seed)
        self._host = PeerHost(
            simulated_places(self._network), config.settings, has_deaths=config.num_victims > 0
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
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


# --- the swarm ---

_ASKED_AT_ONCE = 64
_ALIVE_S = 3.0  # for a peer to say that it lives
_NUM_PAIRS = 200
_MAX_KNOWN = 1000


class BenchSwarm:
    """All peers, as a mode of the benchmark sees them: by number."""

    def __init__(self, fleet: ProcessFleet | VirtualFleet, config: DhtConfig, seed: int, tell: Tell) -> None:
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
        """How many hosts the peers are spread over."""
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


# --- sockets that die at once ---

_NO_LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # struct linger {1, 0}: closing sends a reset, nothing else


class MortalNetwork(SocketNetwork):
    """TCP and UDP of this machine, until it is killed; stays dead."""

    def __init__(self) -> None:
        super().__init__()
        self._is_dead = False
        self._carriers: list[tuple[asyncio.DatagramTransport, asyncio.DatagramProtocol]] = []
        self._streams: list[socket.socket] = []

    def kill(self) -> None:
        """Close its sockets; whatever the peer does after this, nobody hears of it.

        Those that listen for streams are closed by their owner, which should be closed right after.
        """
        self._is_dead = True
        for carrier, protocol in self._carriers:
            carrier.abort()
            protocol.pause_writing()  # it learns of its end a moment later, and would send meanwhile
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                stream.shutdown(socket.SHUT_RDWR)

    async def listen(self, address: Address, *, is_shared: bool = False) -> SocketListener:
        """Listens as any network does."""
        self._check_alive()
        return await super().listen(address, is_shared=is_shared)

    async def connect(self, address: Address, *, from_port: int = 0) -> socket.socket:
        """Connects as any network does."""
        self._check_alive()
        return self._noted(await super().connect(address, from_port=from_port))

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: ssl.SSLContext | None = None,
        is_server: bool = True,
    ) -> None:
        """Adopts a connection as any network does."""
        self._check_alive()
        self._noted(cast("SocketAccepted", accepted).socket)
        await super().adopt(accepted, protocol, tls=tls, is_server=is_server)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Opens datagrams as any network does."""
        self._check_alive()
        carrier = await super().open_datagrams(address, protocol)
        self._carriers.append((carrier, protocol))
        return carrier

    def _noted(self, stream: socket.socket) -> socket.socket:
        self._streams = [known for known in self._streams if known.fileno() >= 0]
        self._streams.append(stream)
        return stream

    def _check_alive(self) -> None:
        if self._is_dead:
            raise OSError(errno.ENETDOWN, "this peer was killed")


class TappedNetwork:
    """Another network, and a count of the datagrams that its peer sends to the dead."""

    def __init__(self, inner: Network, dead: Container[tuple[str, int]]) -> None:
        self.num_to_dead = 0
        self.dead = dead
        """The hosts and ports at which peers listened that are dead."""
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Open datagrams as the other network does, and look at what is sent."""
        begin = protocol.connection_made

        def begin_tapped(transport: asyncio.BaseTransport) -> None:
            begin(cast("asyncio.DatagramTransport", _Carrier(transport, self)))

        protocol.connection_made = begin_tapped  # type: ignore[method-assign]
        return await self._inner.open_datagrams(address, protocol)


class _Carrier:
    """A socket whose sends the tap hears of."""

    def __init__(self, carrier: Any, tap: TappedNetwork) -> None:
        self._carrier = carrier
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        self._tap.num_to_dead += addr[:2] in self._tap.dead
        self._carrier.sendto(data, addr)
