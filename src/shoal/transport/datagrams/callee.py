"""The callee's side of datagrams: a request is served once, and its answer kept while it may be asked for.

A caller tells with every packet which of its calls is the oldest still open; answers to earlier ones are
forgotten. A request that comes again while its handler runs is answered with 'working', one whose answer is
kept with that answer. No handler runs for an address that has not proven itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
from collections.abc import Callable, Sequence
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
from shoal.transport.datagrams.sessions import Session, peer_at
from shoal.transport.datagrams.wire import (
    LEFT,
    MAX_FRAME_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Cancel,
    Fetch,
    Goodbye,
    Proof,
    Request,
    SocketAddress,
    cut,
    encode_failure,
)
from shoal.transport.errors import to_wire
from shoal.transport.frames import UNREADABLE, Mode, decode_payload, encode
from shoal.transport.limits import MIB
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Head, Reply
from shoal.transport.payloads import (
    EMPTY_REPLY,
    byte_views,
    checked_reply,
    encode_head,
    fitting_views,
    release,
)
from shoal.transport.routes import Route, Routes

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = MAX_PARTS * PART_BYTES
_HANDLER_BYTES = 4096  # what a handler that runs takes beside its packet, about
_ONE_WAY = int(Mode.ONE_WAY)
_NEVER = Deadline.never()


class CalleeSession(Session):
    """A session that the other side has begun, to ask."""

    transport: DatagramTransport

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
        self._handlers = Handlers(transport, self._on_reply, self._on_error)

    @property
    def num_open(self) -> int:
        """Handlers that run."""
        return len(self._handlers)

    @property
    def is_settled(self) -> bool:
        """Whether both sides know each other, and where."""
        return self.is_proven and self.is_open

    def receive(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """Requests have come."""
        frames = self.read(packet, where)
        if frames is None:
            return
        if where != self.where or not self.is_proven:
            first = frames.frames[0] if frames.frames else None
            token = first.token if type(first) is Proof else b""
            if not self.transport.prove(self, packet, where, socket, token):
                return
            self.is_proven, self.where, self.socket = True, where, socket
            self.peer = Peer(peer_at(where).address, self.peer.id)
        self.used_at_s = self.transport.loop.time()
        if frames.oldest > self.kept.oldest:
            for call_id in self.kept.forget_before(frames.oldest):
                self._handlers.cancel(call_id)
        for frame in frames.frames:
            if type(frame) is Request:
                self._on_request(frame, len(packet))
            elif type(frame) is Cancel:
                self._on_cancel(frame.id)
            elif type(frame) is Fetch:
                self._on_fetch(frame)
            elif type(frame) is Goodbye:
                self.transport.on_left(self)
                return

    def close(self, reason: str, code: str = LEFT) -> None:
        """End every handler, oldest first."""
        self.is_open = False
        self._handlers.cancel_all()
        self.kept.clear()

    # --- requests ---

    def _on_request(self, frame: Request, packet_bytes: int) -> None:
        call_id = frame.id
        kept = self.kept.get(call_id)
        if kept is not NEW or call_id < self.kept.oldest:
            self.transport.stats.duplicates += 1
            if kept is not NEW:
                self._repeat(call_id, kept)
            return
        if call_id - self.kept.oldest > MAX_SPAN:  # told and not remembered
            self.queue(encode_failure(call_id, to_wire(_too_many())))
            return
        try:
            route, head = self._accept(frame)
            buffers = memory_for(route, head, frame.buffers, self.transport.pool) if frame.buffers else ()
            reply = route.serve(head, buffers) if route.is_plain_function else None  # type: ignore[misc]
            later = reply if isinstance(reply, asyncio.Future) else None
            if later is not None or not route.is_plain_function:
                held_bytes = min(packet_bytes + _HANDLER_BYTES, self.transport.budget.max_bytes)
                call = ServedCall(call_id, head, buffers, frame.mode == _ONE_WAY, held_bytes)
                self._start(route, frame, call, later)
                return
            if frame.mode == _ONE_WAY:
                release(checked_reply(reply))
                reply = None
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call_id, frame.method, error)
            return
        self._answer(call_id, frame.method, reply)

    def _repeat(self, call_id: int, kept: Kept) -> None:
        if type(kept) is bytes:
            self.queue(kept)
        elif type(kept) is list:
            for part in kept:
                self.queue(part)
        elif kept is RUNNING:
            self.queue(encode((8, call_id)))
        else:
            error = PeerBusy("its answer is kept no longer.", next_step=LATER)
            self.queue(encode_failure(call_id, to_wire(error)))

    def _on_fetch(self, frame: Fetch) -> None:
        kept = self.kept.get(frame.id)
        if type(kept) is list:
            for index in frame.missing[:MAX_PARTS]:
                if 0 <= index < len(kept):
                    self.queue(kept[index])
        elif kept is not NEW:
            self._repeat(frame.id, kept)

    def _on_cancel(self, call_id: int) -> None:
        self._handlers.cancel(call_id)
        if self.kept.get(call_id) is RUNNING:
            self.kept.mark(call_id, FORGOTTEN)

    def _accept(self, frame: Request) -> tuple[Route, Head]:
        """Find who answers a request; raises what its caller is told when nobody does."""
        transport = self.transport
        if len(self._handlers) >= transport.limits.max_calls:
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

    def _start(
        self, route: Route, frame: Request, call: ServedCall, later: asyncio.Future[Any] | None
    ) -> None:
        """Run a handler that may wait, or await its reply; a one-way call is answered before that."""
        timeout_s = frame.timeout_ms / 1000 if frame.timeout_ms > 0 else None
        if later is None:
            self._handlers.start(route, call, timeout_s)
        else:
            self._handlers.wait_for(later, call, timeout_s)
        if call.is_one_way:
            self._answer(call.id, frame.method, None)
        else:
            self.kept.mark(call.id, RUNNING)

    def _on_reply(self, call: ServedCall, returned: Any) -> None:
        if not call.is_one_way:
            self._answer(call.id, call.head.method, returned)
        elif isinstance(returned, Reply):
            release(returned)

    def _on_error(self, call: ServedCall, error: Exception) -> None:
        if call.is_one_way:
            self._log(call.head.method, error)
        else:
            self._fail(call.id, call.head.method, error)

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
                    self._park(call_id, method, reply, total_bytes)
                    return
            frame = encode_head(method, content, self.transport.limits.max_head_bytes)
            if len(frame) > _MAX_ANSWER_BYTES:
                self._park(call_id, method, reply, len(frame))
                return
        except Exception as error:  # noqa: BLE001 - what cannot be sent is told to the caller
            release(reply)
            self._fail(call_id, method, error)
            return
        if reply.on_sent is not None:
            release(reply)
        self._send_outcome(call_id, frame)

    def _park(self, call_id: int, method: str, reply: Reply, size_bytes: int) -> None:
        parking = self.transport.parking
        if parking is None:
            raise LimitExceeded(
                f"the answer of {method} takes {size_bytes:,} bytes, more than {MAX_PARTS} datagrams.",
                cause="this peer answers over datagrams alone.",
                next_step="ask for less at once, or give the peer a stream transport.",
            )
        ticket = parking.park(reply, size_bytes, self.peer.id, self.transport.loop)
        self._send_outcome(call_id, encode((9, call_id, ticket, size_bytes)))

    def _fail(self, call_id: int, method: str, error: Exception) -> None:
        self._log(method, error)
        self._send_outcome(call_id, encode_failure(call_id, to_wire(error)))

    def _log(self, method: str, error: Exception) -> None:
        if not isinstance(error, ShoalError):
            log.error("%s, called by %s, failed", method, self.peer, exc_info=error)

    def _send_outcome(self, call_id: int, frame: bytes) -> None:
        if not self.is_open or call_id < self.kept.oldest:  # its caller has left, or has given it up
            return
        if len(frame) <= MAX_FRAME_BYTES:
            self.kept.keep(call_id, frame, len(frame))
            self.queue(frame)
            return
        parts = cut(call_id, frame)
        self.kept.keep(call_id, parts, len(frame))
        for part in parts:
            self.queue(part)


def _too_many() -> PeerBusy:
    return PeerBusy("too many calls of yours are open here already.", next_step=LATER)


LATER = "try again later."


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


class Handlers:
    """The handlers that run for one session; each ends in `on_reply` or `on_error`, unless cancelled."""

    def __init__(
        self,
        transport: DatagramTransport,
        on_reply: Callable[[ServedCall, Any], None],
        on_error: Callable[[ServedCall, Exception], None],
    ) -> None:
        self._transport = transport
        self._on_reply = on_reply
        self._on_error = on_error
        self._running: dict[int, ServedCall] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, route: Route, call: ServedCall, timeout_s: float | None) -> None:
        """Run a handler as a task; PeerBusy when there is no room for it."""
        self._open(call, timeout_s)
        try:
            call.work = self._transport.scope.start(self._run(route, call), name=call.head.method)
        except UsageError:  # closing
            self._finish(call)
            raise PeerBusy("this peer is leaving.", next_step="ask another peer.") from None

    def wait_for(self, later: asyncio.Future[Any], call: ServedCall, timeout_s: float | None) -> None:
        """Wait for the reply of a handler that has begun; PeerBusy, and it is cancelled, without room."""
        call.work = later
        later.add_done_callback(functools.partial(self._on_done, call))
        try:
            self._open(call, timeout_s)
        except PeerBusy:
            call.is_over = True
            later.cancel()
            raise

    def _open(self, call: ServedCall, timeout_s: float | None) -> None:
        if not self._transport.budget.try_take(call.held_bytes, may_pass=True):
            raise PeerBusy("too many calls are being served already.", next_step=LATER)
        self._running[call.id] = call
        if timeout_s is not None:
            call.timer = self._transport.loop.call_later(timeout_s, self._expire, call)

    def cancel(self, call_id: int) -> None:
        """The caller of this one wants no answer, if it still runs."""
        call = self._running.get(call_id)
        if call is not None:
            self._finish(call)
            if call.work is not None:
                call.work.cancel()

    def cancel_all(self) -> None:
        """End all, oldest first."""
        for call_id in tuple(self._running):
            self.cancel(call_id)

    async def _run(self, route: Route, call: ServedCall) -> None:
        try:
            reply = await route.serve(call.head, call.buffers)  # type: ignore[misc]
        except asyncio.CancelledError:
            if not call.is_over:
                # cancelled by what it waited for, or by the closing transport: its caller must not wait on
                self._fail(call, _cancelled())
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call, error)
        else:
            self._end(call, reply)

    def _on_done(self, call: ServedCall, later: asyncio.Future[Any]) -> None:
        if later.cancelled():
            self._fail(call, _cancelled())
        elif (error := later.exception()) is None:
            self._end(call, later.result())
        elif isinstance(error, Exception):
            self._fail(call, error)

    def _end(self, call: ServedCall, reply: Any) -> None:
        if not call.is_over:
            self._finish(call)
            self._on_reply(call, reply)
        elif isinstance(reply, Reply):
            release(reply)

    def _expire(self, call: ServedCall) -> None:
        if not call.is_over:
            self._fail(call, DeadlineExceeded("the deadline passed before the answer was ready."))
            if call.work is not None:
                call.work.cancel()

    def _fail(self, call: ServedCall, error: Exception) -> None:
        if not call.is_over:
            self._finish(call)
            self._on_error(call, error)

    def _finish(self, call: ServedCall) -> None:
        """Free what a call holds."""
        call.is_over = True
        self._running.pop(call.id, None)
        call.buffers = ()
        if call.timer is not None:
            call.timer.cancel()
        self._transport.budget.give_back(call.held_bytes)


def _cancelled() -> PeerBusy:
    return PeerBusy("the handler was cancelled.", next_step="try again.")


MAX_KEPT = 1024
"""Answers that are kept for one session."""
MAX_KEPT_BYTES = 1 << 20
"""Bytes that one session takes."""
MAX_KEPT_BYTES_IN_ALL = 64 << 20
"""Bytes that all sessions take."""
MAX_SPAN = 2560
"""Ids from a caller's oldest open call to its newest; a caller that keeps to its own bound has fewer."""
ENTRY_BYTES = 200
"""What remembering a call takes beside its answer."""

