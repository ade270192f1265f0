"""The callee's side of datagrams: a request is served once, and its answer kept while it may be asked for.

A caller tells with every packet which of its calls is the oldest still open; answers to earlier ones are
forgotten. A request that comes again while its handler runs is answered with 'working', one whose answer is
kept with that answer. No handler runs for an address that has not proven itself. An answer that takes more
than a few datagrams waits for its caller to take it over a stream, so that its handler, too, runs once and on
the loop of the datagrams.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerRefused,
    ShoalError,
    UsageError,
)
from shoal.transport.datagrams.sessions import Session, copy_in, fill_all, peer_at
from shoal.transport.datagrams.wire import (
    LEFT,
    MAX_FRAME_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Cancel,
    Fetch,
    Goodbye,
    Parked,
    Proof,
    Request,
    SocketAddress,
    Working,
    cut,
    encode_failure,
)
from shoal.transport.frames import UNREADABLE, Mode, decode_payload, encode, to_wire
from shoal.transport.limits import MIB
from shoal.transport.memory import BufferPool
from shoal.transport.messages import (
    EMPTY_REPLY,
    Head,
    Reply,
    Route,
    Routes,
    byte_views,
    checked_reply,
    encode_head,
    fitting_views,
    release,
)

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20
"""What is kept of one session's answers."""
MAX_KEPT_BYTES_IN_ALL = 64 << 20
"""What is kept of all sessions' answers."""
ENTRY_BYTES = 200
"""What remembering a call takes beside its answer."""
MAX_SPAN = 2560
"""Ids from a caller's oldest open call to its newest; a caller that keeps to its own bound has fewer."""
TAKE_LARGE = "shoal.parked"
"""The method by which an answer is taken over a stream."""
LARGE_KEPT_S = 10.0
MAX_LARGE = 256
MAX_LARGE_BYTES = 256 * MIB
_TICKET_BYTES = 16
_MAX_ANSWER_BYTES = MAX_PARTS * PART_BYTES
_HANDLER_BYTES = 4096  # what a handler that runs takes beside its packet, about
_ONE_WAY = int(Mode.ONE_WAY)
_NEVER = Deadline.never()
_LATER = "try again later."


class ServedCall(msgspec.Struct, eq=False):
    """One call whose handler runs."""

    id: int
    head: Head
    buffers: Sequence[memoryview]
    is_one_way: bool
    held_bytes: int
    is_over: bool = False
    work: asyncio.Future[Any] | None = None
    timer: asyncio.TimerHandle | None = None


