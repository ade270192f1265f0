"""The caller's side of datagrams: calls that are sent again until they are answered or their time is over.

Calls are idempotent: the other side may serve a call that was sent twice twice, after a restart, too.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import math
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerLost,
    PeerRefused,
    ProtocolError,
    ShoalError,
)
from shoal.core.scope import settle
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.sessions import (
    INITIAL_TIMEOUT_S,
    MIN_CALLER_CONTENT_BYTES,
    TOKEN_BYTES,
    BareSeal,
    RoundTrips,
    Session,
)
from shoal.transport.datagrams.wire import SocketAddress, UnreadablePacket
from shoal.transport.frames import ErrorHead, decode_payload, encode, from_wire
from shoal.transport.limits import CallSlots
from shoal.transport.messages import Head, Reply, received, unusable_answer

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport

_JITTER = 0.1
_MAX_WAIT_S = 8.0
_WORKING_WAIT_S = 1.0  # a call that is being served is asked about this seldom, at first
_SILENT_SENDS = 4
_SILENT_S = 8.0  # a peer so silent may have forgotten the session, and be kept from saying so
_EARLY_S = 0.001  # loops round their timers to milliseconds and may ring a little early
_ENDINGS: dict[str, type[PeerError]] = {wire.LEFT: PeerLost, wire.REFUSED: PeerRefused, wire.BUSY: PeerBusy}
_SILENCE = (
    "nothing was heard from it: the host is down, a firewall drops the packets, it has another secret or "
    "none, or what listens there is no Shoal peer."
)


class AskOverStream(Exception):
    """The answer is too large for datagrams: ask again over a stream."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes


class CallerState(enum.Enum):
    """How far a session has come."""

    GREETING = 1
    READY = 2
    RETIRED = 3  # finishes the calls that it has
    CLOSED = 4


class PendingDatagram(msgspec.Struct, eq=False):
    """One call that has been sent and not yet answered."""

    id: int
    caller: CallerSession
    method: str
    frame: bytes
    into: Any
    deadline: Deadline
    expires_at_s: float
    answer: asyncio.Future[Reply]
    sent_at_s: float
    wait_s: float
    num_sends: int = 1
    is_in_window: bool = True
    """Whether it takes a slot in the window of unanswered requests."""
    has_outcome: bool = False
    is_working: bool = False
    quiet_until_s: float = 0.0
    """Not to be sent again before this: its handler is at it."""
    digest: bytes = b""
    parts: list[bytes | None] = []
    """What has come of the answer with this digest, where it takes several packets."""

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.answer.done()

    def on_timer(self, now_s: float) -> None:
        """No answer has come in time."""
        self.caller.on_overdue(self, now_s)


