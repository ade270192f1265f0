"""Who is in a swarm: every peer is asked whom it knows, until there is nobody new or a limit is reached.

A peer knows its nearest neighbours best, so that the chain of neighbours leads through the whole swarm; it is
also asked for some peers at every other distance, so that the way is short. Clients are known to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shoal.core import (
    Address,
    Deadline,
    Peer,
    PeerId,
    PeerRefused,
    ShoalError,
    UsageError,
    fanout,
)
from shoal.core.ids import ID_BYTES
from shoal.dht.join import first_ping, unreachable
from shoal.dht.node import DHT
from shoal.dht.protocol import Answered, DHTProtocol
from shoal.dht.wire import ID_BITS, About, Contact, LookupKind, Want, named

_NUM_DISTANCES = 15
"""Halves of the space, and halves of these, in which each peer is asked for whom it knows."""
_AT_ONCE = 32
_LIMIT_S = 600.0


class Visited(msgspec.Struct, frozen=True):
    """A peer, and what came of asking it; without `about` it did not answer, and `error` says how."""

    peer: Peer
    about: About | None = None
    round_trip_s: float = 0.0
    clock_gap_s: float = 0.0
    """How far its wall clock is ahead of this one."""
    error: str = ""


class Crawl(msgspec.Struct, frozen=True):
    """What a crawl saw, in the order in which it was seen."""

    peers: list[Visited]
    """Those that answered."""
    silent: list[Visited]
    """Those that others told of, or that it was to start from, and that did not answer."""
    num_unasked: int
    """Further peers that were told of when the limit was reached."""
    estimated_size: int
    """Peers of the swarm: counted, or, when the limit was reached, judged by how near neighbours are."""
    num_swarms: int
    """More than one when some of the addresses to start from do not lead to each other."""


async def crawl(
    dht: DHT,
    starts: Sequence[Address],
    *,
    limit: int = 1000,
    tell: Callable[[str], None] | None = None,
) -> Crawl:
    """Look for everybody who can be found from these addresses, and ask at most `limit` of them.

    PeerUnreachable when nobody answers at any of them, PeerRefused when they are not what a crawl can start
    from. `dht` should be a client that has joined nobody.
    """
    if limit < 1 or not starts:
        raise UsageError("A crawl needs an address to start from, and a limit above 0.")
    protocol = dht.protocol
    pings = [first_ping(protocol, Peer(start)) for start in starts]
    outcomes = await fanout(pings, protocol.call_deadline(1.1))
    answered = [outcome.peer for outcome in outcomes if isinstance(outcome, Answered)]
    if own := next((peer for peer in answered if peer.id == dht.peer_id), None):
        raise PeerRefused(
            f"{own.address} has the identity that is to visit it.",
            peer=own,
            cause="the identity file that was named is that peer's own, or a copy of it.",
            next_step="leave --identity-file out: then the visit has an identity of its own.",
        )
    unreached = [
        Visited(Peer(start), error=_one_line(outcome))
        for start, outcome in zip(starts, outcomes, strict=True)
        if isinstance(outcome, Exception)
    ]
    if not answered:
        refusals = [outcome for outcome in outcomes if isinstance(outcome, PeerRefused)]
        if refusals:
            raise refusals[0]
        first = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
        cause = getattr(first, "cause", "") or _one_line(first)
        nobody = f"Nobody answers at {', '.join(map(str, starts))}."
        raise unreachable(protocol, nobody, cause, starts[0]) from first
    crawler = _Crawler(protocol, limit, tell or (lambda _: None))
    deadline = Deadline.after(_LIMIT_S * dht.settings.patience)
    for peer in answered:
        await crawler.explore(protocol.book.of(peer), deadline)
    seen = crawler.result(unreached)
    if not seen.peers:
        gone = next(each for each in seen.silent if each.peer.id is not None)
        raise unreachable(protocol, f"{gone.peer} answers no more.", gone.error, gone.peer.address)
    return seen


class _Crawler:
    def __init__(self, protocol: DHTProtocol, limit: int, tell: Callable[[str], None]) -> None:
        self._protocol = protocol
        self._limit = limit
        self._tell = tell
        self._known: dict[Contact, None] = {}
        self._waiting: dict[Contact, None] = {}
        self._visited: list[Visited] = []
        self._found_from: dict[PeerId, int] = {}
        """The number of the start that led to each peer."""
        self._same_as: list[int] = []
        """For each start one before it that leads to the same peers, or itself."""
        self._num_neighbours, self._reach = 0, 0.0
        """How many neighbours peers told of, and how far the farthest were, as parts of the space, in all."""

    async def explore(self, start: Contact, deadline: Deadline) -> None:
        """Go on from there until nobody new is left, the limit is reached or the time is over."""
        self._same_as.append(len(self._same_as))
        self._meet(start, len(self._same_as) - 1)
        while self._waiting and (left := self._limit - len(self._visited)) > 0 and not deadline.is_past:
            wave = list(self._waiting)[:left]
            for contact in wave:
                del self._waiting[contact]
            visits = await fanout([self._visit(contact) for contact in wave], deadline, limit=_AT_ONCE)
            for contact, outcome in zip(wave, visits, strict=True):
                if isinstance(outcome, Visited):
                    self._visited.append(outcome)
                else:
                    self._visited.append(Visited(contact.peer, error=_one_line(outcome)))
            self._tell(f"{len(self._visited):,} asked, {len(self._waiting):,} more known")

    def result(self, unreached: list[Visited]) -> Crawl:
        """What was seen so far; a peer of several addresses counts once."""
        answered = {each.peer.id: each for each in reversed(self._visited) if each.about is not None}
        peers = [each for each in self._visited if answered.get(each.peer.id) is each]
        silent = {each.peer.id: each for each in self._visited if each.peer.id not in answered}
        size = len(peers)
        if self._waiting and self._reach:
            # of n points the k-th nearest lies at k / n of the space
            size = max(size, round((self._num_neighbours - 1) / self._reach))
        swarms = {self._first(self._found_from[peer_id]) for peer_id in answered if peer_id is not None}
        return Crawl(peers, [*unreached, *silent.values()], len(self._waiting), size, len(swarms))

    async def _visit(self, contact: Contact) -> Visited:
        number = contact.number
        targets = [number, *(number ^ 1 << (ID_BITS - 1 - depth) for depth in range(_NUM_DISTANCES))]
        wants = [Want(target.to_bytes(ID_BYTES), LookupKind.PEERS) for target in targets]
        protocol, clock = self._protocol, self._protocol.endpoint.network.clock
        found = await protocol.call_find(contact, wants)
        told = [protocol.book.read(packed, contact.peer.address) for packed in found.contacts]
        for other in told:
            if other is not None:
                self._meet(other, self._found_from[contact.id])
        near = named(told, found.findings[0].near)
        distances = [other.number ^ number for other in near if other.id != contact.id]
        if distances:
            self._num_neighbours += len(distances)
            self._reach += max(distances) / (1 << ID_BITS)
        began_s = clock.now_s()
        about = await protocol.call_about(contact.peer)
        took_s = clock.now_s() - began_s
        return Visited(contact.peer, about, took_s, about.wall_s + took_s / 2 - clock.wall_s())

    def _meet(self, contact: Contact, start: int) -> None:
        one, other = self._first(self._found_from.setdefault(contact.id, start)), self._first(start)
        self._same_as[max(one, other)] = min(one, other)
        if contact not in self._known and contact.id != self._protocol.peer_id:
            self._known[contact] = self._waiting[contact] = None

    def _first(self, start: int) -> int:
        while self._same_as[start] != start:
            start = self._same_as[start]
        return start


def _one_line(error: Exception) -> str:
    return " ".join((error.what if isinstance(error, ShoalError) else repr(error)).split())
