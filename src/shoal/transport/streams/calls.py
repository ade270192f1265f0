"""The two sides of the calls on a connection: `Calling` waits for answers, `Serving` gives them.

Every way in which a call can end frees the same things: in `Calling.end` for the caller, in
`Serving._finish` for the callee.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    PeerBusy,
    PeerLeaving,
    ProtocolError,
    ShoalError,
    UsageError,
)
from shoal.core.scope import settle
from shoal.transport import frames
from shoal.transport.frames import FrameKind, Mode, encode
from shoal.transport.limits import CallSlots
from shoal.transport.messages import (
    CONNECTION_ENDED,
    EMPTY_REPLY,
    Head,
    Into,
    Reply,
    Route,
    byte_views,
    checked_reply,
    encode_head,
    memory_for,
    release,
    time_left,
    unusable_answer,
)
from shoal.transport.streams.channel import StreamChannel

if TYPE_CHECKING:
    from shoal.transport.streams.connection import Connection

log = logging.getLogger(__name__)

TIMER_S = 2.5
"""Most calls end long before their deadline: only those nearer than this get a timer of the loop."""
_LARGE_HEAD_BYTES = 4 << 10  # a payload from here on counts as bytes in flight, as buffers do
_LATER = "try again later."
_CHANNEL = int(Mode.CHANNEL)


class ConnectionRetired(Exception):
    """The peer closed the connection before it looked at this call: it may be made again on another."""


class PendingCall(msgspec.Struct, eq=False):
    """One call that has been sent and not yet answered."""

    id: int
    method: str
    views: Sequence[memoryview]
    total_bytes: int
    into: Any
    deadline: Deadline
    answer: asyncio.Future[Reply]
    timer: asyncio.TimerHandle | None = None
    is_granted: asyncio.Future[None] | None = None
    is_settled: bool = False
    """The peer has said its last word on it."""
    channel: StreamChannel | None = None


class Calling:
    """All calls that this side of a connection has open."""

    def __init__(self, connection: Connection, first_id: int) -> None:
        self._connection = connection
        self._next_id = first_id
        self.pending: dict[int, PendingCall] = {}
        self._max_message_bytes = connection.limits.max_message_bytes
        self._max_head_bytes = connection.limits.max_head_bytes
        self.slots = CallSlots(connection.loop, 0)
        """How many calls the peer takes at once; as it says in its hello."""

    async def begin_when_free(self, method: str, payload: Any, deadline: Deadline, mode: Mode) -> PendingCall:
        """Begin a call without buffers as soon as the peer takes one more."""
        if not self.slots.try_take():
            await self.wait_for_slot(method, deadline)
        return self.begin(method, payload, (), deadline, None, mode)

    async def notify(self, method: str, payload: Any, buffers: Sequence[Any], deadline: Deadline) -> None:
        """Send a one-way request; its place stays taken until the handler is done, which nobody waits for."""
        if not self.slots.try_take():
            await self.wait_for_slot(method, deadline)
        call = self.begin(method, payload, buffers, deadline, None, Mode.ONE_WAY)
        call.answer.add_done_callback(lambda answer: self._end_one_way(call, answer))
        if call.total_bytes <= frames.INLINE_BYTES:
            call.views = tuple(
                memoryview(bytes(view)) for view in call.views
            )  # in case the peer asks for them again
            return
        call.is_granted = self._connection.loop.create_future()
        try:
            await call.is_granted
        except asyncio.CancelledError:
            call.answer.cancel()
            if not call.is_granted.cancelled():
                call.is_granted.exception()  # it came in the same moment; nobody asks for it now
            raise

    def on_reply(self, call_id: int, head: frames.MessageHead, body: memoryview) -> None:
        """An answer has come, or begins to arrive when its buffers are large."""
        call = self.pending.get(call_id)
        if call is None or call.answer.done():
            return
        connection = self._connection
        try:
            reply = Reply(frames.decode_payload(head.payload))
            if (
                call.into is None
                and len(body) <= self._max_message_bytes
                and connection.arrivals.is_plain(head.sizes, body)
            ):
                reply.buffers = connection.pool.copy_in(head.sizes, body) if head.sizes else []
                _settle(call, reply)
                return
            connection.limits.check_sizes(head.sizes)
            about = Head(call.method, reply.payload, head.sizes, connection.peer, call.deadline)
            reply.buffers = memory_for(about, call.into, connection.pool)
        except Exception as error:  # noqa: BLE001 - whatever the caller's allocate raises belongs to the caller
            call.answer.set_exception(unusable_answer(error, connection.peer, call.method))
            return
        connection.arrivals.receive(call_id, reply.buffers, body, functools.partial(_settle, call, reply))

    def on_error(self, call_id: int, head: frames.ErrorHead, body: memoryview) -> None:
        """The peer says that a call failed."""
        call = self.pending.get(call_id)
        if call is None:
            return
        call.is_settled = True
        self._connection.forget(call_id)  # it may have failed in the middle of its request or answer
        if not call.answer.done():
            call.answer.set_exception(frames.from_wire(head, self._connection.peer, call.method))

    def on_grant(self, call_id: int, head: frames.GrantHead, body: memoryview) -> None:
        """The peer has room for a request's buffers."""
        call = self.pending.get(call_id)
        if call is None or call.is_settled:
            return
        if head.from_start:
            self._connection.outbox.resend(call_id, call.views)
        else:
            self._connection.outbox.grant(call_id)
        if (is_granted := call.is_granted) is not None:
            self._connection.outbox.when_sent(call_id, lambda: settle(is_granted, None))

    def retire(self, last_call_id: int) -> None:
        """The peer will answer calls up to this id and no later one."""
        for call in tuple(self.pending.values()):
            if call.id > last_call_id and not call.answer.done():
                # a channel's owner holds it already: it cannot be made again elsewhere
                is_final = call.channel is not None
                error = self._connection.error_for(call.method) if is_final else ConnectionRetired()
                call.answer.set_exception(error)
        self.slots.let_all_in()  # to find that no call can begin here

    def fail_all(self, make_error: Callable[[str], ShoalError]) -> None:
        """The connection has ended: every call fails with `make_error(method)`, oldest first."""
        for call in tuple(self.pending.values()):
            if not call.answer.done():
                call.answer.set_exception(make_error(call.method))
        self.slots.let_all_in()

    def begin(
        self, method: str, payload: Any, buffers: Sequence[Any], deadline: Deadline, into: Into, mode: Mode
    ) -> PendingCall:
        """Send a request, for which a slot was taken; whoever begins a call must `end` it."""
        connection = self._connection
        try:
            views = byte_views(buffers) if buffers else ()
            if not connection.is_usable:
                connection.raise_closed(method)
            remaining_s, timeout_ms = time_left(method, connection.peer, deadline)
            if connection.outbox.waiting_bytes > connection.max_waiting_bytes:
                raise PeerBusy(
                    f"{method}: {connection.peer} does not read what it is sent.",
                    peer=connection.peer,
                    cause=f"{connection.outbox.waiting_bytes:,} bytes wait for it already.",
                )
            sizes = list(map(len, views))
            total_bytes = sum(sizes)
            connection.check_size_for_peer(method, total_bytes)
            wire = (method, mode, timeout_ms, sizes, payload)  # a RequestHead
            head = encode_head(method, wire, self._max_head_bytes)
        except BaseException:
            self.slots.give_back()
            raise
        call_id = self._next_id
        self._next_id += 2
        answer: asyncio.Future[Reply] = connection.loop.create_future()
        call = PendingCall(call_id, method, views, total_bytes, into, deadline, answer)
        self.pending[call_id] = call
        if not connection.is_watched:
            connection.watch()
        connection.outbox.send_message(FrameKind.REQUEST, call_id, head, views, None)
        if remaining_s < TIMER_S:
            call.timer = connection.loop.call_later(remaining_s, self._expire, call)
        return call

    def arm_timers(self) -> None:
        """Set a timer for each call whose deadline is near; called about once a second."""
        for call in tuple(self.pending.values()):
            if call.timer is None and (remaining_s := call.deadline.remaining_s) < TIMER_S:
                call.timer = self._connection.loop.call_later(remaining_s, self._expire, call)

    def end(self, call: PendingCall) -> None:
        """Forget a call; one that was not answered is cancelled at the peer and frees what it held."""
        if self.pending.pop(call.id, None) is None:
            return
        if call.channel is not None:
            self._connection.channels.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.is_settled:
            self._connection.forget(call.id)
            self._connection.send(FrameKind.CANCEL, call.id)
        elif (
            call.total_bytes > frames.INLINE_BYTES
        ):  # the peer may have answered without having asked for all of them
            self._connection.forget(call.id)
        if not call.answer.cancel() and not call.answer.cancelled():
            call.answer.exception()  # a channel's owner may not have asked for it
        self.slots.give_back()
        if not self.pending:
            self._connection.rest()

    def _end_one_way(self, call: PendingCall, answer: asyncio.Future[Reply]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if call.is_granted is not None and not call.is_granted.done():
            if error is None:
                call.is_granted.set_result(None)
            else:
                call.is_granted.set_exception(error)
        self.end(call)

    def _expire(self, call: PendingCall) -> None:
        if not call.answer.done():
            call.answer.set_exception(
                DeadlineExceeded(
                    f"{call.method} at {self._connection.peer} was not answered before its deadline.",
                    cause=self._connection.describe_wait(call.id),
                )
            )

    async def wait_for_slot(self, method: str, deadline: Deadline) -> None:
        """Wait until the peer takes one more call."""
        if not await self.slots.take(deadline):
            raise DeadlineExceeded(
                f"{method} at {self._connection.peer} could not be sent before its deadline.",
                cause=f"{len(self.pending)} calls to this peer are open already.",
            )


def _settle(call: PendingCall, reply: Reply) -> None:
    call.is_settled = True
    settle(call.answer, reply)


# --- the callee's side ---


class ServedCall(msgspec.Struct, eq=False):
    """One call of the peer's, from its request's head to its answer's last byte."""

    id: int
    route: Route
    head: Head
    mode: int
    buffers: Sequence[memoryview] = ()
    held_bytes: int = 0
    """What it has taken from the budget."""
    wanted_bytes: int = 0
    """What it stands in line for."""
    is_over: bool = False
    work: asyncio.Future[Any] | None = None
    """What answers it: a task, or a future that a plain function has returned."""
    timer: asyncio.TimerHandle | None = None
    channel: StreamChannel | None = None
    final: asyncio.Future[Reply] | None = None


class Serving:
    """All calls that the peer has open on this connection."""

    def __init__(self, connection: Connection, first_id: int) -> None:
        self._connection = connection
        self._clock = connection.shard.clock
        self.calls: dict[int, ServedCall] = {}
        self._parity = first_id % 2
        self._max_calls = connection.limits.max_calls
        self._max_message_bytes = connection.limits.max_message_bytes
        self._max_head_bytes = connection.limits.max_head_bytes
        self._max_waiting_bytes = connection.max_waiting_bytes // 2  # beyond it requests are refused
        self.last_call_id = 0

    def on_request(self, call_id: int, wire: frames.RequestHead, body: memoryview) -> None:
        """A request has come, or begins to arrive when its buffers are large."""
        if call_id <= self.last_call_id or call_id % 2 != self._parity:
            raise ProtocolError(f"A request came with the call id {call_id}, which is not the next one.")
        self.last_call_id = call_id
        connection = self._connection
        sizes = wire.sizes
        try:
            if (
                len(self.calls) >= self._max_calls
                or connection.outbox.waiting_bytes > self._max_waiting_bytes
                or not connection.is_usable
            ):
                self._refuse()
            total_bytes = 0
            if sizes:
                total_bytes = sum(sizes)
                if len(sizes) > 1 or not 0 <= total_bytes <= self._max_message_bytes:
                    connection.limits.check_sizes(sizes)
                if wire.mode == _CHANNEL:
                    raise ProtocolError("A channel's request came with buffers; they belong into items.")
            route, head = connection.routes.accept(wire, sizes, connection.peer, self._clock)
        except ShoalError as error:
            self._send_error(call_id, error)
            return
        if route.is_plain_function and len(body) == total_bytes:
            self._serve_at_once(call_id, route, head, body)
            return
        payload_bytes = len(memoryview(wire.payload))
        if payload_bytes <= _LARGE_HEAD_BYTES:
            payload_bytes = 0
        elif not connection.budget.try_take(payload_bytes, may_pass=True):
            self._send_error(call_id, PeerBusy("too many large payloads are here already.", next_step=_LATER))
            return
        call = self._open(call_id, route, head, wire.mode)
        call.held_bytes = payload_bytes
        if call.channel is not None:
            window_bytes = route.window_bytes or connection.limits.channel_window_bytes
            self._admit(call, min(window_bytes, connection.budget.max_bytes), body)
        elif total_bytes:
            self._admit(call, total_bytes, body)
        elif not sizes or self._allocate(call):  # buffers may be empty and yet be there
            connection.arrivals.receive(call_id, call.buffers, body, functools.partial(self._start, call))

    def on_cancel(self, call_id: int, head: None, body: memoryview) -> None:
        """The caller no longer wants the answer."""
        call = self.calls.get(call_id)
        if call is not None:
            self._abandon(call)

    def reserve(self, call_id: int, size_bytes: int) -> bool:
        """Room for an item that is larger than its channel's window; ends the channel when there is none."""
        call = self.calls.get(call_id)
        if call is None:  # this side is the caller: what it asked for is its own affair
            return True
        more_bytes = max(0, size_bytes - call.held_bytes)
        if more_bytes and not self._connection.budget.try_take(more_bytes):
            self.give_up(call_id, PeerBusy("there is no room for an item so large.", next_step=_LATER))
            return False
        call.held_bytes += more_bytes
        return True

    def give_up(self, call_id: int, error: ShoalError) -> None:
        """End a call from this side and tell the caller why."""
        call = self.calls.get(call_id)
        if call is not None:
            self._send_error(call_id, error)
            self._abandon(call)

    def abandon_all(self) -> None:
        """The connection has ended: end every handler, oldest first."""
        for call in tuple(self.calls.values()):
            self._abandon(call, CONNECTION_ENDED)

    def _refuse(self) -> NoReturn:
        """Raise why this connection takes no request now."""
        connection = self._connection
        if len(self.calls) >= self._max_calls:
            raise PeerBusy(
                f"{len(self.calls)} calls of yours are open here already.",
                next_step="wait for answers, then try again.",
            )
        if connection.outbox.waiting_bytes > self._max_waiting_bytes:
            raise PeerBusy("earlier answers have not been read.", next_step="read them, then try again.")
        raise PeerLeaving("this peer is leaving.", next_step="ask another peer.")

    def _serve_at_once(self, call_id: int, route: Route, head: Head, body: memoryview) -> None:
        """A plain function whose buffers are here: done before the next frame is looked at."""
        try:
            connection = self._connection
            sizes = head.sizes
            allocate = None if route.is_allocating_late else route.allocate
            if not sizes:
                buffers: Sequence[memoryview] = ()
            elif allocate is None and connection.arrivals.is_plain(sizes, body):
                buffers = connection.pool.copy_in(sizes, body)
            else:
                buffers = memory_for(head, allocate, connection.pool)
                connection.arrivals.receive(call_id, buffers, body, _nothing)
            reply = route.serve(head, buffers)  # type: ignore[misc]
            if isinstance(reply, asyncio.Future):
                call = self._open(call_id, route, head, Mode.CALL)
                call.buffers = buffers
                self._await_reply(call, reply)
                if connection.budget.try_take(head.total_bytes, may_pass=True):
                    call.held_bytes = head.total_bytes
                else:
                    reply.cancel()
                return
            if type(reply) is not Reply:
                reply = checked_reply(reply)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._tell_failure(call_id, head, error)
            return
        try:
            on_sent = None if reply.on_sent is None else functools.partial(release, reply)
            self._send_reply(call_id, head, reply, on_sent)
        except UsageError as error:
            release(reply)
            self._tell_failure(call_id, head, error)

    def _open(self, call_id: int, route: Route, head: Head, mode: int) -> ServedCall:
        """Keep a call until it is answered."""
        connection = self._connection
        call = ServedCall(call_id, route, head, mode)
        if mode == _CHANNEL:  # the caller may send its window before this side has room to begin
            call.final = connection.loop.create_future()
            call.channel = connection.channels[call_id] = StreamChannel(
                connection, call_id, call.final, route.window_bytes
            )
        self.calls[call_id] = call
        if (remaining_s := head.deadline.remaining_s) < TIMER_S:
            call.timer = connection.loop.call_later(remaining_s, self._expire, call)
        return call

    def arm_timers(self) -> None:
        """Set a timer for each call whose deadline is near; called about once a second."""
        for call in tuple(self.calls.values()):
            if call.timer is None and (remaining_s := call.head.deadline.remaining_s) < TIMER_S:
                call.timer = self._connection.loop.call_later(remaining_s, self._expire, call)

    def _admit(self, call: ServedCall, total_bytes: int, body: memoryview) -> None:
        """Find room for a call's buffers, now or later."""
        connection = self._connection
        if connection.budget.try_take(total_bytes, may_pass=len(body) > 0):
            call.held_bytes += total_bytes
        else:
            call.wanted_bytes = total_bytes
            connection.budget.join_queue(call, total_bytes, functools.partial(self._wake, call))
        if call.mode == _CHANNEL:
            if not call.wanted_bytes:
                self._start(call)
        elif call.wanted_bytes:
            connection.arrivals.receive_later(call.id, total_bytes, functools.partial(self._start, call))
        elif self._allocate(call):
            if not len(body) and (total_bytes > frames.EAGER_BYTES or call.mode == Mode.ONE_WAY):
                connection.send(FrameKind.GRANT, call.id, encode(frames.GrantHead(from_start=False)))
            connection.arrivals.receive(call.id, call.buffers, body, functools.partial(self._start, call))

    def _wake(self, call: ServedCall) -> None:
        """Called on whatever thread gave bytes back."""
        try:
            self._connection.loop.call_soon_threadsafe(self._on_room, call)
        except RuntimeError:  # its loop was closed: nobody is left to use them
            self._connection.budget.give_back(call.wanted_bytes)

    def _on_room(self, call: ServedCall) -> None:
        """The budget has room for a call that stood in line."""
        if call.is_over:
            return
        call.held_bytes += call.wanted_bytes
        call.wanted_bytes = 0
        if call.mode == _CHANNEL:
            self._start(call)
        elif self._allocate(call):
            self._connection.arrivals.make_room(call.id, call.buffers)
            self._connection.send(FrameKind.GRANT, call.id, encode(frames.GrantHead(from_start=True)))

    def _allocate(self, call: ServedCall) -> bool:
        try:
            call.buffers = memory_for(call.head, call.route.allocate, self._connection.pool)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call, error)
            return False
        return True

    def _start(self, call: ServedCall) -> None:
        """Everything has arrived: run the handler."""
        if call.is_over:
            return
        if call.route.is_plain_function:
            try:
                reply = cast("Any", call.route.serve)(call.head, call.buffers)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
                self._fail(call, error)
                return
            if isinstance(reply, asyncio.Future):
                self._await_reply(call, reply)
            else:
                self._answer(call, reply)
            return
        try:
            call.work = self._connection.scope.start(self._run(call), name=call.head.method)
        except UsageError:  # the transport is closing
            self._fail(call, PeerLeaving("this peer is leaving.", next_step="ask another peer."))

    def _await_reply(self, call: ServedCall, later: asyncio.Future[Reply | None]) -> None:
        call.work = later
        later.add_done_callback(functools.partial(self._on_reply, call))

    def _on_reply(self, call: ServedCall, later: asyncio.Future[Reply | None]) -> None:
        if later.cancelled():
            self._fail(call, PeerBusy("the handler was cancelled.", next_step="try again."))
        elif (error := later.exception()) is None:
            self._answer(call, later.result())
        elif isinstance(error, Exception):
            self._fail(call, error)

    async def _run(self, call: ServedCall) -> None:
        try:
            reply = await self._work_of(call)
        except asyncio.CancelledError:
            if call.is_over:
                return
            # cancelled by what it waited for, or by the closing transport: its caller must not wait on
            self._fail(call, PeerBusy("the handler was cancelled.", next_step="try again."))
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call, error)
        else:
            self._answer(call, reply)

    def _work_of(self, call: ServedCall) -> Awaitable[Reply | None]:
        route = call.route
        if route.serve_channel is not None and call.channel is not None:
            call.channel.open_window()
            return route.serve_channel(call.head, call.channel)
        return cast("Awaitable[Reply | None]", cast("Any", route.serve)(call.head, call.buffers))

    def _answer(self, call: ServedCall, returned: Reply | None) -> None:
        try:
            reply = checked_reply(returned)
        except TypeError as error:
            self._fail(call, error)
            return
        if call.is_over:
            release(reply)
            return
        try:
            if call.channel is not None:
                call.channel.check_whole()
            self._send_reply(call.id, call.head, reply, functools.partial(self._finish, call, reply))
        except UsageError as error:
            release(reply)
            self._fail(call, error)

    def _send_reply(self, call_id: int, head: Head, reply: Reply, on_sent: Callable[[], None] | None) -> None:
        """UsageError, and nothing sent, when a handler returned what cannot be sent."""
        views = byte_views(reply.buffers) if reply.buffers else ()
        answer = (list(map(len, views)), reply.payload)  # a MessageHead
        wire = encode_head(head.method, answer, self._max_head_bytes)
        self._connection.outbox.send_message(FrameKind.REPLY, call_id, wire, views, on_sent)

    def _fail(self, call: ServedCall, error: Exception) -> None:
        if call.is_over:
            return
        self._tell_failure(call.id, call.head, error)
        self._connection.forget(call.id)
        self._finish(call, EMPTY_REPLY)

    def _tell_failure(self, call_id: int, head: Head, error: Exception) -> None:
        if not isinstance(error, ShoalError):
            log.error("%s, called by %s, failed", head.method, head.peer, exc_info=error)
        self._send_error(call_id, error)

    def _send_error(self, call_id: int, error: Exception) -> None:
        self._connection.send(FrameKind.ERROR, call_id, encode(frames.to_wire(error)))

    def _expire(self, call: ServedCall) -> None:
        self.give_up(call.id, DeadlineExceeded("the deadline passed before the answer was ready."))

    def _abandon(self, call: ServedCall, why: str | None = None) -> None:
        """Drop a call in whatever state it is; its handler's CancelledError says why."""
        self._finish(call, EMPTY_REPLY)
        self._connection.forget(call.id)
        if call.work is not None:
            call.work.cancel(why)

    def _finish(self, call: ServedCall, reply: Reply) -> None:
        """Free what a call holds, once."""
        release(reply)
        if call.is_over:
            return
        call.is_over = True
        self.calls.pop(call.id, None)
        if call.channel is not None:
            self._connection.channels.pop(call.id, None)
        if call.timer is not None:
            call.timer.cancel()
        if call.final is not None and not call.final.done():
            call.final.cancel()
        call.buffers = ()
        if call.wanted_bytes and not self._connection.budget.leave_queue(call):  # granted in this very moment
            call.held_bytes += call.wanted_bytes
        if call.held_bytes:
            self._connection.budget.give_back(call.held_bytes)


def _nothing() -> None:
    """For buffers that are complete already."""