class CalleeSession(Session):
    """A session that the other side has begun, to call methods here."""

    def __init__(
        self,
        transport: DatagramTransport,
        socket: DatagramSocket,
        peer: Peer,
        where: SocketAddress,
        session_id: bytes,
    ) -> None:
        super().__init__(transport, socket, peer, where, session_id)
        self.is_proven = False
        """Whether the caller has shown that it receives where its packets come from."""
        self.hello_nonce = b""
        self.kept = AnswerCache(transport)
        self._running: dict[int, ServedCall] = {}

    @property
    def num_open(self) -> int:
        """The number of handlers that run."""
        return len(self._running)

    @property
    def is_settled(self) -> bool:
        """Whether both sides know each other, and where."""
        return self.is_proven and self.is_open

    def receive(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """Takes a packet of requests from the caller."""
        frames = self.read(packet, where)
        if frames is None:
            return
        if where != self.where or not self.is_proven:
            first = frames.frames[0] if frames.frames else None
            token = first.token if type(first) is Proof else b""
            if not self.transport.handshakes.prove(self, packet, where, socket, token):
                return
            self.is_proven, self.where, self.socket = True, where, socket
            self.peer = Peer(peer_at(where).address, self.peer.id)
        self.used_at_s = self.transport.loop.time()
        if frames.oldest > self.kept.oldest:
            if self._running:
                self._cancel_before(frames.oldest)
            self.kept.forget_before(frames.oldest)
        for frame in frames.frames:
            if type(frame) is Request:
                self._on_request(frame, len(packet))
            elif type(frame) is Cancel:
                self._on_cancel(frame.id)
            elif type(frame) is Fetch:
                self._on_fetch(frame)
            elif type(frame) is Goodbye:
                self.transport.drop(self, "its caller has left.")
                return

    def close(self, reason: str, code: str = LEFT) -> None:
        """End every handler, oldest first."""
        self.is_open = False
        for call in tuple(self._running.values()):
            self._cancel(call)
        self.kept.clear()

    # --- requests ---

    def _on_request(self, frame: Request, packet_bytes: int) -> None:
        call_id = frame.id
        kept = self.kept.get(call_id)
        if kept is not None or call_id < self.kept.oldest or call_id in self._running:
            self.transport.stats.duplicates += 1
            self._repeat(call_id, kept)
            return
        if call_id - self.kept.oldest > MAX_SPAN:  # told and not remembered
            self.queue(encode_failure(call_id, to_wire(_too_many())))
            return
        try:
            route, head = self._accept(frame)
            buffers = _memory_for(route, head, frame.buffers, self.transport.pool) if frame.buffers else ()
            reply = route.serve(head, buffers) if route.is_plain_function else None  # type: ignore[misc]
            later = reply if isinstance(reply, asyncio.Future) else None
            if later is not None or not route.is_plain_function:
                held_bytes = min(packet_bytes + _HANDLER_BYTES, self.transport.budget.max_bytes)
                call = ServedCall(call_id, head, buffers, frame.mode == _ONE_WAY, held_bytes)
                self._start(route, call, later, frame.timeout_ms)
                return
            if frame.mode == _ONE_WAY:
                release(checked_reply(reply))
                reply = None
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call_id, frame.method, error)
            return
        self._answer(call_id, frame.method, reply)

    def _accept(self, frame: Request) -> tuple[Route, Head]:
        """Find who answers a request; raises what its caller is told when nobody does."""
        transport = self.transport
        if len(self._running) >= transport.limits.max_calls:
            raise _too_many()
        route = transport.routes.find(frame.method)
        if route.serve is None:
            raise PeerRefused(
                f"{frame.method} is a channel.",
                next_step="use call() for calls, open_channel() for channels.",
            )
        sizes = [len(buffer) for buffer in frame.buffers]
        if sizes:
            transport.limits.check_sizes(sizes)
        try:
            payload = decode_payload(frame.payload, route.decoder)
        except UNREADABLE as error:
            raise PeerRefused(f"the payload of {frame.method} is not what it takes: {error}.") from error
        clock = transport.clock
        timeout_ms = frame.timeout_ms
        deadline = Deadline(clock.now_s() + timeout_ms / 1000, clock) if timeout_ms > 0 else _NEVER
        return route, Head(frame.method, payload, sizes, self.peer, deadline)

    def _repeat(self, call_id: int, kept: bytes | None) -> None:
        """Tell the caller once more how its call stands; nothing where it is of no interest to it."""
        if kept:
            self._send_whole_or_cut(call_id, kept)
        elif kept is not None:
            error = PeerBusy("its answer is kept no longer.", next_step=_LATER)
            self.queue(encode_failure(call_id, to_wire(error)))
        elif call_id in self._running:
            self.queue(encode(Working(call_id)))

    def _on_fetch(self, frame: Fetch) -> None:
        kept = self.kept.get(frame.id)
        if kept is not None and len(kept) > MAX_FRAME_BYTES:
            parts = cut(frame.id, kept)
            for index in frame.missing[:MAX_PARTS]:
                if 0 <= index < len(parts):
                    self.queue(parts[index])
        else:
            self._repeat(frame.id, kept)

    def _on_cancel(self, call_id: int) -> None:
        call = self._running.get(call_id)
        if call is not None:
            self._cancel(call)
            if self.kept.get(call_id) is None:
                self.kept.keep(call_id, b"")  # a copy of its request must not run

    # --- handlers that take their time: each ends with its caller's deadline, and frees what it held ---

    def _start(
        self, route: Route, call: ServedCall, later: asyncio.Future[Any] | None, timeout_ms: int
    ) -> None:
        """Run a handler as a task, or wait for the reply that it has promised; PeerBusy without room.

        A one-way call is answered before that.
        """
        transport = self.transport
        if later is not None:
            call.work = later
            later.add_done_callback(functools.partial(self._on_done, call))
        if not transport.budget.try_take(call.held_bytes, may_pass=True):
            call.is_over = True
            if later is not None:
                later.cancel()
            raise PeerBusy("too many calls are being served already.", next_step=_LATER)
        self._running[call.id] = call
        if timeout_ms > 0:
            call.timer = transport.loop.call_later(timeout_ms / 1000, self._expire, call)
        if later is None:
            try:
                call.work = transport.scope.start(self._run(route, call), name=call.head.method)
            except UsageError:  # closing
                self._finish(call)
                raise PeerBusy("this peer is leaving.", next_step="ask another peer.") from None
        if call.is_one_way:
            self._answer(call.id, call.head.method, None)

    async def _run(self, route: Route, call: ServedCall) -> None:
        try:
            reply = await route.serve(call.head, call.buffers)  # type: ignore[misc]
        except asyncio.CancelledError:
            # cancelled by what it waited for, or by the closing transport: its caller must not wait on
            self._end(call, _cancelled())
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._end(call, error)
        else:
            self._end(call, reply)

    def _on_done(self, call: ServedCall, later: asyncio.Future[Any]) -> None:
        error = _cancelled() if later.cancelled() else later.exception()
        if error is None or isinstance(error, Exception):
            self._end(call, error or later.result())

    def _expire(self, call: ServedCall) -> None:
        self._end(call, DeadlineExceeded("the deadline passed before the answer was ready."))
        if call.work is not None:
            call.work.cancel()

    def _end(self, call: ServedCall, outcome: Any) -> None:
        """Send what a handler returned or raised, unless nobody waits for it any more."""
        is_error = isinstance(outcome, Exception)
        if (call.is_over or call.is_one_way) and isinstance(outcome, Reply):
            release(outcome)
        if call.is_over:
            return
        self._finish(call)
        if is_error and call.is_one_way:
            self._log(call.head.method, outcome)
        elif is_error:
            self._fail(call.id, call.head.method, outcome)
        elif not call.is_one_way:
            self._answer(call.id, call.head.method, outcome)

    def _cancel_before(self, oldest: int) -> None:
        """End the handlers of calls that nobody waits for; the frame that says so may have been lost."""
        for call_id in _ids_between(self._running, self.kept.oldest, oldest):
            if not (call := self._running[call_id]).is_one_way:
                self._cancel(call)

    def _cancel(self, call: ServedCall) -> None:
        self._finish(call)
        if call.work is not None:
            call.work.cancel()

    def _finish(self, call: ServedCall) -> None:
        """Free what a call holds."""
        call.is_over = True
        self._running.pop(call.id, None)
        call.buffers = ()
        if call.timer is not None:
            call.timer.cancel()
        self.transport.budget.give_back(call.held_bytes)

    # --- answers ---

    def _answer(self, call_id: int, method: str, returned: Any) -> None:
        """Send what a handler returned, and keep it for the case that it is lost on the way."""
        reply = EMPTY_REPLY
        try:
            reply = returned if type(returned) is Reply else checked_reply(returned)
            content: Any = (5, call_id, reply.payload)
            if reply.buffers:
                views = byte_views(reply.buffers)
                content = (5, call_id, reply.payload, views)
                total_bytes = sum(map(len, views))
                if total_bytes > _MAX_ANSWER_BYTES:
                    self._keep_for_stream(call_id, method, reply, total_bytes)
                    return
            frame = encode_head(method, content, self.transport.limits.max_head_bytes)
            if len(frame) > _MAX_ANSWER_BYTES:
                self._keep_for_stream(call_id, method, reply, len(frame))
                return
        except Exception as error:  # noqa: BLE001 - what cannot be sent is told to the caller
            release(reply)
            self._fail(call_id, method, error)
            return
        if reply.on_sent is not None:
            release(reply)
        self._send_outcome(call_id, frame)

    def _keep_for_stream(self, call_id: int, method: str, reply: Reply, size_bytes: int) -> None:
        large_answers = self.transport.large_answers
        if large_answers is None:
            raise LimitExceeded(
                f"the answer of {method} takes {size_bytes:,} bytes, more than {MAX_PARTS} datagrams.",
                cause="this peer answers over datagrams alone.",
                next_step="ask for less at once, or give the peer a stream transport.",
            )
        ticket = large_answers.add(reply, size_bytes, self.peer.id, self.transport.loop)
        self._send_outcome(call_id, encode(Parked(call_id, ticket, size_bytes)))

    def _fail(self, call_id: int, method: str, error: Exception) -> None:
        self._log(method, error)
        self._send_outcome(call_id, encode_failure(call_id, to_wire(error)))

    def _log(self, method: str, error: Exception) -> None:
        if not isinstance(error, ShoalError):
            log.error("%s, called by %s, failed", method, self.peer, exc_info=error)

    def _send_outcome(self, call_id: int, frame: bytes) -> None:
        if not self.is_open or call_id < self.kept.oldest:  # its caller has left, or has given it up
            return
        self.kept.keep(call_id, frame)
        self._send_whole_or_cut(call_id, frame)

    def _send_whole_or_cut(self, call_id: int, outcome: bytes) -> None:
        if len(outcome) <= MAX_FRAME_BYTES:
            self.queue(outcome)
            return
        for part in cut(call_id, outcome):
            self.queue(part)