class CallerSession(Session):
    """A session that this side has begun, to ask.

    It greets until it is greeted back, takes calls while it is READY, and ends them with itself.
    """

    _min_content_bytes = MIN_CALLER_CONTENT_BYTES

    def __init__(
        self, transport: DatagramTransport, socket: DatagramSocket, peer: Peer, where: SocketAddress
    ) -> None:
        super().__init__(transport, socket, peer, where)
        self.target = peer
        """Whom callers asked for; `peer` tells who it is."""
        self.state = CallerState.GREETING
        self.round_trips = RoundTrips()
        self.waiters: list[asyncio.Future[None]] = []
        self.heard_at_s: float | None = None
        self.slots = CallSlots(transport.loop, 0)
        """How many calls the other side takes at once."""
        self.token: bytes | None = None
        self.hellos: dict[bytes, bytes] = {}
        """Those sent so far, by their salts."""
        self.num_hellos = 0
        self.greeted_at_s = 0.0
        self._greets_at_s = 0.0
        self._next_id = 1

    @property
    def is_established(self) -> bool:
        """Whether both sides know each other."""
        return self.state in (CallerState.READY, CallerState.RETIRED)

    @property
    def is_over(self) -> bool:
        """Whether there is nobody left to greet."""
        return self.state is not CallerState.GREETING

    # --- the handshake ---

    def on_timer(self, now_s: float) -> None:
        """No welcome has come in time: greet again, as long as somebody waits for it."""
        if now_s < self._greets_at_s:
            return  # it has greeted since
        if not self.calls and all(waiter.done() for waiter in self.waiters):
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
        self.socket.send(self.transport.handshakes.new_hello(self), self.where)
        self._greets_at_s = now_s + self.round_trips.timeout_s * self.transport.jitter(_JITTER)
        self.transport.timers.set(self._greets_at_s, self)

    async def wait_for_welcome(self) -> None:
        """Waits until the other side has greeted back; a hello that seems lost is sent again at once."""
        welcome: asyncio.Future[None] = self.transport.loop.create_future()
        self.waiters.append(welcome)
        now_s = self.transport.loop.time()
        if self.num_hellos and now_s - self.greeted_at_s > INITIAL_TIMEOUT_S:
            self.greet(now_s)
        await welcome

    def welcome(self, peer: Peer, seal: BareSeal, their_id: bytes, token: bytes, max_calls: int) -> None:
        """The other side has greeted back."""
        self.peer = peer
        self.begin(seal, their_id)
        self.token = token
        max_calls = max(1, min(max_calls, self.transport.limits.max_calls))
        self.slots = CallSlots(self.transport.loop, max_calls - len(self.calls))
        self.state = CallerState.READY
        now_s = self.transport.loop.time()
        if self.num_hellos == 1:
            self.round_trips.observe(now_s - self.greeted_at_s)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
        for call in self.calls.values():  # of an earlier session
            call.sent_at_s = now_s
            self.queue(call.frame)

    def inherit(self, earlier: CallerSession) -> None:
        """Go on for a session that the other side does not know any more: its calls are made again."""
        self.round_trips = earlier.round_trips
        self.waiters, earlier.waiters = earlier.waiters, []
        self.calls, earlier.calls = earlier.calls, {}
        self._next_id = earlier._next_id
        for call in self.calls.values():
            call.caller = self

    # --- calls ---

    def ask(
        self, method: str, rest: bytes, into: Any, deadline: Deadline, expires_at_s: float
    ) -> PendingDatagram:
        """Send a request; whoever asks must `end` the call, whatever became of it."""
        transport = self.transport
        loop = transport.loop
        call_id = self._next_id
        self._next_id = call_id + 1
        frame = wire.encode_request(call_id, rest)
        now_s = loop.time()
        wait_s = self.round_trips.timeout_s
        call = PendingDatagram(
            call_id, self, method, frame, into, deadline, expires_at_s, loop.create_future(), now_s, wait_s
        )
        self.calls[call_id] = call
        self.queue(frame)
        transport.timers.set(min(expires_at_s, now_s + wait_s), call)
        self.used_at_s = now_s
        return call

    def end(self, call: PendingDatagram) -> None:
        """Forget a call; one that was not answered is cancelled at the peer."""
        if self.calls.pop(call.id, None) is None:
            return
        if call.is_in_window:
            self._leave_window(call)
        if not call.has_outcome and self.is_established:
            self.queue(encode(wire.Cancel(call.id)))
        if not call.answer.cancel() and not call.answer.cancelled():
            call.answer.exception()  # a one-way call's failure is nobody's
        self.slots.give_back()
        if self.state is CallerState.RETIRED and not self.calls:
            self.flush()  # its cancellation
            self.close("its last call has ended.")

    def on_overdue(self, call: PendingDatagram, now_s: float) -> None:
        """No answer has come in time: ask again, or give up at the deadline."""
        if now_s >= call.expires_at_s:
            settle(call.answer, self._late(call, now_s))
            return
        if now_s < call.quiet_until_s:
            self.transport.timers.set(min(call.quiet_until_s, call.expires_at_s), call)
            return
        if call.is_in_window:
            self._leave_window(call)
        if self.is_established:
            if not call.is_working:
                self.round_trips.missed(call.wait_s)
            call.num_sends += 1
            self.transport.stats.resent += 1
            self.queue(call.frame)
            heard_at_s = self.greeted_at_s if self.heard_at_s is None else self.heard_at_s
            is_silent = call.num_sends > _SILENT_SENDS and now_s - heard_at_s > _SILENT_S
            if is_silent and not call.is_working:
                self.retire()  # new calls greet again
        call.wait_s = min(_MAX_WAIT_S, 2 * call.wait_s) * self.transport.jitter(_JITTER)
        self.transport.timers.set(min(now_s + call.wait_s, call.expires_at_s), call)

    def _leave_window(self, call: PendingDatagram) -> None:
        """Something has come back, or will not: another request may be sent."""
        call.is_in_window = False
        self.transport.window.give_back()

    def _oldest(self) -> int:
        for call_id in self.calls:
            return call_id
        return self._next_id

    def _send(self) -> None:
        if self.token is not None:  # until the other side has shown that it believes this address
            self._frames.insert(0, encode(wire.Proof(self.token)))
        super()._send()

    # --- what comes back: answers whole or in parts, failures, and signs of life ---

    def receive(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """Answers have come; where from does not matter, since they are genuine."""
        frames = self.read(packet, where)
        if frames is None:
            return
        self.heard_at_s = self.transport.loop.time()
        if frames.frames and type(frames.frames[0]) is not wire.Challenge:
            self.token = None  # this address is believed
        for frame in frames.frames:
            if type(frame) is wire.AnswerFrame or isinstance(
                frame, (wire.Failure, wire.AnswerPart, wire.Working, wire.TooLarge)
            ):
                self._on_outcome(frame)
            elif type(frame) is wire.Challenge:
                self._on_challenge(frame)
            elif type(frame) is wire.Goodbye:
                self.close(frame.reason[:200], frame.code)

    def _on_outcome(
        self, frame: wire.AnswerFrame | wire.Failure | wire.AnswerPart | wire.Working | wire.TooLarge
    ) -> None:
        call = self.calls.get(frame.id)
        if call is None or call.answer.done():
            self.transport.stats.duplicates += 1
            return
        if call.is_in_window:
            self._leave_window(call)
        if isinstance(frame, wire.AnswerFrame):
            if call.num_sends == 1:  # else nobody knows which of them was answered (Karn's rule)
                self.round_trips.observe((self.heard_at_s or 0.0) - call.sent_at_s)
            self._finish(call, frame)
        elif isinstance(frame, wire.Failure):
            self._finish(call, frame)
        elif isinstance(frame, wire.AnswerPart):
            self._on_part(call, frame)
        elif isinstance(frame, wire.Working):
            call.is_working = True
            call.wait_s = max(call.wait_s, _WORKING_WAIT_S)
            call.quiet_until_s = self.transport.loop.time() + call.wait_s
        else:
            call.has_outcome = True
            call.answer.set_exception(AskOverStream(frame.size_bytes))

    def _on_part(self, call: PendingDatagram, frame: wire.AnswerPart) -> None:
        if not (2 <= frame.num_parts <= wire.MAX_PARTS and 0 <= frame.index < frame.num_parts):
            self.transport.on_bad_packet(self.peer, "a part of an answer that does not fit to the others.")
            return
        if (call.digest, len(call.parts)) != (frame.digest, frame.num_parts):
            call.digest, call.parts = frame.digest, [None] * frame.num_parts
        call.parts[frame.index] = frame.data
        arrived = [part for part in call.parts if part is not None]
        if len(arrived) == frame.num_parts:
            try:
                self._finish(call, wire.decode_answer(b"".join(arrived)))
            except UnreadablePacket as error:
                call.has_outcome = True
                what = f"The answer of {self.peer} to {call.method} cannot be read: {error}."
                call.answer.set_exception(ProtocolError(what))

    def _finish(self, call: PendingDatagram, outcome: wire.AnswerFrame | wire.Failure) -> None:
        """Give a call its answer, in the memory that its caller wants."""
        call.has_outcome = True
        if isinstance(outcome, wire.Failure):
            why = ErrorHead(outcome.code, outcome.what, outcome.cause, outcome.next_step)
            call.answer.set_exception(from_wire(why, self.peer, call.method))
            return
        try:
            reply = Reply(decode_payload(outcome.payload))
            if outcome.buffers or call.into is not None:
                sizes = [len(buffer) for buffer in outcome.buffers]
                self.transport.limits.check_sizes(sizes)
                head = Head(call.method, reply.payload, sizes, self.peer, call.deadline)
                body = memoryview(b"".join(outcome.buffers))
                reply.buffers = received(head, call.into, self.transport.pool, body)
        except Exception as error:  # noqa: BLE001 - whatever the caller's allocate raises belongs to the caller
            call.answer.set_exception(unusable_answer(error, self.peer, call.method))
        else:
            call.answer.set_result(reply)

    def _on_challenge(self, frame: wire.Challenge) -> None:
        """The other side sees another address than before: prove it, and ask again."""
        if len(frame.token) != TOKEN_BYTES:
            self.transport.on_bad_packet(self.peer, "a challenge that does not follow the protocol.")
        elif frame.token != self.token:
            self.token = frame.token
            for call in self.calls.values():
                call.num_sends += 1
                self.queue(call.frame)

    # --- the end ---

    def refuse(self, error: ShoalError) -> None:
        """Nothing can be asked there."""
        self.state = CallerState.CLOSED
        self.is_open = False
        for waiter in self.waiters:
            settle(waiter, error)
        self.waiters.clear()
        for call in tuple(self.calls.values()):
            settle(call.answer, error)
        self.slots.let_all_in()
        self.transport.on_retired(self)

    def retire(self) -> None:
        """Take no new calls; those under way may end."""
        if self.state is CallerState.READY:
            self.state = CallerState.RETIRED
            self.transport.on_retired(self)
            if not self.calls:
                self.close("another session has taken its place.")

    def close(self, reason: str, code: str = wire.LEFT) -> None:
        """End every call, oldest first."""
        kind = _ENDINGS.get(code, PeerLost)
        for call in self.calls.values():
            what = f"{call.method} at {self.peer}: the session ended."
            settle(call.answer, kind(what, peer=self.peer, cause=reason))
        self.refuse(kind(f"The session with {self.peer} ended.", peer=self.peer, cause=reason))

    def _late(self, call: PendingDatagram, now_s: float) -> DeadlineExceeded:
        """The error of a call whose time is over."""
        if self.state is CallerState.GREETING or self.heard_at_s is None:
            cause = _SILENCE
        elif call.is_working:
            cause = f"its handler was at it; {now_s - self.heard_at_s:.1f} s ago the peer was heard from."
        else:
            ago_s = now_s - self.heard_at_s
            cause = f"it was asked {call.num_sends} times; the peer was heard from {ago_s:.1f} s ago."
        return DeadlineExceeded(
            f"{call.method} at {self.peer} was not answered before its deadline.", cause=cause
        )


def no_welcome(peer: Peer) -> DeadlineExceeded:
    """The error for a peer that does not greet back."""
    return DeadlineExceeded(
        f"No connection to {peer} before the deadline.",
        cause=_SILENCE,
        next_step="check the address, that its UDP port is reachable, and that both have the same secret.",
    )


Timed = PendingDatagram | CallerSession
"""What wants to be woken, by its `on_timer`, unless it `is_over` by then."""


class Timers:
    """Many timers behind one of the loop, and none while nobody waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Timed]] = []
        self._num_set = 0
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at_s = math.inf

    def set(self, at_s: float, timed: Timed) -> None:
        """Wake somebody at a time of the loop; those of the same time in order of asking."""
        self._num_set += 1
        heapq.heappush(self._heap, (at_s, self._num_set, timed))
        if at_s < self._rings_at_s:
            self._arm(at_s)

    def close(self) -> None:
        """Wake nobody any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at_s = None, math.inf

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_at_s = None, -math.inf  # nobody arms it before the end
        heap = self._heap
        now_s = self._loop.time()
        due = []
        while heap and (heap[0][0] <= now_s + _EARLY_S or heap[0][2].is_over):
            due.append(heapq.heappop(heap))
        for at_s, _, timed in due:  # what they set anew rings in a later turn, however soon it is
            if not timed.is_over:
                timed.on_timer(max(now_s, at_s))
        self._rings_at_s = math.inf
        if heap:
            self._arm(heap[0][0])
