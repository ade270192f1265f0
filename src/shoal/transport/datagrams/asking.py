"""The caller's side of datagrams: calls that are sent again until they are answered or their time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core import (
    Deadline,
    Peer,
)
from shoal.core.scope import settle
from shoal.transport.datagrams.acquaintance import JITTER, AskingSession
from shoal.transport.datagrams.outcomes import HANDLERS, late
from shoal.transport.datagrams.packets import (
    Challenge,
    encode_request,
    renumbered,
)
from shoal.transport.datagrams.pending import PendingCall, State
from shoal.transport.datagrams.sealing import BareSeal
from shoal.transport.datagrams.waiting import Line
from shoal.transport.frames import encode

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port

MAX_SPAN = 2048
"""Ids between the oldest open call and the newest; a session that has more is replaced by a new one, since
the callee remembers every call from the oldest on."""
_MAX_WAIT_S = 8.0
_SILENT_SENDS = 4
_SILENT_S = 8.0  # a peer so silent may have forgotten the session, and be kept from saying so


class Asker(AskingSession):
    """A session that this side has begun, to ask."""

    def welcome(self, peer: Peer, seal: BareSeal, their_id: bytes, token: bytes, max_calls: int) -> None:
        """The other side has greeted back."""
        self.peer = peer
        self.begin(seal, their_id)
        self.token = token
        max_calls = max(1, min(max_calls, self.hub.limits.max_calls))
        self.places = Line(self.hub.loop, max_calls - len(self.pending))
        self.state = State.READY
        now_s = self.hub.loop.time()
        if self.num_hellos == 1:
            self.round_trips.observe(now_s - self.greeted_at_s)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
        for call in self.pending.values():  # of an earlier session
            call.sent_at_s = now_s
            self.resend(call)

    def inherit(self, earlier: Asker, counter: int) -> None:
        """Go on for a session of which the other side did not know the packet with this counter.

        Calls that may safely be made again move here: those sent once, in that packet or a later one. Earlier
        packets may have come while the session was known.
        """
        self.round_trips = earlier.round_trips
        self.waiters = earlier.waiters
        earlier.waiters = []
        for call in tuple(earlier.pending.values()):
            if call.num_sends > 1 or call.is_working or call.parts or call.counter < counter:
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
        call.counter = self._counter
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
            self.flush()  # its cancellation
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
            heard_at_s = self.greeted_at_s if self.heard_at_s is None else self.heard_at_s
            is_silent = call.num_sends > _SILENT_SENDS and now_s - heard_at_s > _SILENT_S
            if is_silent and not call.is_working:
                self.retire()  # new calls greet again
        call.wait_s = min(_MAX_WAIT_S, 2 * call.wait_s) * self.hub.jitter(JITTER)
        self.hub.alarms.set(min(now_s + call.wait_s, call.expires_at_s), call)

    def resend(self, call: PendingCall) -> None:
        """Send a request again, or ask for the parts of its answer that are missing."""
        if call.parts is not None:
            missing = [index for index, part in enumerate(call.parts) if part is None]
            self.queue(encode((3, call.id, missing)))
        else:
            self.queue(call.frame)
            call.counter = self._counter

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
        frames = self.read(packet, where)
        if frames is None:
            return
        self.heard_at_s = self.hub.loop.time()
        if frames.frames and type(frames.frames[0]) is not Challenge:
            self.token = None  # this address is believed
        for frame in frames.frames:
            handler = HANDLERS.get(type(frame))
            if handler is not None:
                handler(self, frame)
