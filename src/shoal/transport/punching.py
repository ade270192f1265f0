"""Hole punching: a direct way between two peers behind routers, arranged over the relayed one.

A router lets in what answers something that has left. So both peers learn how others see a port of theirs,
tell each other over the relayed connection, and dial each other from those ports at the same time (Ford,
Srisuresh & Kegel 2005; for TCP a simultaneous open, RFC 9293, 3.5). It works unless both routers choose
another outside port for everybody; then calls stay relayed. All of it happens in the background.

    punch.seen    to a peer that can be dialed: where does this come from?
    punch.offer   over the relayed connection: these are my outside ports, which are yours?
    punch.go      likewise: dial now
    punch.alive   over the new way: are you there?
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    ProtocolError,
    Scope,
    ShoalError,
    UsageError,
    fanout,
)
from shoal.core.rates import FailureBackoff, RateLimiter
from shoal.core.scope import settle
from shoal.transport.datagrams.transport import DatagramPath
from shoal.transport.messages import Head, Reply, read_answer
from shoal.transport.network.sockets import Accepted, Listener, outward_host

if TYPE_CHECKING:
    from shoal.transport.endpoint import Endpoint
    from shoal.transport.streams.connection import Connection

log = logging.getLogger(__name__)

SEEN, OFFER, GO, ALIVE = "punch.seen", "punch.offer", "punch.go", "punch.alive"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 120.0, 1800.0
"""How long nothing is tried with a peer after an attempt: at first, and after many that failed."""
ALIVE_S = 15.0
"""How often something leaves over a punched way for datagrams: routers forget one after 30 s or more."""
WATCH_S = 4.0
"""How long nothing may come over a punched connection with calls under way; then it is asked."""
UNUSED_S = 300.0
"""How long such a way is kept although nobody asks anything over it."""
_PATIENCE_S = 1.0  # a relayed connection that lives no longer is not worth the trouble
_ASK_S = 5.0
_ANSWER_S = 3.0
_MEET_S = 8.0  # for three greetings of TCP
_WAIT_FOR_GO_S = 5.0
_GREET_S = 3.0
_AGAIN_S, _NUM_KNOCKS = 0.3, 5  # each pause twice the one before
_MAX_ANSWERED = 16
_NUM_OBSERVERS = 2
_MAX_ADDRESSES = 4
_OFFERS_EVERY_S, _OFFERS_AT_ONCE = 30.0, 3

_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Addresses = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=_MAX_ADDRESSES)]
_Greet = Callable[[Accepted], Coroutine[Any, Any, None]]
"""What is done with a stream that came through."""


class Offer(msgspec.Struct, frozen=True):
    """Where a peer can be met: its outside addresses as others see them, and its own address inside."""

    tcp: _Addresses
    inside: _Text
    """Of the same port; of use to those behind the same router."""
    udp: _Addresses = ()
    took_s: float = 0.0
    """How long it took to find out, for who measures the round trip."""

    @property
    def is_predictable(self) -> bool:
        """Whether all see the same port; if not, who is sent something sees yet another."""
        return len(dict.fromkeys(self.tcp)) == 1


@dataclass(slots=True)
class _Hole:
    """A port that this peer dials from and is dialed at, and how others see it."""

    listener: Listener
    offer: Offer


class Punching:
    """Finds direct ways to peers that an endpoint reaches through relays; answers those who look for one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_tried = 0
        """Attempts that this peer has begun."""
        self.num_punched = 0
        """Of these, those that led to a direct connection."""
        self._endpoint = endpoint
        self._streams, self._datagrams = endpoint.streams, endpoint.datagrams
        self._network = endpoint.network
        self._backoff = FailureBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._offers = RateLimiter(1 / _OFFERS_EVERY_S, _OFFERS_AT_ONCE)
        self._watched: dict[PeerId, None] = {}  # peers that are reached through a relay
        self._asking: dict[PeerId, None] = {}  # those of them that an offer is under way to
        self._answered: dict[PeerId, asyncio.Event] = {}  # whose offers are: set when it is time to dial
        self._heard: dict[PeerId, asyncio.Queue[Address]] = {}  # where datagrams of those came from
        endpoint.handle(SEEN, self._on_seen)
        endpoint.handle(OFFER, self._on_offer, payload_type=Offer)
        endpoint.handle(GO, self._on_go)
        endpoint.handle(ALIVE, self._on_alive)
        self._streams.on_relayed = self.watch

    # --- the one who asks ---

    def watch(self, peer: Peer) -> None:
        """Look for a direct way to a peer, now and then, for as long as it is reached through a relay."""
        if peer.id is not None and self._streams.peer_id is not None and peer.id not in self._watched:
            self._watched[peer.id] = None
            self._streams.scope.start_soon(self._keep_trying(peer, peer.id), name=f"punch to {peer}")

    async def _keep_trying(self, peer: Peer, peer_id: PeerId) -> None:
        loop, wait_s = asyncio.get_running_loop(), _PATIENCE_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                if self._streams.connection_kinds().get(peer_id) != "relayed":
                    return
                if not self._backoff.is_paused(peer_id, loop.time()):
                    self._backoff.failed(
                        peer_id, loop.time()
                    )  # until the next attempt, however this one ends
                    if await self._has_punched(peer, peer_id):
                        self._backoff.answered(peer_id)
                        self._backoff.failed(peer_id, loop.time())
                        return
                # the other side may look for a way, too: not at the same time
                wait_s = self._backoff.pause_s(peer_id) * (1 + 0.2 * self._network.random.random())
        finally:
            del self._watched[peer_id]

    async def _has_punched(self, peer: Peer, peer_id: PeerId) -> bool:
        self.num_tried += 1
        self._asking[peer_id] = None
        try:
            connection = await self._ask(peer, peer_id)
        except PeerBusy:  # it asks this peer in the same moment, most likely
            return False
        except (ShoalError, OSError) as error:
            log.debug("no direct way to %s was found: %s", peer, error)
            return False
        finally:
            del self._asking[peer_id]
        self.num_punched += connection is not None
        return connection is not None

    async def _ask(self, peer: Peer, peer_id: PeerId) -> Connection | None:
        loop = asyncio.get_running_loop()
        async with self._open_hole(peer.address.relay) as hole:
            asked_at_s, deadline = loop.time(), Deadline.after(2 * _ASK_S)
            reply = await self._streams.call(peer, OFFER, hole.offer, deadline=deadline)
            theirs = read_answer(reply, Offer, OFFER)
            trip_s = loop.time() - asked_at_s - theirs.took_s
            if not (
                hole.offer.is_predictable or theirs.is_predictable or _are_neighbours(theirs, hole.offer)
            ):
                log.debug("no direct way to %s: both routers choose a port for each other side", peer)
                return None
            await self._streams.notify(peer, GO, deadline=deadline)
            await asyncio.sleep(min(max(trip_s / 2, 0.0), 1.0))
            return await self._meet(hole, theirs, peer_id)

    # --- the one who is asked ---

    async def _on_offer(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell where this peer can be met, and be ready to dial."""
        peer_id, own_id = head.peer.id, self._streams.peer_id
        if peer_id is None or own_id is None or not head.peer.address.is_relayed:
            raise PeerRefused("only peers with ids that are reached through a relay look for a better way.")
        if peer_id in self._answered or (peer_id in self._asking and own_id < peer_id):
            raise PeerBusy("an attempt is under way.")
        if len(self._answered) >= _MAX_ANSWERED:
            raise PeerBusy("many look for a way to this peer now.", next_step="try again in a minute.")
        if self._offers.take(peer_id, 1, asyncio.get_running_loop().time()):
            raise PeerBusy("offers come too often.", next_step="wait for a minute.")
        ready: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._answered[peer_id] = asyncio.Event()
        relay = head.peer.address.relay
        self._streams.scope.start_soon(
            self._answer(peer_id, head.payload, relay, ready), name="answer an offer"
        )
        return Reply(await ready)

    async def _answer(
        self, peer_id: PeerId, theirs: Offer, relay: Address, ready: asyncio.Future[Offer]
    ) -> None:
        try:
            async with self._open_hole(relay) as hole:
                settle(ready, hole.offer)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WAIT_FOR_GO_S):
                        await self._answered[peer_id].wait()
                    await self._meet(hole, theirs, peer_id)
        except (ShoalError, OSError) as error:
            settle(ready, error if isinstance(error, ShoalError) else PeerBusy(f"no port: {error}."))
        finally:
            del self._answered[peer_id]
            ready.cancel()

    def _on_go(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """The other side dials about now."""
        if head.peer.id is not None and (go := self._answered.get(head.peer.id)) is not None:
            go.set()

    def _on_seen(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell the caller where its call comes from."""
        return Reply(str(head.peer.address))

    def _on_alive(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Say that this peer is there; where the other is seen may be news."""
        if head.peer.id is not None and (heard := self._heard.get(head.peer.id)) is not None:
            heard.put_nowait(head.peer.address)

    # --- a port, and how others see it ---

    @contextlib.asynccontextmanager
    async def _open_hole(self, *relays: Address) -> AsyncIterator[_Hole]:
        """A port of this peer, as its own relays and the other's see it."""
        began_at_s = asyncio.get_running_loop().time()
        own = [address.relay for address in self._endpoint.relays.addresses]
        observers = list(dict.fromkeys([*relays, *own]))[:_NUM_OBSERVERS]
        is_simulated = self._network.is_simulated
        host = getattr(self._network, "name", "localhost") if is_simulated else "0.0.0.0"
        self._streams.check_may_serve(Address(host, 0))
        listener = await self._network.listen(Address(host, 0), is_shared=True)
        probes: list[Connection] = []
        try:
            port = listener.address.port
            deadline = Deadline.after(_ASK_S)
            tcp = await fanout([self._seen_from(port, peer, probes) for peer in observers], deadline)
            udp = await fanout([self._seen_by_datagrams(peer, deadline) for peer in observers], deadline)
            inside = Address(host if is_simulated else outward_host("0.0.0.0"), port)
            took_s = asyncio.get_running_loop().time() - began_at_s
            offer = Offer(_texts(tcp), str(inside), _texts(udp), took_s)
            if not offer.tcp:
                raise PeerBusy("nobody tells this peer how its router shows it.")
            yield _Hole(listener, offer)
        finally:
            listener.close()
            for connection in probes:
                connection.leave("it was asked what it knew.")

    async def _seen_from(self, port: int, observer: Address, probes: list[Connection]) -> Address:
        accepted = await self._network.connect_from(port, observer)
        connection = await self._streams.speak_over(accepted, Peer(observer), is_dialer=True)
        probes.append(connection)  # as long as it is open, the router keeps the port
        deadline = Deadline.after(_ASK_S)
        return _address(await self._streams.call_over(connection, SEEN, deadline=deadline))

    async def _seen_by_datagrams(self, observer: Address, deadline: Deadline) -> Address:
        return _address(await self._datagrams.call(Peer(observer), SEEN, deadline=deadline))

    # --- dialing each other ---

    async def _meet(self, hole: _Hole, theirs: Offer, peer_id: PeerId) -> Connection | None:
        """Dial and be dialed until there is a connection; None when none has come about in time."""
        self._streams.scope.start_soon(self._meet_by_datagrams(theirs, peer_id), name="punch for datagrams")
        found: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        # of several ways the client takes the first; the server takes any that the client has chosen
        own_id = self._streams.peer_id
        is_client = own_id is not None and peer_id < own_id
        one_by_one = asyncio.Lock() if is_client else None
        greet = functools.partial(self._greet, peer_id, one_by_one, found)
        async with Scope("hole punching") as scope:
            scope.start_soon(self._take_in(hole.listener, scope, greet))
            for address in _targets(theirs, hole.offer):
                scope.start_soon(self._knock(hole.listener.address.port, address, greet))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MEET_S):
                    await asyncio.shield(found)
            scope.cancel()
        if not found.done():
            return None
        connection = found.result()
        self._streams.prefer(connection)
        self._streams.scope.start_soon(self._watch(connection), name=f"watch the way to {connection.peer}")
        log.info("%s is reached directly now, through both routers", connection.peer)
        return connection

    async def _watch(self, connection: Connection) -> None:
        """End a connection that a router has forgotten: nothing comes over it, and nobody says why."""
        heard_bytes = -1
        while connection.is_usable:
            await asyncio.sleep(WATCH_S)
            if connection.num_open and connection.received_bytes == heard_bytes:
                with contextlib.suppress(PeerLost):
                    try:
                        await self._streams.call_over(connection, ALIVE, deadline=Deadline.after(_ANSWER_S))
                    except DeadlineExceeded:
                        connection.close(
                            PeerLost("The way through both routers is gone.", peer=connection.peer)
                        )
                        connection.abort()
            heard_bytes = connection.received_bytes

    async def _take_in(self, listener: Listener, scope: Scope, greet: _Greet) -> None:
        with contextlib.suppress(OSError):
            while True:
                scope.start_soon(greet(await listener.accept()))

    async def _knock(self, port: int, address: Address, greet: _Greet) -> None:
        for number in range(_NUM_KNOCKS):
            with contextlib.suppress(OSError):
                await greet(await self._network.connect_from(port, address))
            await asyncio.sleep(_AGAIN_S * 2**number)

    async def _greet(
        self,
        peer_id: PeerId,
        one_by_one: asyncio.Lock | None,
        found: asyncio.Future[Connection],
        accepted: Accepted,
    ) -> None:
        """Make a connection of a stream; the peer with the higher id is TLS's client."""
        async with one_by_one or contextlib.nullcontext():
            if found.done():
                accepted.close()
                return
            try:
                async with asyncio.timeout(_GREET_S):
                    connection = await self._streams.speak_over(
                        accepted, Peer(accepted.origin, peer_id), is_dialer=one_by_one is not None
                    )
            except (ShoalError, TimeoutError) as error:
                log.debug("what came through to %s was no peer: %s", accepted.origin, error)
                return
            if found.done():
                connection.leave("there is another way already.")
                return
            connection.is_punched = True
            settle(found, connection)

    # --- the same for datagrams ---

    async def _meet_by_datagrams(self, theirs: Offer, peer_id: PeerId) -> None:
        """Greet each other until one greeting has come through, then keep that way open while it is used."""
        if not theirs.udp or peer_id in self._heard or peer_id in self._datagrams.punched:
            return
        heard = self._heard[peer_id] = asyncio.Queue()
        for address in _parsed(theirs.udp):
            heard.put_nowait(address)
        found: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        try:
            self._datagrams.let_in()
            async with Scope("hole punching") as scope:
                scope.start_soon(self._greet_by_datagrams(heard, peer_id, scope, found))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_MEET_S):
                        await asyncio.shield(found)
                scope.cancel()
        finally:
            del self._heard[peer_id]
        if found.done():
            await self._keep_alive(found.result(), peer_id)

    async def _greet_by_datagrams(
        self, heard: asyncio.Queue[Address], peer_id: PeerId, scope: Scope, found: asyncio.Future[Peer]
    ) -> None:
        """Greet every address that is known or heard from, each once."""
        tried: dict[Address, None] = {}
        while True:
            address = await heard.get()
            if address not in tried and not address.is_relayed and len(tried) < _MAX_ADDRESSES:
                tried[address] = None
                scope.start_soon(self._greet_at(Peer(address, peer_id), found))

    async def _greet_at(self, peer: Peer, found: asyncio.Future[Peer]) -> None:
        with contextlib.suppress(ShoalError):
            await self._datagrams.call(peer, ALIVE, deadline=Deadline.after(_MEET_S))
            settle(found, peer)

    async def _keep_alive(self, peer: Peer, peer_id: PeerId) -> None:
        """Have calls use the way until the other side is silent, or nobody has used it for long."""
        loop = asyncio.get_running_loop()
        path = self._datagrams.punched[peer_id] = DatagramPath(peer, loop.time())
        log.info("%s is reached by datagrams directly now, through both routers", peer)
        try:
            with contextlib.suppress(ShoalError):
                while loop.time() - path.used_at_s < UNUSED_S:
                    await asyncio.sleep(ALIVE_S)
                    await self._datagrams.call(peer, ALIVE, deadline=Deadline.after(_ASK_S))
        finally:
            if self._datagrams.punched.get(peer_id) is path:
                del self._datagrams.punched[peer_id]


