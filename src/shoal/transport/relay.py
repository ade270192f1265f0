"""Relays: how a peer behind a router, whom nobody can dial, is called through one that everybody can.

The peer dials a few relays and registers there (`RelayClient`). Whoever calls its relayed address opens a
channel to the relay; the relay opens one to the peer, over the connection that the peer has registered by,
and passes bytes both ways (`RelayService`). Inside the two channels is the ordinary stream protocol, with
TLS between caller and peer: the relay sees ciphertext, and what it changes ends the connection.

    relay.register   to a relay: keep a place for me; said again every two seconds
    relay.open       a channel to a relay: pass its items on to this peer
    relay.arrive     a channel from a relay to a peer that is registered there: somebody calls
    relay.beat       to a relay that a stream passes: are you there?
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    Scope,
    ShoalError,
    UsageError,
    fanout,
)
from shoal.core.ids import ID_BYTES
from shoal.core.rates import FailureBackoff, RateLimiter
from shoal.core.scope import settle
from shoal.transport.limits import KIB, MIB
from shoal.transport.messages import Channel, Head, Reply, read_answer

if TYPE_CHECKING:
    from shoal.transport.endpoint import Endpoint
    from shoal.transport.streams.connection import Connection
    from shoal.transport.streams.transport import StreamTransport

log = logging.getLogger(__name__)

BEAT, REGISTER, OPEN, ARRIVE = "relay.beat", "relay.register", "relay.open", "relay.arrive"

NUM_RELAYS = 3
"""At how many relays a peer is registered: when one is gone, callers use the next."""
WINDOW_BYTES = 1 * MIB
"""What a relay holds at most of one stream, each way."""
BEAT_S = 2.0
"""How often a peer registers again, and a caller looks whether its relay is still there."""
_ANSWER_S = 3.0  # for either
_LEASE_S = 30.0
_PIECE_BYTES = 256 * KIB
_MAX_ITEM_BYTES = 4 * MIB
_LEAST_COST_BYTES = 256  # of an item: empty ones are not free either
_BURST_S = 0.1
_SHORTEST_WAIT_S = 0.001
_LINGER_S = 2.0
_LOOK_S = 0.25

Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]


class Registered(msgspec.Struct, frozen=True):
    """The answer to a peer that registers: where it is seen, and how long its place is kept."""

    seen_as: Annotated[str, msgspec.Meta(max_length=200)]
    lease_s: float


class Open(msgspec.Struct, frozen=True):
    """Asks a relay for the way to a peer that is registered there."""

    target: Id


class Arrival(msgspec.Struct, frozen=True):
    """Says who calls, as the relay knows; TLS proves it."""

    caller: Id


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a peer gives to others as their relay, with defaults that a machine at home survives."""

    max_registered: int = 128
    """Peers that may be registered at a time."""
    max_streams: int = 128
    """Streams that are passed on at a time; each takes up to 2 MiB of memory when its receiver is slow."""
    max_streams_each: int = 16
    """Of these, those that one member may have opened."""
    bytes_per_s: float = 50e6
    """Bytes that are passed on in a second, both ways and all streams together; what is more has to wait."""
    bytes_per_s_each: float = 12.5e6
    """Of these, those that one member may send and receive, as caller and as the one that is called."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            if not getattr(self, setting.name) > 0:
                raise UsageError(
                    f"The relay limit {setting.name} must be above 0.",
                    next_step="relaying=None turns relaying off.",
                )


DEFAULT_LIMITS = RelayLimits()


# --- the end of a relayed stream: what stands between a channel and a connection's own stream of bytes ---


class RelayedStream(asyncio.BufferedProtocol):
    """Passes on what a connection of this process writes as items of a channel, and back."""

    def __init__(self, channel: Channel) -> None:
        self.error: ShoalError | None = None
        """What ended it, unless one of the two sides did."""
        self._channel = channel
        self._transport: asyncio.Transport | None = None
        self._room = memoryview(bytearray(_PIECE_BYTES))
        self._unsent: deque[bytes] = deque()
        self._is_over = False
        self._changed = asyncio.Event()  # there is something to send, or it is over
        self._may_write = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to pass bytes on."""
        self._transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self._transport.abort()
        self._may_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes should go."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Keep them until the channel takes them."""
        self._unsent.append(bytes(self._room[:nbytes]))
        if len(self._unsent) > 1 and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        """Nothing more comes: the end of one side is the end of the stream."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; what it has written still goes."""
        self.close()

    def pause_writing(self) -> None:
        """Take no more items: the connection does not read."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Take items again: the connection has read what it was given."""
        self._may_write.set()

    def say(self, last_words: bytes) -> None:
        """Send bytes in place of a connection that there is none."""
        self._unsent.append(last_words)
        self.close()

    def close(self) -> None:
        """Pass on what has come, then end."""
        self._is_over = True
        self._changed.set()
        self._may_write.set()

    def abort(self) -> None:
        """End now, whatever has not been passed on."""
        self._unsent.clear()
        self.close()
        if self._transport is not None:
            self._transport.abort()

    async def run(self) -> None:
        """Pass bytes both ways until one side has ended; the channel's error when it has failed."""
        async with Scope("relayed stream") as scope:
            receiving = scope.start(self._receive())
            await self._send()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await receiving

    async def _send(self) -> None:
        while True:
            while not self._unsent and not self._is_over:
                self._changed.clear()
                await self._changed.wait()
            if not self._unsent:
                break
            pieces = list(self._unsent)
            self._unsent.clear()
            if self._transport is not None and not self._is_over:
                self._transport.resume_reading()
            await self._channel.send(None, pieces)
        await self._channel.end()

    async def _receive(self) -> None:
        await self._may_write.wait()
        while (item := await self._channel.receive()) is not None:
            if self._is_over or self._transport is None:
                continue
            for piece in item.buffers:
                self._transport.write(piece)
            await self._may_write.wait()
        if self._transport is not None:
            self._transport.close()


