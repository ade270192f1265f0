"""A session that this side has begun, from its first hello to its end; what is asked in it is `asking`'s."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Peer, PeerBusy, PeerError, PeerLost, PeerRefused, ShoalError
from shoal.core.scope import settle
from shoal.transport.datagrams.packets import BUSY, LEFT, REFUSED
from shoal.transport.datagrams.pending import PendingCall, State
from shoal.transport.datagrams.ports import Hub
from shoal.transport.datagrams.sessions import (
    INITIAL_TIMEOUT_S,
    MIN_CALLER_CONTENT_BYTES,
    RoundTrips,
    Session,
)
from shoal.transport.datagrams.waiting import Alarms, Line
from shoal.transport.limits import Limits
from shoal.transport.memory import BufferPool

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port

JITTER = 0.1
_ENDINGS: dict[str, type[PeerError]] = {LEFT: PeerLost, REFUSED: PeerRefused, BUSY: PeerBusy}


class AskingHub(Hub, Protocol):
    """What this side needs besides."""

    limits: Limits
    pool: BufferPool
    alarms: Alarms
    window: Line

    def jitter(self, share: float) -> float:
        """A random factor around 1."""

    def new_hello(self, asker: Any) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""

    def on_retired(self, asker: Any) -> None:
        """It takes no new calls, or is closed."""


class AskingSession(Session):
    """Greets until it is greeted back, takes calls while it is READY, and ends them with itself."""

    _min_content_bytes = MIN_CALLER_CONTENT_BYTES
    hub: AskingHub

    def __init__(
        self, hub: AskingHub, port: Port, peer: Peer, where: tuple[Any, ...], session_id: bytes
    ) -> None:
        super().__init__(hub, port, peer, where, session_id)
        self.target = peer
        """Whom callers asked for; `peer` tells who it is."""
        self.state = State.GREETING
        self.round_trips = RoundTrips()
        self.waiters: list[asyncio.Future[None]] = []
        self.heard_at_s: float | None = None
        self.places = Line(hub.loop, 0)
        """How many calls the other side takes at once."""
        self.token: bytes | None = None
        self.hellos: dict[bytes, bytes] = {}
        """Those sent so far, by their salts."""
        self.num_hellos = 0
        self.greeted_at_s = 0.0
        self._greets_at_s = 0.0
        self._next_id = 1
        self.pending: dict[int, PendingCall] = {}

    # --- the way from a greeting to its end ---

    @property
    def num_open(self) -> int:
        """Calls that wait for an answer."""
        return len(self.pending)

    @property
    def is_settled(self) -> bool:
        """Whether both sides know each other."""
        return self.state in (State.READY, State.RETIRED)

    @property
    def is_over(self) -> bool:
        """For the alarm of its hello."""
        return self.state is not State.GREETING

    def on_alarm(self, now_s: float) -> None:
        """No welcome has come in time: greet again, as long as somebody waits for it."""
        if now_s < self._greets_at_s:
            return  # it has greeted since
        if not self.pending and all(waiter.done() for waiter in self.waiters):
            self.close("nobody waits for it.")
            return
        if self.num_hellos:
            self.round_trips.missed(now_s - self.greeted_at_s)
        self.greet(now_s)

    def greet(self, now_s: float) -> None:
        """Send the hello, and listen for a while."""
        self.num_hellos += 1
        self.greeted_at_s = now_s
        self.waiters = [waiter for waiter in self.waiters if not waiter.done()]
        self.port.send(self.hub.new_hello(self), self.where)
        self._greets_at_s = now_s + self.round_trips.timeout_s * self.hub.jitter(JITTER)
        self.hub.alarms.set(self._greets_at_s, self)

    async def wait_for_welcome(self) -> None:
        """Until the other side has greeted back; a hello that seems lost is sent again at once."""
        welcome: asyncio.Future[None] = self.hub.loop.create_future()
        self.waiters.append(welcome)
        now_s = self.hub.loop.time()
        if self.num_hellos and now_s - self.greeted_at_s > INITIAL_TIMEOUT_S:
            self.greet(now_s)
        await welcome

    def refuse(self, error: ShoalError) -> None:
        """Nothing can be asked there."""
        self.state = State.CLOSED
        self.is_open = False
        for waiter in self.waiters:
            settle(waiter, error)
        self.waiters.clear()
        for call in tuple(self.pending.values()):
            settle(call.answer, error)
        self.places.let_all_in()
        self.hub.on_retired(self)

    def retire(self) -> None:
        """Take no new calls; those under way may end."""
        if self.state is State.READY:
            self.state = State.RETIRED
            self.hub.on_retired(self)
            if not self.pending:
                self.close("another session has taken its place.")

    def close(self, reason: str, code: str = LEFT) -> None:
        """End every call, oldest first."""
        kind = _ENDINGS.get(code, PeerLost)
        for call in self.pending.values():
            what = f"{call.method} at {self.peer}: the session ended."
            settle(call.answer, kind(what, peer=self.peer, cause=reason))
        self.refuse(kind(f"The session with {self.peer} ended.", peer=self.peer, cause=reason))
