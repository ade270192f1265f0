"""The caller's side of a connection: calls that wait for an answer."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    PeerBusy,
    ProtocolError,
    ShoalError,
)
from shoal.core.scope import settle
from shoal.transport.frames import (
    INLINE_BYTES,
    UNREADABLE,
    ErrorHead,
    GrantHead,
    Kind,
    MessageHead,
    Mode,
    decode_payload,
    from_wire,
)
from shoal.transport.limits import CallSlots
from shoal.transport.messages import Head, Into, Reply, byte_views, encode_head, memory_for

if TYPE_CHECKING:
    from shoal.transport.streams.channel import StreamChannel
    from shoal.transport.streams.connection import Connection

TIMER_S = 2.5
"""Most calls end long before their deadline: only those nearer than this get a timer of the loop."""


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

    async def notify(self, method: str, payload: Any, buffers: Sequence[Any], deadline: Deadline) -> None:
        """Send a one-way request; its place stays taken until the handler is done, which nobody waits for."""
        if not self.slots.try_take():
            await self.wait_for_slot(method, deadline)
        call = self.begin(method, payload, buffers, deadline, None, Mode.ONE_WAY)
        call.answer.add_done_callback(lambda answer: self._end_one_way(call, answer))
        if call.total_bytes <= INLINE_BYTES:
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

    def on_reply(self, call_id: int, head: MessageHead, body: memoryview) -> None:
        """An answer has come, or begins to arrive when its buffers are large."""
        call = self.pending.get(call_id)
        if call is None or call.answer.done():
            return
        connection = self._connection
        try:
            reply = Reply(decode_payload(head.payload))
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
            call.answer.set_exception(self._unusable(call, error))
            return
        connection.arrivals.receive(call_id, reply.buffers, body, functools.partial(_settle, call, reply))

    def on_error(self, call_id: int, head: ErrorHead, body: memoryview) -> None:
        """The peer says that a call failed."""
        call = self.pending.get(call_id)
        if call is None:
            return
        call.is_settled = True
        self._connection.forget(call_id)  # it may have failed in the middle of its request or answer
        if not call.answer.done():
            call.answer.set_exception(from_wire(head, self._connection.peer, call.method))

    def on_grant(self, call_id: int, head: GrantHead, body: memoryview) -> None:
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
            remaining_s = deadline.at_s - deadline.clock.now_s()
            if remaining_s <= 0:
                raise DeadlineExceeded(
                    f"{method} at {connection.peer}: the deadline had passed before it was sent."
                )
            if connection.outbox.waiting_bytes > connection.max_waiting_bytes:
                raise PeerBusy(
                    f"{method}: {connection.peer} does not read what it is sent.",
                    peer=connection.peer,
                    cause=f"{connection.outbox.waiting_bytes:,} bytes wait for it already.",
                )
            sizes = list(map(len, views))
            total_bytes = sum(sizes)
            connection.check_size_for_peer(method, total_bytes)
            timeout_ms = 0 if remaining_s == math.inf else int(remaining_s * 1000) or 1
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
        connection.outbox.send_message(Kind.REQUEST, call_id, head, views, None)
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
            self._connection.send(Kind.CANCEL, call.id)
        elif (
            call.total_bytes > INLINE_BYTES
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

    def _unusable(self, call: PendingCall, error: Exception) -> Exception:
        if isinstance(error, ShoalError) or not isinstance(error, UNREADABLE):
            return error
        return ProtocolError(
            f"The answer of {self._connection.peer} to {call.method} cannot be read: {error}."
        )


def _settle(call: PendingCall, reply: Reply) -> None:
    call.is_settled = True
    settle(call.answer, reply)