# --- the caller ---


async def dial_through_relay(transport: StreamTransport, peer: Peer, connection: Connection) -> None:
    """Have a connection speak to a peer by its relay; errors are Shoal's, the system's, or TLS's.

    The way lives in a task of the transport's for as long as the connection, and ends with its relay.
    """
    began: asyncio.Future[RelayedStream] = asyncio.get_running_loop().create_future()
    work = transport.scope.start(_keep_way(transport, peer, connection, began), name=f"relayed to {peer}")
    try:
        stream = await began
        try:
            await transport.network.splice(connection, stream, tls=transport.client_tls(), is_server=False)
        except OSError:
            if stream.error is not None:
                raise stream.error from None
            raise
    except BaseException:
        work.cancel()
        raise


async def _keep_way(
    transport: StreamTransport, peer: Peer, connection: Connection, began: asyncio.Future[RelayedStream]
) -> None:
    assert peer.id is not None
    relay = Peer(peer.address.relay)
    stream: RelayedStream | None = None
    try:
        way = transport.open_channel(
            relay, OPEN, Open(peer.id.digest), deadline=Deadline.never(), window_bytes=WINDOW_BYTES
        )
        async with way as channel, Scope("way through a relay") as scope:
            stream = RelayedStream(channel)
            settle(began, stream)
            watching = scope.start(_watch_relay(transport, relay))
            await stream.run()
            watching.cancel()
    except Exception as error:
        if not isinstance(error, ShoalError):  # ends this way, not the transport
            log.exception("the way to %s through its relay failed", peer)
        lost = PeerUnreachable if stream is None or not connection.ready.done() else PeerLost
        failure = lost(
            f"{peer} cannot be reached through its relay.",
            peer=peer,
            cause=getattr(error, "what", str(error)),
            next_step="look the peer up again: it may be at another relay by now.",
        )
        settle(began, failure)
        if stream is not None:
            stream.error = failure
        connection.close(failure)
    finally:
        if stream is not None:
            stream.abort()


async def _watch_relay(transport: StreamTransport, relay: Peer) -> None:
    """Ends by an error when the relay is silent: a machine that is switched off closes no connection."""
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(PeerRefused, PeerBusy):  # it is there
            await _ask(transport, relay, BEAT)