def _too_many() -> PeerBusy:
    return PeerBusy("too many calls of yours are open here already.", next_step=_LATER)


def _cancelled() -> PeerBusy:
    return PeerBusy("the handler was cancelled.", next_step="try again.")


def _memory_for(route: Route, head: Head, buffers: Sequence[bytes], pool: BufferPool) -> Sequence[memoryview]:
    """The same bytes where a handler wants them."""
    if route.allocate is None:
        return copy_in(pool, buffers)
    views = fitting_views(route.allocate(head), head.sizes)
    fill_all(views, buffers)
    return views


class AnswerCache:
    """The answers of one session, as long as they may be asked for again.

    Every call from the caller's oldest open one on is remembered, so that none runs twice. Within bounds, its
    answer is too: an encoded Answer, Failure or Parked frame, or nothing when it had to go.
    """

    def __init__(self, transport: DatagramTransport) -> None:
        self.oldest = 0
        """Calls before this one are of no interest to their caller."""
        self.size_bytes = 0
        self._transport = transport
        self._answers: dict[int, bytes] = {}  # the latest last

    def get(self, call_id: int) -> bytes | None:
        """A call's answer, empty if it is kept no longer; None for a call that is not known."""
        return self._answers.get(call_id)

    def keep(self, call_id: int, answer: bytes) -> None:
        """Remember that a call was served, and its answer."""
        self._answers[call_id] = answer
        self._count(ENTRY_BYTES + len(answer))
        if self.size_bytes > MAX_KEPT_BYTES:
            self.drop_answers(MAX_KEPT_BYTES * 3 // 4)
        if self._transport.kept_bytes > MAX_KEPT_BYTES_IN_ALL:
            self._transport.drop_answers()

    def drop_answers(self, to_bytes: int = 0) -> None:
        """Forget the earliest answers until so many bytes are left, but not that their calls were served."""
        for call_id, answer in self._answers.items():
            if self.size_bytes <= to_bytes:
                break
            self._answers[call_id] = b""
            self._count(-len(answer))

    def forget_before(self, oldest: int) -> None:
        """The caller waits for no earlier call: forget them all."""
        freed_bytes = 0
        for call_id in _ids_between(self._answers, self.oldest, oldest):
            freed_bytes += ENTRY_BYTES + len(self._answers.pop(call_id))
        self._count(-freed_bytes)
        self.oldest = oldest

    def clear(self) -> None:
        """The session has ended: forget everything."""
        self._count(-self.size_bytes)
        self._answers.clear()

    def _count(self, more_bytes: int) -> None:
        self.size_bytes += more_bytes
        self._transport.kept_bytes += more_bytes


def _ids_between(known: Mapping[int, Any], start: int, end: int) -> list[int]:
    """The known ids from `start` to `end`, however far apart they are; earlier ones may be among them."""
    if end - start <= len(known):
        return [call_id for call_id in range(start, end) if call_id in known]
    return [call_id for call_id in known if call_id < end]


class _LargeAnswer(NamedTuple):
    reply: Reply
    size_bytes: int
    peer_id: PeerId | None
    until_s: float


class LargeAnswers:
    """Finished answers by their tickets; `take` may be called from any thread."""

    def __init__(self, routes: Routes, source: random.Random) -> None:
        self._random = source
        self._kept: dict[bytes, _LargeAnswer] = {}  # oldest first
        self._size_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # one for all: whoever takes is on another loop
        self._lock = threading.Lock()
        routes.add(TAKE_LARGE, self.take, None, bytes)

    def add(
        self, reply: Reply, size_bytes: int, peer_id: PeerId | None, loop: asyncio.AbstractEventLoop
    ) -> bytes:
        """Keep an answer for a peer; the oldest go when there are too many, or too large ones."""
        for oldest in self._tickets():
            is_room = self._size_bytes + size_bytes <= MAX_LARGE_BYTES
            if is_room and len(self._kept) < MAX_LARGE:
                break
            self._drop(oldest)
        ticket = self._random.randbytes(_TICKET_BYTES)
        with self._lock:
            self._kept[ticket] = _LargeAnswer(reply, size_bytes, peer_id, loop.time() + LARGE_KEPT_S)
            self._size_bytes += size_bytes
        if self._timer is None:
            self._timer = loop.call_later(LARGE_KEPT_S, self._sweep, loop)
        return ticket

    def take(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """The handler of TAKE_LARGE; an answer can be taken once, by the peer that asked for it."""
        kept = self._kept.get(head.payload)
        peer_id = kept.peer_id if kept is not None else None
        is_theirs = peer_id is None or head.peer.id is None or head.peer.id == peer_id
        taken = self._remove(head.payload) if is_theirs else None
        if taken is None:
            raise PeerRefused(
                "the answer is not kept any longer.",
                cause=f"answers that fit into no datagrams are kept for {LARGE_KEPT_S:g} s, and taken once.",
                next_step="call again over a stream.",
            )
        return taken.reply

    def close(self) -> None:
        """Drops all answers that were kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in self._tickets():
            self._drop(ticket)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop what was not taken in time."""
        self._timer = None
        for ticket in self._tickets():
            kept = self._kept.get(ticket)
            if kept is not None and kept.until_s > loop.time():
                self._timer = loop.call_at(kept.until_s, self._sweep, loop)
                break
            self._drop(ticket)

    def _tickets(self) -> list[bytes]:
        with self._lock:
            return list(self._kept)

    def _drop(self, ticket: bytes) -> None:
        kept = self._remove(ticket)
        if kept is not None:
            release(kept.reply)

    def _remove(self, ticket: bytes) -> _LargeAnswer | None:
        with self._lock:
            kept = self._kept.pop(ticket, None)
            if kept is not None:
                self._size_bytes -= kept.size_bytes
        return kept
