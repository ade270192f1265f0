"""Many peers of a DHT on one loop, and what a benchmark has them do: made, asked, timed and killed by number.

The same in every process of a benchmark on sockets and in the one of a virtual world; a `Ground` says which.
Orders and answers are what JSON carries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from shoal.bench.dht_grounds import Ground
from shoal.bench.mortal import Graveyard, TappedNetwork
from shoal.core import Address, Deadline, Peer, PeerId, ShoalError, fanout
from shoal.dht.node import DHT
from shoal.dht.records import Entry, Stored, Verdict
from shoal.dht.settings import DHTSettings
from shoal.experts.names import declare_experts, get_experts
from shoal.transport import Endpoint

T = TypeVar("T")


class Totals(msgspec.Struct, frozen=True):
    """What peers have done so far, added up."""

    datagrams: int = 0
    """Sent, greetings, acknowledgements and repeats among them; one carries several messages."""
    size_bytes: int = 0
    """Of those."""
    messages: int = 0
    """Requests that were sent (to find, to store, to answer a ping), and answers that were given."""

    def __sub__(self, earlier: Totals) -> Totals:
        now, then = msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)
        return Totals(*(late - early for late, early in zip(now, then, strict=True)))

    def __add__(self, other: Totals) -> Totals:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Totals(*(one + another for one, another in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class _Hosted:
    dht: DHT
    tap: TappedNetwork | None
    kill: Callable[[], None]
    closing: contextlib.AsyncExitStack


class Host:
    """The peers of one process. Its public coroutines are the orders that it takes."""

    def __init__(self, ground: Ground, settings: DHTSettings, *, has_deaths: bool) -> None:
        self._ground = ground
        self._settings = settings
        self._graveyard = Graveyard() if has_deaths else None
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
        network, kill, identity, membership, host = self._ground.place(number)
        tap = None if self._graveyard is None else TappedNetwork(network, self._graveyard)
        async with contextlib.AsyncExitStack() as opening:
            endpoint = Endpoint(membership=membership, network=tap or network, peer_id=identity.peer_id)
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
        return {
            "took_s": took_s,
            "num_right": num_right,
            "hops": hops,
            "ended_at_s": dht.wall_s(),
        }

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
        return [outcome for outcome in map(_checked, outcomes) if outcome is not None]

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
        if self._graveyard is not None:
            for address in addresses:
                self._graveyard.bury(Address.parse(address))

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
    return [_checked(outcome) for outcome in await fanout(calls, Deadline.never(), limit=limit)]


def _checked(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