NEW: Any = object()
"""A call that was never seen."""
RUNNING: Any = object()
"""A call whose handler runs."""
FORGOTTEN: Any = None
"""A call that has been served; its answer is not kept."""

Kept = Any
"""One of the above, an encoded frame, or a list of frames with the parts of an answer."""


class AnswerCache:
    """The memory of one session."""

    def __init__(self, transport: DatagramTransport) -> None:
        self.oldest = 0
        """Calls before this one are of no interest to their caller."""
        self.size_bytes = 0
        self._transport = transport
        self._calls: dict[int, Kept] = {}
        self._sizes: dict[int, int] = {}  # of the answers that are kept, oldest first

    def get(self, call_id: int) -> Kept:
        """What is known of a call."""
        return self._calls.get(call_id, NEW)

    def mark(self, call_id: int, state: Kept) -> None:
        """Remember a call without an answer: RUNNING or FORGOTTEN."""
        size_bytes = self._sizes.pop(call_id, 0)
        if call_id not in self._calls:
            size_bytes -= ENTRY_BYTES
        self._calls[call_id] = state
        self._count(-size_bytes)
        if self._transport.kept_bytes > MAX_KEPT_BYTES_IN_ALL:
            self._transport.shed()

    def keep(self, call_id: int, answer: bytes | list[bytes], size_bytes: int) -> None:
        """Remember a call's answer."""
        sizes = self._sizes
        self._count(size_bytes if call_id in self._calls else size_bytes + ENTRY_BYTES)
        self._calls[call_id] = answer
        sizes[call_id] = size_bytes
        while len(sizes) > MAX_KEPT or (self.size_bytes > MAX_KEPT_BYTES and sizes):
            self._forget_answer()
        if self._transport.kept_bytes > MAX_KEPT_BYTES_IN_ALL:
            self._transport.shed()

    def forget_before(self, oldest: int) -> Sequence[int]:
        """The caller waits for no earlier call: forget them all. Those that still run are returned."""
        calls = self._calls
        if oldest - self.oldest <= len(calls):
            ids: Sequence[int] = range(self.oldest, oldest)
        else:
            ids = [call_id for call_id in calls if call_id < oldest]
        self.oldest = oldest
        running = []
        sizes, freed_bytes = self._sizes, 0
        for call_id in ids:
            state = calls.pop(call_id, NEW)
            if state is not NEW:
                freed_bytes += sizes.pop(call_id, 0) + ENTRY_BYTES
                if state is RUNNING:
                    running.append(call_id)
        self._count(-freed_bytes)
        return running

    def shed(self) -> None:
        """Forget all answers, but not that the calls were served."""
        for call_id in self._sizes:
            self._calls[call_id] = FORGOTTEN
        self._count(-sum(self._sizes.values()))
        self._sizes.clear()

    def clear(self) -> None:
        """The session has ended: forget everything."""
        self._count(-self.size_bytes)
        self._calls.clear()
        self._sizes.clear()

    def _forget_answer(self) -> None:
        call_id = next(iter(self._sizes))
        self._calls[call_id] = FORGOTTEN
        self._count(-self._sizes.pop(call_id))

    def _count(self, more_bytes: int) -> None:
        self.size_bytes += more_bytes
        self._transport.kept_bytes += more_bytes


