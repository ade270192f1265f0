"""Where the sessions of a datagram transport meet: its sockets, what each turn sends, and who may stay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from shoal.core import Address, Peer, PeerId, Scope, StandingScope
from shoal.transport.datagrams.answering import Answerer
from shoal.transport.datagrams.asking import Asker
from shoal.transport.datagrams.crowds import make_room, shed
from shoal.transport.datagrams.greeting import Greeter
from shoal.transport.datagrams.grievances import Grievances
from shoal.transport.datagrams.hellos import Greetings, SealedGreetings
from shoal.transport.datagrams.packets import LEFT, REFUSED, SESSION_BYTES
from shoal.transport.datagrams.parking import Parking
from shoal.transport.datagrams.pending import State
from shoal.transport.datagrams.ports import Port
from shoal.transport.datagrams.sessions import Session, Stats
from shoal.transport.datagrams.waiting import Alarms, Line
from shoal.transport.limits import ByteBudget, Complaints, Limits
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Routes
from shoal.transport.network.sockets import Network

if TYPE_CHECKING:
    from shoal.transport.trust.membership import Membership

log = logging.getLogger(__name__)

WINDOW = 64
"""Requests that may be unanswered at once; more would only fill the queues between here and there."""
_ACCESS_S = 1.0  # how soon a peer that is denied is gone


class DatagramHub:
    """What `ports`, `greeting`, `asking` and `answering` share."""

    loop: asyncio.AbstractEventLoop
    alarms: Alarms
    window: Line
    scope: Scope
    _greeter: Greeter
    _opening: asyncio.Lock

    def __init__(
        self,
        network: Network,
        membership: Membership | None,
        peer_id: PeerId | None,
        limits: Limits,
        routes: Routes,
        budget: ByteBudget,
        *,
        has_streams: bool,
    ) -> None:
        self.network = network
        self.clock = network.clock
        self.random = network.random
        self.limits = limits
        self.routes = routes
        self.budget = budget
        self.peer_id = membership.peer_id if membership is not None else peer_id
        self.pool = BufferPool()
        self.stats = Stats()
        self.complaints = Complaints(log, self.clock)
        self._grievances = Grievances(self.complaints, self.clock)
        self.parking = Parking(routes, self.random) if has_streams else None
        self.is_open = False
        self.is_watching = True
        """Whether somebody looks after who may talk; else `watch` must be called before serving anybody."""
        self.kept_bytes = 0
        self.sessions: dict[bytes, Session] = {}
        self._membership = None if network.is_simulated else membership
        self.access = self._membership.access if self._membership is not None else None
        self._askers: dict[Peer, Asker] = {}
        self._ports: list[Port] = []
        self._dirty: list[Session] = []
        self._is_flush_due = False
        self._access_timer: asyncio.TimerHandle | None = None
        self._access_version = -1
        self._watched_packets = 0

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Between opening and closing."""
        self.loop = asyncio.get_running_loop()
        self.alarms = Alarms(self.loop)
        self.window = Line(self.loop, WINDOW)
        self._opening = asyncio.Lock()
        membership = self._membership
        self._greeter = Greeter(
            self,
            Greetings(self.peer_id, self.random)
            if membership is None
            else SealedGreetings(membership, self.random),
        )
        self.is_watching = self.access is None
        standing = StandingScope("datagram transport")
        self.scope = await standing.open()
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            try:
                self._leave()
                await standing.close()
            finally:
                if self.parking is not None:
                    self.parking.close()
                self.complaints.flush()
                self.pool.clear()
                ports, self._ports = self._ports, []
                for port in ports:  # all of them, before anything is waited for
                    port.begin_closing()
                for port in ports:
                    await port.close()

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
        self._askers.clear()
        self._dirty.clear()
        self.alarms.close()
        if self._access_timer is not None:
            self._access_timer.cancel()
            self._access_timer = None

    # --- sockets ---

    async def _open_port(self, address: Address, *, is_listening: bool) -> Port:
        port = Port(self, self._greeter, is_listening=is_listening)
        await self.network.open_datagrams(address, port)
        if not self.is_open:  # closed meanwhile
            await port.close()
        else:
            self._ports.append(port)
        return port

    async def stop_listening(self, address: Address) -> None:
        """Close the socket that listens there."""
        for port in tuple(self._ports):
            if port.where[:2] == (address.host, address.port):
                self._ports.remove(port)
                await port.close()

    # --- what sessions and ports tell ---

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
        """One log line for this host and reason in ten minutes."""
        self._grievances.add(what, peer, why)

    # --- sessions ---

    def open_asker(
        self, target: Peer, where: tuple[Any, ...], port: Port, not_before_s: float = 0.0
    ) -> Asker:
        """Begin a session, in the place of an earlier one with the same target."""
        asker = Asker(self, port, target, where, self.random.randbytes(SESSION_BYTES))
        self.make_room()  # whom to ask is the program's own affair, and not refused
        earlier = self._askers.get(target)
        if earlier is not None:
            earlier.retire()
        self.sessions[asker.id] = asker
        self._askers[target] = asker
        now_s = self.loop.time()
        if now_s < not_before_s:
            self.alarms.set(not_before_s, asker)
        else:
            asker.greet(now_s)
        return asker

    def new_hello(self, asker: Asker) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""
        return self._greeter.new_hello(asker)

    def on_retired(self, asker: Asker) -> None:
        """It takes no new calls, or is closed."""
        for name in (asker.target, Peer(asker.target.address)):
            if self._askers.get(name) is asker:
                del self._askers[name]
        self._greeter.forget_asker(asker)
        if asker.state is State.CLOSED:
            self.sessions.pop(asker.id, None)

    def prove(
        self, answerer: Answerer, packet: bytes, where: tuple[Any, ...], port: Port, token: bytes
    ) -> bool:
        """Whether a token shows that the caller receives there; asks for one where it does not."""
        return self._greeter.admission.prove(answerer, packet, where, port, token)

    def on_left(self, answerer: Answerer) -> None:
        """The caller has ended the session."""
        self.drop(answerer, "its caller has left.")

    def drop(self, session: Session, reason: str, code: str = LEFT) -> None:
        """End a session and forget it."""
        session.close(reason, code)
        self.sessions.pop(session.id, None)

    def make_room(self) -> bool:
        """Whether there is room for one more session, at the price of others that nobody uses."""
        return make_room(self, num_newcomers=len(self._greeter.admission.newcomers))

    def shed(self) -> None:
        """Too much is kept for callers: forget some."""
        shed(self)

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
                session.leave("this peer may no longer talk to it.", REFUSED)
                self.drop(session, _DENIED, REFUSED)
        self.is_watching = True
        self._watched_packets = self.stats.packets_in
        self._access_timer = self.loop.call_later(_ACCESS_S, self._watch_on)

    def _watch_on(self) -> None:
        is_quiet = self.stats.packets_in == self._watched_packets
        if is_quiet and not any(session.num_open for session in self.sessions.values()):
            self.is_watching, self._access_timer = False, None
        else:
            self.watch()


_DENIED = "it may no longer talk to this peer."