async def _ask(transport: StreamTransport, relay: Peer, method: str) -> Reply | None:
    """Ask a relay; None when it says other things, behind which its answer waits where a line is full.

    DeadlineExceeded when it says nothing at all.
    """
    heard_bytes = transport.received_bytes(relay)
    try:
        return await transport.call(relay, method, deadline=Deadline.after(_ANSWER_S))
    except DeadlineExceeded:
        if transport.received_bytes(relay) == heard_bytes:
            raise
        return None


# --- the relay ---


@dataclass(slots=True, eq=False)
class _Place:
    """A peer that is registered, by which connection, and until when."""

    connection: Connection
    until_s: float


class RelayService:
    """Passes streams on to peers that are registered here, from when it is made for an endpoint.

    Everything lives on the endpoint's own loop. A stream passes one relay: none opens the way to another.
    """

    def __init__(self, endpoint: Endpoint, limits: RelayLimits) -> None:
        self.limits = limits
        self.num_streams = 0
        """Streams that are passed on now."""
        self.num_bytes = 0
        """Bytes that have been passed on."""
        self._endpoint = endpoint
        self._places: dict[PeerId, _Place] = {}
        self._opened: dict[PeerId, int] = {}
        burst_bytes = max(_BURST_S * limits.bytes_per_s_each, _PIECE_BYTES)
        self._each = RateLimiter(limits.bytes_per_s_each, burst_bytes)
        self._all = RateLimiter(limits.bytes_per_s, max(_BURST_S * limits.bytes_per_s, _PIECE_BYTES))
        endpoint.handle(BEAT, self._beat)
        endpoint.handle(REGISTER, self._register)
        endpoint.handle_channel(OPEN, self._open, payload_type=Open, window_bytes=WINDOW_BYTES)

    @property
    def num_registered(self) -> int:
        """Peers that can be called through this one now."""
        now_s = self._now_s()
        return sum(self._is_kept(place, now_s) for place in self._places.values())

    def _beat(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Say that this peer is there."""

    def _register(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Keep a place for whoever asks, under the id that its connection has proven."""
        peer_id = _known(head.peer)
        if not self._endpoint.addresses:
            raise PeerRefused("this peer is no relay: it does not listen.")
        now_s, place = self._now_s(), self._places.get(peer_id)
        connection = place.connection if place is not None else None
        if connection is None or not connection.is_usable or connection.peer.address != head.peer.address:
            connection = self._endpoint.streams.connection_from(peer_id, head.peer.address)
        if connection is None or connection.is_relayed:
            raise PeerRefused("a peer registers over a stream that it has dialed itself, without a relay.")
        if peer_id not in self._places and len(self._places) >= self.limits.max_registered:
            kept = [(one, place) for one, place in self._places.items() if self._is_kept(place, now_s)]
            self._places = dict(kept)
            if len(kept) >= self.limits.max_registered:
                raise PeerBusy(
                    f"this relay has its {self.limits.max_registered} peers.", next_step="ask another peer."
                )
        self._places[peer_id] = _Place(connection, now_s + _LEASE_S)
        return Reply(Registered(str(head.peer.address), _LEASE_S))

    async def _open(self, head: Head, channel: Channel) -> Reply | None:
        """Open the way to a peer that is registered, and pass on what both say until one has ended."""
        caller, target = _known(head.peer), PeerId(head.payload.target)
        if head.peer.address.is_relayed:
            raise PeerRefused("a stream passes one relay, not two.", next_step="dial this relay directly.")
        place = self._places.get(target)
        if place is None or not self._is_kept(place, self._now_s()):
            raise PeerRefused(
                f"The peer {target.short} is not registered at this relay.",
                next_step="look the peer up again: it may be at another relay by now.",
            )
        with self._taking(caller):
            way = self._endpoint.streams.channel_on(
                place.connection,
                ARRIVE,
                Arrival(caller.digest),
                deadline=Deadline.never(),
                window_bytes=WINDOW_BYTES,
            )
            async with way as onward, Scope("relayed") as scope:
                scope.start(self._pass_on(channel, onward, caller, target))
                scope.start(self._pass_on(onward, channel, target, caller))
        return None

    @contextlib.contextmanager
    def _taking(self, caller: PeerId) -> Iterator[None]:
        """Count a stream, or refuse it."""
        limits, num = self.limits, self._opened.get(caller, 0)
        if num >= limits.max_streams_each:
            raise PeerBusy(
                f"{num} streams of yours pass this relay already.", next_step="end one, or ask another relay."
            )
        if self.num_streams >= limits.max_streams:
            raise PeerBusy(
                f"{self.num_streams} streams pass this relay already.", next_step="ask another relay."
            )
        self._opened[caller] = num + 1
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1
            self._opened[caller] -= 1
            if not self._opened[caller]:
                del self._opened[caller]

    async def _pass_on(self, source: Channel, sink: Channel, sender: PeerId, receiver: PeerId) -> None:
        """Pass on what one side says until it has ended."""
        while (item := await source.receive()) is not None:
            num_bytes = sum(map(len, item.buffers))
            if num_bytes > _MAX_ITEM_BYTES:
                raise LimitExceeded(f"a relay takes {_MAX_ITEM_BYTES:,} bytes at once, not {num_bytes:,}.")
            self.num_bytes += num_bytes
            cost_bytes = max(num_bytes, _LEAST_COST_BYTES)
            for limiter, who in ((self._each, sender), (self._each, receiver), (self._all, None)):
                await self._wait_for(limiter, who, cost_bytes)
            await sink.send(None, item.buffers)
        await sink.end()

    async def _wait_for(self, limiter: RateLimiter, who: PeerId | None, num_bytes: int) -> None:
        while True:
            wait_s = limiter.take(who, num_bytes, self._now_s())
            if not wait_s:
                break
            await asyncio.sleep(max(wait_s, _SHORTEST_WAIT_S))  # else rounding could leave a little, for ever

    def _is_kept(self, place: _Place, now_s: float) -> bool:
        return place.connection.is_usable and now_s < place.until_s

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _known(peer: Peer) -> PeerId:
    if peer.id is None:
        raise PeerRefused(
            "a relay serves peers that have an id.", next_step="give the endpoint a membership or a peer_id."
        )
    return peer.id


# --- the peer behind a router ---


class Arrived:
    """A stream that came through a relay and nobody serves yet: as `Accepted` of a network."""

    def __init__(self, stream: RelayedStream, origin: Address) -> None:
        self.stream = stream
        self.origin = origin
        self._is_served = False

    async def adopt(self, transport: StreamTransport, connection: Connection) -> None:
        """Have a connection serve it."""
        self._is_served = True
        await transport.network.splice(connection, self.stream, tls=transport.server_tls(), is_server=True)

    def refuse(self, last_words: bytes) -> None:
        """Send these bytes, and end it."""
        self.stream.say(last_words)

    def close(self) -> None:
        """End it unserved; does nothing once it is served."""
        if not self._is_served:
            self.stream.close()


class RelayClient:
    """Keeps this peer registered at relays, so that others can call it although they cannot dial it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.addresses: tuple[Address, ...] = ()
        """Where others can call this peer now, through each relay that it is registered at."""
        self.seen_as: tuple[Address, ...] = ()
        """Where each of these relays sees its connection come from."""
        self.on_change: list[Callable[[], None]] = []
        """Called whenever `addresses` are others: what tells of them should be told again."""
        self._endpoint = endpoint
        self._relays: dict[Peer, Registered] = {}
        self._find: Callable[[], Sequence[Peer]] = lambda: ()
        self._num = 0
        self._is_running = False
        self._backoff = FailureBackoff(10.0, 300.0)
        self._changed = asyncio.Event()
        endpoint.handle_channel(ARRIVE, self._arrive, payload_type=Arrival, window_bytes=WINDOW_BYTES)

    def keep(self, find: Callable[[], Sequence[Peer]], num: int = NUM_RELAYS) -> None:
        """Be registered, from now on, at so many of the peers that `find` tells, the first that take it.

        They need ids. Call it on the endpoint's loop. With 0 this peer registers no more, and is gone from
        its relays once their lease has run out.
        """
        self._find, self._num = find, num
        self._relays = dict(list(self._relays.items())[:num])
        self._tell()
        if num and not self._is_running:
            self._is_running = True
            self._endpoint.streams.scope.start_soon(self._run(), name="keep relays")

    async def registered(self, deadline: Deadline) -> None:
        """Wait until a relay has taken this peer; PeerUnreachable when none has before the deadline."""
        while not self.addresses:
            try:
                async with asyncio.timeout(deadline.timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                raise PeerUnreachable(
                    "No relay takes this peer: others cannot call it.",
                    cause="no peer that can be reached is known here, or all of them refuse.",
                    next_step="join by a peer that can be reached and relays, as `shoal dht` does.",
                ) from None

    async def _run(self) -> None:
        try:
            while self._num:
                await self._turn()
                await asyncio.sleep(BEAT_S if self.addresses else _LOOK_S)
        finally:
            self._is_running = False
            self._relays.clear()
            self._tell()

    async def _turn(self) -> None:
        """Register again everywhere, and elsewhere in place of those that are gone."""
        now_s = asyncio.get_running_loop().time()
        relays = tuple(self._relays)
        for relay, is_kept in zip(relays, await self._register_all(relays), strict=True):
            if not is_kept and self._relays.pop(relay, None) is not None:
                log.warning("The relay %s is gone or takes this peer no more.", relay)
        self._tell()
        candidates = [
            peer
            for peer in self._find()
            if peer.id not in (None, self._endpoint.peer_id)
            and peer not in self._relays
            and not self._backoff.is_paused(peer, now_s)
        ]
        while candidates and (num_missing := self._num - len(self._relays)) > 0:
            tried, candidates = candidates[:num_missing], candidates[num_missing:]
            await self._register_all(tried)
            self._tell()

    async def _register_all(self, relays: Sequence[Peer]) -> list[bool]:
        """Register at these; which of them have a place for this peer."""
        outcomes = await fanout(map(self._register, relays), Deadline.after(1.1 * _ANSWER_S))
        for relay, outcome in zip(relays, outcomes, strict=True):
            if isinstance(outcome, Registered):
                self._backoff.answered(relay)
                if relay in self._relays or len(self._relays) < self._num:
                    self._relays[relay] = outcome
            elif isinstance(outcome, ShoalError):
                log.debug("%s does not relay for this peer: %s", relay, outcome)
                self._backoff.failed(relay, asyncio.get_running_loop().time())
            elif isinstance(outcome, Exception):
                raise outcome
        return [isinstance(outcome, Registered) for outcome in outcomes]

    async def _register(self, relay: Peer) -> Registered:
        streams = self._endpoint.streams
        streams.check_may_serve(relay.address)
        reply = await _ask(streams, relay, REGISTER)
        if reply is None:
            if relay in self._relays:
                return self._relays[relay]
            raise DeadlineExceeded(f"{relay} has not registered this peer in time.")
        return read_answer(reply, Registered, REGISTER)

    def _tell(self) -> None:
        """Take note of where this peer can be called now, and tell when that has changed."""
        own_id = self._endpoint.peer_id
        self.seen_as = tuple(
            Address.parse(place.seen_as) for place in self._relays.values() if _is_address(place.seen_as)
        )
        addresses = tuple(Address(relay.address.host, relay.address.port, own_id) for relay in self._relays)
        if addresses == self.addresses:
            return
        self.addresses = addresses
        if addresses:
            self._changed.set()
        else:
            self._changed.clear()
        log.info("Others can call this peer at %s", ", ".join(map(str, addresses)) or "no relay")
        for callback in tuple(self.on_change):
            callback()

    async def _arrive(self, head: Head, channel: Channel) -> Reply | None:
        """Serve a stream that a relay passes on, as one that was dialed."""
        relay = next((relay for relay in self._relays if relay.id == head.peer.id), None)
        if relay is None or head.peer.id is None:
            raise PeerRefused("this peer is not registered at you.")
        origin = Address(relay.address.host, relay.address.port, PeerId(head.payload.caller))
        stream = RelayedStream(channel)
        self._endpoint.streams.take_in(Arrived(stream, origin))
        try:
            await stream.run()
        finally:
            stream.abort()
        return None


def _is_address(text: str) -> bool:
    try:
        Address.parse(text)
    except UsageError:
        return False
    return True
