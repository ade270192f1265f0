"""The datagram transport: small calls over UDP, and over streams what is not small."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerId,
    PeerLost,
    Scope,
    StandingScope,
    UsageError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.ids import is_loopback
from shoal.core.rates import RateLimiter
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.caller import (
    AskOverStream,
    CallerSession,
    CallerState,
    PendingDatagram,
    Timers,
    no_welcome,
)
from shoal.transport.datagrams.handshake import HandshakeCodec, Handshakes, SealedHandshakeCodec
from shoal.transport.datagrams.sessions import Session, Stats, peer_at
from shoal.transport.datagrams.wire import SocketAddress
from shoal.transport.frames import Mode
from shoal.transport.limits import ByteBudget, CallSlots, Complaints, Limits
from shoal.transport.memory import BufferPool
from shoal.transport.messages import (
    Buffers,
    Channel,
    Into,
    MethodTable,
    Reply,
    Target,
    Transport,
    byte_views,
    encode_head,
    time_left,
)
from shoal.transport.network.sockets import Network, SocketNetwork, unreachable
from shoal.transport.trust.membership import Membership, check_may_listen

if TYPE_CHECKING:
    from shoal.transport.streams.transport import StreamTransport

log = logging.getLogger(__name__)

WINDOW = 64
"""Requests that may be unanswered at once; more would only fill the queues between here and there."""
SESSIONS_A_CONNECTION = 4
"""So many sessions for each of `Limits.max_connections`: they cost much less."""
_EVICTED_SHARE = 8  # one in so many idle sessions goes when there are too many
_MAX_REST_BYTES = wire.MAX_FRAME_BYTES - 10  # of a request, without its tag and id
_CALL, _ONE_WAY, _DATA = int(Mode.CALL), int(Mode.ONE_WAY), int(wire.PacketKind.DATA)
_GREETINGS = (wire.PacketKind.HELLO, wire.PacketKind.WELCOME, wire.PacketKind.REFUSAL)
_ACCESS_S = 1.0  # how soon a peer that is denied is gone
_DENIED = "it may no longer talk to this peer."
_COMPLAIN_AGAIN_S = 600.0
_MAX_COMPLAINTS = 1024  # that are remembered
_NUMBER = re.compile(r"\d+")
_REQUEST_TOO_LARGE = "its request does not fit into a datagram"
_CLOSING_S = 1.0  # for what the system had no room for


@dataclass(slots=True)
class DatagramPath:
    """A way to a peer through both routers, and when it was last used."""

    peer: Peer
    used_at_s: float


class DatagramTransport(Transport):
    """Calls over UDP; open it with `async with` on the loop that it should live on.

    A call whose request does not fit into a datagram, or whose answer not into a few, goes over `streams` to
    the same address; without streams it fails with LimitExceeded or PeerRefused. Calls are to be idempotent:
    a handler runs again when its answer was lost on the way, or was too large.
    """

    loop: asyncio.AbstractEventLoop
    timers: Timers
    window: CallSlots
    scope: Scope
    handshakes: Handshakes
    _opening: asyncio.Lock
    _standing: StandingScope

    def __init__(
        self,
        *,
        membership: Membership | None = None,
        is_insecure: bool = False,
        peer_id: PeerId | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        routes: MethodTable | None = None,
        streams: StreamTransport | None = None,
    ) -> None:
        self.network = network or SocketNetwork()
        self.streams = streams
        self.limits = limits or Limits()
        self.routes = routes or (streams.routes if streams is not None else MethodTable())
        self.budget = streams.budget if streams is not None else ByteBudget(self.limits.max_bytes_in_flight)
        self.peer_id = membership.peer_id if membership is not None else peer_id
        self.clock = self.network.clock
        self.random = self.network.random
        self.pool = BufferPool()
        self.stats = Stats()
        self.complaints = Complaints(log, self.clock)
        self._complained = RateLimiter(1 / _COMPLAIN_AGAIN_S, 1, _MAX_COMPLAINTS)
        self.is_open = False
        self.is_watching = True
        """Whether somebody looks after who may talk; else `watch` must be called before serving anybody."""
        self.sessions: dict[bytes, Session] = {}
        """By the id that packets to this peer are marked with."""
        self.punched: dict[PeerId, DatagramPath] = {}
        """Ways to peers that streams reach through relays, found by `transport.punching`."""
        self._membership = None if self.network.is_simulated else membership
        self.access = self._membership.access if self._membership is not None else None
        self._is_insecure = is_insecure or self.network.is_simulated
        self._callers: dict[Peer, CallerSession] = {}
        self._sockets: list[DatagramSocket] = []
        self._dirty: list[Session] = []
        self._is_flush_due = False
        self._access_timer: asyncio.TimerHandle | None = None
        self._access_version = -1
        self._watched_packets = 0

    async def __aenter__(self) -> Self:
        if self.is_open:
            raise UsageError("The transport is open already.", next_step="open it in one place only.")
        self.loop = asyncio.get_running_loop()
        self.timers = Timers(self.loop)
        self.window = CallSlots(self.loop, WINDOW)
        self._opening = asyncio.Lock()
        membership = self._membership
        self.handshakes = Handshakes(
            self,
            HandshakeCodec(self.peer_id, self.random)
            if membership is None
            else SealedHandshakeCodec(membership, self.random),
        )
        self.is_watching = self.access is None
        self._standing = StandingScope("datagram transport")
        self.scope = await self._standing.open()
        self.is_open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._leave()
            await self._standing.close()
        finally:
            self.complaints.flush()
            self.pool.clear()
            sockets, self._sockets = self._sockets, []
            for socket in sockets:  # all of them, before anything is waited for
                socket.begin_closing()
            for socket in sockets:
                await socket.close()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, both ways."""
        return len(self.sessions)

    @property
    def num_calls(self) -> int:
        """Calls under way, both ways, and those of the streams below."""
        own = sum(session.num_open for session in self.sessions.values())
        return own + (self.streams.num_calls if self.streams is not None else 0)

    def id_of(self, peer: Peer) -> PeerId | None:
        """Who has greeted back at a peer's address, as proven as greetings are; None before any has."""
        caller = self._callers.get(peer)
        return caller.peer.id if caller is not None and caller.state is CallerState.READY else None

    # --- answering ---

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""
        self._require_open()
        check_may_listen(address, self._membership, is_insecure=self._is_insecure)
        socket = await self._open_socket(address, is_listening=True)
        return Address(*socket.where[:2])

    # --- asking ---

    async def call(
        self,
        peer: Target,
        method: str,
        payload: Any = None,
        buffers: Buffers = (),
        *,
        deadline: Deadline,
        into: Into = None,
    ) -> Reply:
        """Ask and wait for the answer, whose buffers arrive in `into` where it is given."""
        there = self._way_round_relay(peer) if self.punched else peer
        request = self._encode(there, method, payload, buffers, deadline, _CALL)
        why = _REQUEST_TOO_LARGE
        if request is not None:
            call = await self._begin(there, method, request, deadline, into)
            try:
                return await call.answer
            except AskOverStream as answer:
                why = f"its answer takes {answer.size_bytes:,} bytes"
            finally:
                call.caller.end(call)
        streams = self._streams_for(method, why)
        return await streams.call(peer, method, payload, buffers, deadline=deadline, into=into)

    async def notify(
        self, peer: Target, method: str, payload: Any = None, buffers: Buffers = (), *, deadline: Deadline
    ) -> None:
        """Tell without waiting for the handler; sent again until it has arrived or its time is over."""
        there = self._way_round_relay(peer) if self.punched else peer
        request = self._encode(there, method, payload, buffers, deadline, _ONE_WAY)
        if request is None:
            return await self._streams_for(method).notify(peer, method, payload, buffers, deadline=deadline)
        call = await self._begin(there, method, request, deadline, None)
        call.answer.add_done_callback(lambda _: call.caller.end(call))
        return None

    def open_channel(
        self, peer: Target, method: str, payload: Any = None, *, deadline: Deadline
    ) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Begin a conversation over a stream; UsageError where there are none."""
        if self.streams is None:
            raise UsageError(
                "Datagrams carry no channels.", next_step="give the transport streams, or use an Endpoint."
            )
        return self.streams.open_channel(peer, method, payload, deadline=deadline)

    def _encode(
        self, peer: Target, method: str, payload: Any, buffers: Buffers, deadline: Deadline, mode: int
    ) -> tuple[bytes, float] | None:
        """A request without its id, and when it ends on the loop's clock; None when it does not fit."""
        if not self.is_open:
            self._require_open()
        if _relayed_id(peer) is not None:
            return None  # relays carry streams
        remaining_s, timeout_ms = time_left(method, peer, deadline)
        if buffers:
            views = byte_views(buffers)
            if sum(map(len, views)) > _MAX_REST_BYTES:
                return None
            rest = encode_head(method, (timeout_ms, method, mode, payload, views), self.limits.max_head_bytes)
        else:
            rest = encode_head(method, (timeout_ms, method, mode, payload), self.limits.max_head_bytes)
        return (rest, self.loop.time() + remaining_s) if len(rest) <= _MAX_REST_BYTES else None

    async def _begin(
        self, target: Target, method: str, request: tuple[bytes, float], deadline: Deadline, into: Into
    ) -> PendingDatagram:
        """Send a request as soon as there is a session with a place for it, and a place in the window."""
        peer = target if type(target) is Peer else Peer(target)  # type: ignore[arg-type]
        window = self.window
        while True:
            if not self.is_watching:
                self.watch()  # who is denied since is not asked
            caller = self._callers.get(peer)
            if caller is None or caller.state is not CallerState.READY:
                caller = await self._connect(peer, deadline)
            slots = caller.slots
            if not (slots.try_take() or await slots.take(deadline)):
                raise _not_sent(method, peer, "its calls at once are open already.")
            try:
                if not (window.try_take() or await window.take(deadline)):
                    raise _not_sent(method, peer, "many calls wait for answers.")
            except BaseException:
                slots.give_back()
                raise
            if caller.state is CallerState.READY:
                return caller.ask(method, request[0], into, deadline, request[1])
            slots.give_back()
            window.give_back()
            if not self.is_open:
                raise PeerLost(f"{method} at {peer}: the transport was closed before it was sent.", peer=peer)

    def _streams_for(self, method: str, why: str = _REQUEST_TOO_LARGE) -> StreamTransport:
        if self.streams is None:
            raise LimitExceeded(
                f"{method}: {why}, and this transport has no streams.",
                next_step="send or ask for less at once, or use an Endpoint.",
            )
        return self.streams

    # --- the way to a peer: a socket that reaches it, and a session with it ---

    async def _connect(self, peer: Peer, deadline: Deadline) -> CallerSession:
        """A session that new calls may use; concurrent callers share one greeting."""
        if (known := self._known_by_address(peer)) is not None:
            return known
        try:
            async with asyncio.timeout(deadline.timeout_s):
                while True:  # a session may be replaced by another while it greets, or right after
                    caller = self._callers.get(peer)
                    if caller is None:
                        where, socket = await self._way_to(peer)
                        caller = self._callers.get(peer) or self.open_caller(peer, where, socket)
                    if caller.state is CallerState.READY:
                        return caller
                    await caller.wait_for_welcome()
        except TimeoutError:
            raise no_welcome(peer) from None

    def _known_by_address(self, peer: Peer) -> CallerSession | None:
        """A session that was begun with whoever is at the peer's address, and it was this peer."""
        caller = self._callers.get(Peer(peer.address)) if peer.id is not None else None
        if caller is None or caller.state is not CallerState.READY or caller.peer.id != peer.id:
            return None
        caller.target = peer  # whoever comes to be at this address later is not asked in its place
        self._callers[peer] = caller
        return caller

    async def _way_to(self, peer: Peer) -> tuple[SocketAddress, DatagramSocket]:
        """A peer's address as sockets know it, and the socket to ask from."""
        try:
            where = await self.network.resolve(peer.address)
            async with self._opening:  # those who ask at the same time share one
                # the one that listens where there is one: then both ways have one address
                socket = next((socket for socket in self._sockets if socket.can_reach(where)), None)
                if socket is None:
                    host = "0.0.0.0" if len(where) == 2 else "::"
                    if self.network.is_simulated:
                        host = getattr(self.network, "name", "localhost")
                    socket = await self._open_socket(Address(host, 0), is_listening=False)
        except (UsageError, TimeoutError):  # the second is the deadline's
            raise
        except (OSError, ValueError) as error:
            raise unreachable(peer, error) from error
        self._require_open()
        return where, socket

    def _way_round_relay(self, peer: Target) -> Target:
        """Where datagrams reach a peer that streams reach through a relay, if both routers let them in."""
        relayed_id = _relayed_id(peer)
        path = self.punched.get(relayed_id) if relayed_id is not None else None
        caller = self._callers.get(path.peer) if path is not None else None
        if path is None or caller is None or caller.state is not CallerState.READY:
            return peer
        path.used_at_s = self.loop.time()
        return path.peer

    def let_in(self) -> None:
        """Have sockets that were opened to ask take greetings, too: a peer behind a router greets there."""
        for socket in self._sockets:
            socket.is_listening = True

    def _require_open(self) -> None:
        if not self.is_open:
            raise UsageError("The transport is not open.", next_step="use it inside 'async with'.")

    def _leave(self) -> None:
        """Tell those who wait, on either side."""
        self.flush()
        for session in tuple(self.sessions.values()):
            try:
                if session.num_open:
                    session.leave("the peer is stopping.")
            except Exception:
                log.exception("%s cannot be told that this peer is stopping", session.peer)
            session.close("the transport was closed.")
        self.sessions.clear()
        self._callers.clear()
        self._dirty.clear()
        self.timers.close()
        if self._access_timer is not None:
            self._access_timer.cancel()
            self._access_timer = None

    # --- sockets ---

    async def _open_socket(self, address: Address, *, is_listening: bool) -> DatagramSocket:
        socket = DatagramSocket(self, self.handshakes, is_listening=is_listening)
        await self.network.open_datagrams(address, socket)
        if not self.is_open:  # closed meanwhile
            await socket.close()
        else:
            self._sockets.append(socket)
        return socket

    async def stop_listening(self, address: Address) -> None:
        """Close the socket that listens there."""
        for socket in tuple(self._sockets):
            if socket.where[:2] == (address.host, address.port):
                self._sockets.remove(socket)
                await socket.close()

    # --- what sessions and sockets tell ---

    def on_dirty(self, session: Session) -> None:
        """A session has frames to send at the end of this turn of the loop."""
        self._dirty.append(session)
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush_turn)

    def _flush_turn(self) -> None:
        self._is_flush_due = False
        self.flush()

    def flush(self) -> None:
        """Send the frames of all sessions now."""
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for session in dirty:
                try:
                    session.flush()
                except Exception:
                    log.exception("the session with %s is ended: its packets cannot be made", session.peer)
                    self.drop(session, "its packets could not be made.")

    def jitter(self, share: float) -> float:
        """A random factor around 1, by up to this share."""
        return 1.0 + share * (2.0 * self.random.random() - 1.0)

    def on_bad_packet(self, peer: Peer, why: str) -> None:
        """A packet was dropped."""
        self.stats.refused += 1
        self.complain_once("dropped a packet", peer, why)

    def on_replay(self, peer: Peer) -> None:
        """A packet came that had come before."""
        self.stats.duplicates += 1
        self.complain_once("dropped a packet", peer, "it came twice: the network repeats, or somebody does.")

    def complain_once(self, what: str, peer: Peer, why: str) -> None:
        """One log line for this host and reason in ten minutes: who sends a bad packet sends many."""
        reason = _NUMBER.sub("", why)  # the same complaint with other figures is no new one
        if self._complained.allows(self.clock.now_s(), (peer.address.host, reason)):
            self.complaints.add(what, peer, why)

    # --- sessions ---

    def open_caller(
        self, target: Peer, where: SocketAddress, socket: DatagramSocket, not_before_s: float = 0.0
    ) -> CallerSession:
        """Begin a session, in the place of an earlier one with the same target."""
        caller = CallerSession(self, socket, target, where)
        self.make_room()  # whom to ask is the program's own affair, and not refused
        earlier = self._callers.get(target)
        if earlier is not None:
            earlier.retire()
        self.sessions[caller.id] = caller
        self._callers[target] = caller
        now_s = self.loop.time()
        if now_s < not_before_s:
            self.timers.set(not_before_s, caller)
        else:
            caller.greet(now_s)
        return caller

    def on_retired(self, caller: CallerSession) -> None:
        """It takes no new calls, or is closed."""
        for name in (caller.target, Peer(caller.target.address)):
            if self._callers.get(name) is caller:
                del self._callers[name]
        self.handshakes.forget_caller(caller)
        if caller.state is CallerState.CLOSED:
            self.sessions.pop(caller.id, None)

    def drop(self, session: Session, reason: str, code: str = wire.LEFT) -> None:
        """End a session and forget it."""
        session.close(reason, code)
        self.sessions.pop(session.id, None)

    def make_room(self) -> bool:
        """Whether there is room for one more session, at the price of some that were unused for longest."""
        max_sessions = SESSIONS_A_CONNECTION * self.limits.max_connections + len(self.handshakes.unproven)
        if len(self.sessions) <= max_sessions:
            return True
        idle = [
            session for session in self.sessions.values() if session.is_established and not session.num_open
        ]
        idle.sort(key=lambda session: session.used_at_s)
        for session in idle[: 1 + len(idle) // _EVICTED_SHARE]:
            self.drop(session, "it was not used for a long time.")
        return bool(idle)

    # --- who may talk ---

    def watch(self) -> None:
        """End the sessions of peers that may no longer talk, now and once a second while there is traffic."""
        access = self.access
        if access is None:
            return
        access.refresh()
        has_changed = access.version != self._access_version  # who greets is looked at then
        self._access_version = access.version
        for session in tuple(self.sessions.values()) if has_changed else ():
            peer_id = session.peer.id
            if session.seal is not None and peer_id is not None and not access.is_allowed(peer_id):
                self.complain_once("ended a session", session.peer, _DENIED)
                session.leave("this peer may no longer talk to it.", wire.REFUSED)
                self.drop(session, _DENIED, wire.REFUSED)
        self.is_watching = True
        self._watched_packets = self.stats.packets_in
        self._access_timer = self.loop.call_later(_ACCESS_S, self._watch_on)

    def _watch_on(self) -> None:
        is_quiet = self.stats.packets_in == self._watched_packets
        if is_quiet and not any(session.num_open for session in self.sessions.values()):
            self.is_watching, self._access_timer = False, None
        else:
            self.watch()


def _relayed_id(peer: Target) -> PeerId | None:
    return (peer.address if type(peer) is Peer else peer).relayed_id  # type: ignore[union-attr]


def _not_sent(method: str, peer: Peer, cause: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} at {peer} could not be sent before its deadline.", cause=cause)


class DatagramSocket(asyncio.DatagramProtocol):
    """Receives for all sessions of a socket."""

    def __init__(self, transport: DatagramTransport, handshakes: Handshakes, *, is_listening: bool) -> None:
        self._transport = transport
        self._sessions = transport.sessions
        self._stats = transport.stats
        self._handshakes = handshakes
        self.is_listening = is_listening
        """Whether strangers may begin a session here; a socket that was opened only to ask takes none."""
        self._carrier: asyncio.DatagramTransport | None = None
        self._is_full = False
        self._is_closing = False
        self._closed = asyncio.Event()
        self._descriptor: int | None = None
        self.where: SocketAddress = ()
        """Its own address."""

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        self._carrier = cast("asyncio.DatagramTransport", transport)
        self.where = tuple(transport.get_extra_info("sockname"))
        raw = transport.get_extra_info("socket")
        if raw is not None:
            self._descriptor = raw.fileno()
            close_in_children(self._descriptor)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._descriptor is not None:
            keep_in_children(self._descriptor)
        self._carrier = None
        self._closed.set()

    def pause_writing(self) -> None:
        """The system takes no more: what is sent now is lost, as on a full line."""
        self._is_full = True

    def resume_writing(self) -> None:
        """There is room again."""
        self._is_full = False

    def error_received(self, exc: Exception) -> None:
        """Some packet could not be delivered; which one is not known, and its call tries again."""
        self._stats.unheard += 1

    def datagram_received(self, data: bytes, addr: SocketAddress) -> None:
        """A packet has come."""
        transport, stats = self._transport, self._stats
        if not transport.is_open:
            return
        stats.packets_in += 1
        stats.bytes_in += len(data)
        if not transport.is_watching:
            transport.watch()
        if data[:3] == wire.PREFIX and len(data) >= wire.HEADER_BYTES:
            kind = data[3]
            if kind == _DATA and len(data) <= wire.MAX_PACKET_BYTES:
                session = self._sessions.get(data[4:12])
                if session is not None:
                    session.receive(data, addr, self)
                else:
                    self._handshakes.on_stray(data, addr, self)
            else:
                self._on_greeting(kind, data, addr)
        elif data[:2] == wire.MAGIC and len(data) >= 12 and data[2] != wire.VERSION:
            self._handshakes.on_other_version(data, addr, self)
        else:
            transport.on_bad_packet(peer_at(addr), "bytes that are no packet of Shoal's.")
        transport.flush()

    def _on_greeting(self, kind: int, data: bytes, where: SocketAddress) -> None:
        handshakes = self._handshakes
        if kind == wire.PacketKind.UNKNOWN:
            handshakes.on_unknown(data)
        elif (kind & ~wire.SEALED) in _GREETINGS and len(data) <= wire.MAX_PACKET_BYTES:
            handshakes.on_greeting(kind, data, where, self)
        else:
            self._transport.on_bad_packet(peer_at(where), "a packet of no known kind.")

    # --- sending ---

    def can_reach(self, where: SocketAddress) -> bool:
        """Whether an address can be sent to from here: the same family, and not elsewhere from loopback."""
        is_same_family = len(self.where) == len(where)
        return is_same_family and (is_loopback(where[0]) or not is_loopback(self.where[0]))

    def send(self, packet: bytes, where: SocketAddress) -> None:
        """Send one packet, or lose it."""
        if self._carrier is None or self._is_full:
            self._stats.unheard += 1
            return
        self._carrier.sendto(packet, where)
        self._stats.packets_out += 1
        self._stats.bytes_out += len(packet)

    def begin_closing(self) -> None:
        """Close the socket as soon as what waits is sent."""
        if self._carrier is not None and not self._is_closing:
            self._is_closing = True
            self._carrier.close()

    async def close(self) -> None:
        """Send what waits, and close the socket; its port is free when this returns."""
        if self._carrier is not None:
            self.begin_closing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self._closed.wait()