PARKED = "shoal.parked"
"""The method over which an answer is taken."""
KEPT_S = 10.0
MAX_PARKED = 256
MAX_PARKED_BYTES = 256 * MIB
_TICKET_BYTES = 16


class _Parked(NamedTuple):
    reply: Reply
    size_bytes: int
    peer_id: PeerId | None
    until_s: float


class Parking:
    """Finished answers by their tickets; `take` may be called from any thread."""

    def __init__(self, routes: Routes, source: random.Random) -> None:
        self._random = source
        self._parked: dict[bytes, _Parked] = {}  # oldest first
        self._size_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # one for all: whoever takes is on another loop
        self._lock = threading.Lock()
        routes.add(PARKED, self.take, None, bytes)

    def park(
        self, reply: Reply, size_bytes: int, peer_id: PeerId | None, loop: asyncio.AbstractEventLoop
    ) -> bytes:
        """Keep an answer for a peer; the oldest go when there are too many, or too large ones."""
        for oldest in self._tickets():
            is_room = self._size_bytes + size_bytes <= MAX_PARKED_BYTES
            if is_room and len(self._parked) < MAX_PARKED:
                break
            self._drop(oldest)
        ticket = self._random.randbytes(_TICKET_BYTES)
        with self._lock:
            self._parked[ticket] = _Parked(reply, size_bytes, peer_id, loop.time() + KEPT_S)
            self._size_bytes += size_bytes
        if self._timer is None:
            self._timer = loop.call_later(KEPT_S, self._sweep, loop)
        return ticket

    def take(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """The handler of PARKED; an answer can be taken once, by the peer that asked for it."""
        parked = self._parked.get(head.payload)
        peer_id = parked.peer_id if parked is not None else None
        is_theirs = peer_id is None or head.peer.id is None or head.peer.id == peer_id
        taken = self._remove(head.payload) if is_theirs else None
        if taken is None:
            raise PeerRefused(
                "the answer is not kept any longer.",
                cause=f"answers that do not fit into datagrams are kept for {KEPT_S:g} s, and taken once.",
                next_step="call again over a stream.",
            )
        return taken.reply

    def close(self) -> None:
        """Drop everything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in self._tickets():
            self._drop(ticket)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop what was not taken in time."""
        self._timer = None
        for ticket in self._tickets():
            parked = self._parked.get(ticket)
            if parked is not None and parked.until_s > loop.time():
                self._timer = loop.call_at(parked.until_s, self._sweep, loop)
                break
            self._drop(ticket)

    def _tickets(self) -> list[bytes]:
        with self._lock:
            return list(self._parked)

    def _drop(self, ticket: bytes) -> None:
        parked = self._remove(ticket)
        if parked is not None:
            release(parked.reply)

    def _remove(self, ticket: bytes) -> _Parked | None:
        with self._lock:
            parked = self._parked.pop(ticket, None)
            if parked is not None:
                self._size_bytes -= parked.size_bytes
        return parked


def copy_in(pool: BufferPool, buffers: Sequence[bytes]) -> list[memoryview]:
    """The same bytes in aligned memory."""
    if len(buffers) == 1:
        return pool.copy_in([len(buffers[0])], memoryview(buffers[0]))
    views = pool.allocate_all([len(buffer) for buffer in buffers])
    fill_all(views, buffers)
    return views


def memory_for(route: Route, head: Head, buffers: Sequence[bytes], pool: BufferPool) -> Sequence[memoryview]:
    """The same bytes where a handler wants them."""
    if route.allocate is None:
        return copy_in(pool, buffers)
    views = fitting_views(route.allocate(head), head.sizes)
    fill_all(views, buffers)
    return views


def fill_all(views: Sequence[memoryview], buffers: Sequence[bytes]) -> None:
    """Copy each buffer to its place."""
    for view, buffer in zip(views, buffers, strict=True):
        view[:] = buffer
