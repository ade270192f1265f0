"""The caller's side of datagrams: calls that are sent again until they are answered or their time is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import (
    Deadline,
    Peer,
    PeerLost,
    ShoalError,
)
from shoal.core.futures import settle
from shoal.transport.datagrams.outcomes import HANDLERS, late
from shoal.transport.datagrams.packets import (
    Challenge,
    encode_request,
    renumbered,
)
from shoal.transport.datagrams.pending import PendingCall, State
from shoal.transport.datagrams.ports import Hub
from shoal.transport.datagrams.sealing import BareSeal
from shoal.transport.datagrams.sessions import MIN_CALLER_CONTENT_BYTES, RoundTrips, Session
from shoal.transport.datagrams.waiting import Alarms, Line
from shoal.transport.frames import encode
from shoal.transport.limits import Limits
from shoal.transport.memory import BufferPool

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port

MAX_SPAN = 4096
"""Ids between the oldest open call and the newest; a session that has more is replaced by a new one, since
the callee remembers every call from the oldest on."""
_MAX_WAIT_S = 8.0
_JITTER = 0.1


class AskingHub(Hub, Protocol):
    """What this side needs besides."""

    limits: Limits
    pool: BufferPool
    alarms: Alarms
    window: Line

    def jitter(self, share: float) -> float:
        """A random factor around 1."""

    def new_hello(self, asker: Asker) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""

    def on_retired(self, asker: Asker) -> None:
        """It takes no new calls, or is closed."""


class Asker(Session):
    """A session that this side has begun, to ask."""

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
        if not any(not waiter.done() for waiter in self.waiters) and not self.pending:
            self.close("nobody waits for it.")
            return
        if self.num_hellos:
            self.round_trips.missed(now_s - self.greeted_at_s)
        self.greet(now_s)

    def greet(self, now_s: float) -> None:
        """Send the hello, and listen for a while."""
        self.num_hellos += 1
        self.greeted_at_s = now_s
        self.port.send(self.hub.new_hello(self), self.where)
        self.hub.alarms.set(now_s + self.round_trips.timeout_s * self.hub.jitter(_JITTER), self)

    def welcome(self, peer: Peer, seal: BareSeal, their_id: bytes, token: bytes, max_calls: int) -> None:
        """The other side has greeted back."""
        self.peer = peer
        self.begin(seal, their_id)
        self.token = token
        max_calls = max(1, min(max_calls, self.hub.limits.max_calls))
        self.places = Line(self.hub.loop, max_calls - len(self.pending))
        self.state = State.READY
        if self.num_hellos == 1:
            self.round_trips.observe(self.hub.loop.time() - self.greeted_at_s)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
        for call in self.pending.values():  # of an earlier session
            self.resend(call)

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

    def close(self, reason: str) -> None:
        """End every call, oldest first."""
        for call in self.pending.values():
            what = f"{call.method} at {self.peer}: the session ended."
            settle(call.answer, PeerLost(what, peer=self.peer, cause=reason))
        self.refuse(PeerLost(f"The session with {self.peer} ended.", peer=self.peer, cause=reason))

    def inherit(self, earlier: Asker) -> None:
        """Go on for a session that the other side does not know: its calls that may safely be made again."""
        self.round_trips = earlier.round_trips
        self.waiters = earlier.waiters
        earlier.waiters = []
        for call in tuple(earlier.pending.values()):
            if call.num_sends > 1 or call.is_working or call.parts:
                continue  # it may have been served already: `earlier` tells its caller so
            del earlier.pending[call.id]
            call.asker = self
            call.id = self._next_id
            call.frame = renumbered(call.frame, call.id)
            self._next_id += 1
            self.pending[call.id] = call

    # --- calls ---

    def ask(
        self, method: str, rest: bytes, into: Any, deadline: Deadline, expires_at_s: float
    ) -> PendingCall:
        """Send a request; whoever asks must `end` the call, whatever became of it."""
        hub = self.hub
        loop = hub.loop
        call_id = self._next_id
        self._next_id = call_id + 1
        frame = encode_request(call_id, rest)
        now_s = loop.time()
        wait_s = self.round_trips.timeout_s
        call = PendingCall(
            call_id, self, method, frame, into, deadline, expires_at_s, loop.create_future(), now_s, wait_s
        )
        self.pending[call_id] = call
        self.queue(frame)
        due_at_s = now_s + wait_s
        hub.alarms.set(min(expires_at_s, due_at_s), call)
        self.used_at_s = now_s
        if call_id - self._oldest() > MAX_SPAN:
            self.retire()
        return call

    def end(self, call: PendingCall) -> None:
        """Forget a call; one that was not answered is cancelled at the peer."""
        if self.pending.pop(call.id, None) is None:
            return
        if call.has_place:
            self.leave_window(call)
        if not call.is_settled and self.is_settled:
            self.queue(encode((2, call.id)))
        if not call.answer.cancel() and not call.answer.cancelled():
            call.answer.exception()  # a one-way call's failure is nobody's
        self.places.give_back()
        if self.state is State.RETIRED and not self.pending:
            self.close("its last call has ended.")

    def on_overdue(self, call: PendingCall, now_s: float) -> None:
        """The alarm of a call: ask again, or give up at its deadline."""
        if now_s >= call.expires_at_s:
            settle(call.answer, late(self, call, now_s))
            return
        if now_s < call.quiet_until_s:
            self.hub.alarms.set(min(call.quiet_until_s, call.expires_at_s), call)
            return
        if call.has_place:
            self.leave_window(call)
        if self.is_settled:
            if not call.is_working:
                self.round_trips.missed(call.wait_s)
            call.num_sends += 1
            self.hub.stats.resent += 1
            self.resend(call)
        call.wait_s = min(_MAX_WAIT_S, 2 * call.wait_s) * self.hub.jitter(_JITTER)
        self.hub.alarms.set(min(now_s + call.wait_s, call.expires_at_s), call)

    def resend(self, call: PendingCall) -> None:
        """Send a request again, or ask for the parts of its answer that are missing."""
        if call.parts is not None:
            missing = [index for index, part in enumerate(call.parts) if part is None]
            self.queue(encode((3, call.id, missing)))
        else:
            self.queue(call.frame)

    def leave_window(self, call: PendingCall) -> None:
        """Something has come back, or will not: another request may be sent."""
        call.has_place = False
        self.hub.window.give_back()

    def _oldest(self) -> int:
        for call_id in self.pending:
            return call_id
        return self._next_id

    # --- what comes back ---

    def _send(self) -> None:
        if self.token is not None:  # until the other side has shown that it believes this address
            self._frames.insert(0, encode((4, self.token)))
        super()._send()

    def receive(self, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """Answers have come; where from does not matter, since they are genuine."""
        frames = self.read(packet)
        if frames is None:
            return
        self.heard_at_s = self.hub.loop.time()
        if frames.frames and type(frames.frames[0]) is not Challenge:
            self.token = None  # this address is believed
        for frame in frames.frames:
            handler = HANDLERS.get(type(frame))
            if handler is not None:
                handler(self, frame)