def _texts(outcomes: Iterable[Address | Exception]) -> tuple[str, ...]:
    """The addresses among what came of asking."""
    return tuple(str(outcome) for outcome in outcomes if isinstance(outcome, Address))


def _address(reply: Reply) -> Address:
    try:
        return Address.parse(str(reply.payload)[:200])
    except UsageError as error:
        raise ProtocolError(f"An answer to {SEEN} is no address: {error.what}") from error


def _parsed(texts: Iterable[str]) -> list[Address]:
    """Addresses that another peer has told, but for those that nobody can dial."""
    found = []
    for text in dict.fromkeys(texts):
        with contextlib.suppress(UsageError):
            found.append(Address.parse(text))
    return [address for address in found if address.port and not address.is_relayed]


def _are_neighbours(one: Offer, other: Offer) -> bool:
    """Whether two peers are behind the same router: then its outside does not concern them."""
    hosts = [address.host for address in _parsed(one.tcp)]
    return any(address.host in hosts for address in _parsed(other.tcp))


def _targets(theirs: Offer, own: Offer) -> list[Address]:
    """Whom to dial: the other's outside addresses and, for a neighbour, the one inside."""
    return _parsed(theirs.tcp) + (_parsed([theirs.inside]) if _are_neighbours(theirs, own) else [])
