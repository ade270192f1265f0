"""The callee's side of datagrams: a request is served, and its answer sent in one packet or a few.

Requests are idempotent. One that comes again while its handler runs is answered with 'working'; one that
comes again later, because its answer or a part of it was lost, is served again. An answer that does not fit
into a few packets is replaced by 'too large', and its caller asks again over a stream. A caller tells with
every packet which of its calls is the oldest still open: handlers of earlier ones are cancelled. No handler
runs for an address that has not proven itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core import DeadlineExceeded, LimitExceeded, Peer, PeerBusy, ShoalError, UsageError
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.sessions import Session, peer_at
from shoal.transport.datagrams.wire import SocketAddress
from shoal.transport.frames import Mode, encode, to_wire
from shoal.transport.messages import (
    EMPTY_REPLY,
    Head,
    Reply,
    Route,
    byte_views,
    checked_reply,
    encode_head,
    received,
    release,
)

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = wire.MAX_PARTS * wire.PART_BYTES
_HANDLER_BYTES = 4096  # what a handler that runs takes beside its packet, about
_ONE_WAY = int(Mode.ONE_WAY)
_LATER = "try again later."


class ServedDatagram(msgspec.Struct, eq=False):
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
        self, transport: DatagramTransport, socket: DatagramSocket, peer: Peer, where: SocketAddress
    ) -> None:
        super().__init__(transport, socket, peer, where)
        self.is_proven = False
        """Whether the caller has shown that it receives where its packets come from."""
        self.hello_nonce = b""
        self._oldest_open = 0
        """Calls before this one are of no interest to their caller."""

    @property
    def is_established(self) -> bool:
        """Whether both sides know each other, and where."""
        return self.is_proven and self.is_open

    def receive(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """Takes a packet of requests from the caller."""
        frames = self.read(packet, where)
        if frames is None:
            return
        if where != self.where or not self.is_proven:
            first = frames.frames[0] if frames.frames else None
            token = first.token if type(first) is wire.Proof else b""
            if not self.transport.handshakes.prove(self, packet, where, socket, token):
                return
            self.is_proven, self.where, self.socket = True, where, socket
            self.peer = Peer(peer_at(where).address, self.peer.id)
        self.used_at_s = self.transport.loop.time()
        if frames.oldest > self._oldest_open:
            self._oldest_open = frames.oldest
            for call in tuple(self.calls.values()):  # nobody waits for it; the frame that says so was lost
                if call.id < frames.oldest and not call.is_one_way:
                    self._cancel(call)
        for frame in frames.frames:
            if type(frame) is wire.Request:
                self._on_request(frame, len(packet))
            elif type(frame) is wire.Cancel:
                if frame.id in self.calls:
                    self._cancel(self.calls[frame.id])
            elif type(frame) is wire.Goodbye:
                self.transport.drop(self, "its caller has left.")
                return

    def close(self, reason: str, code: str = wire.LEFT) -> None:
        """End every handler, oldest first."""
        self.is_open = False
        for call in tuple(self.calls.values()):
            self._cancel(call)

    # --- requests ---

    def _on_request(self, frame: wire.Request, packet_bytes: int) -> None:
        call_id = frame.id
        if call_id in self.calls:
            self.transport.stats.duplicates += 1
            self.queue(encode(wire.Working(call_id)))
            return
        if call_id < self._oldest_open:  # a late copy of one that nobody waits for
            self.transport.stats.duplicates += 1
            return
        try:
            route, head = self._accept(frame)
            buffers: Sequence[memoryview] = ()
            if frame.buffers:
                body = memoryview(b"".join(frame.buffers))
                buffers = received(head, route.allocate, self.transport.pool, body)
            reply = route.serve(head, buffers) if route.is_plain_function else None  # type: ignore[misc]
            later = reply if isinstance(reply, asyncio.Future) else None
            if later is not None or not route.is_plain_function:
                held_bytes = min(packet_bytes + _HANDLER_BYTES, self.transport.budget.max_bytes)
                call = ServedDatagram(call_id, head, buffers, frame.mode == _ONE_WAY, held_bytes)
                self._start(route, call, later, frame.timeout_ms)
                return
            if frame.mode == _ONE_WAY:
                release(checked_reply(reply))
                reply = None
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call_id, frame.method, error)
            return
        self._answer(call_id, frame.method, reply)

    def _accept(self, frame: wire.Request) -> tuple[Route, Head]:
        """Find who answers a request; raises what its caller is told when nobody does."""
        transport = self.transport
        if len(self.calls) >= transport.limits.max_calls:
            raise PeerBusy("too many calls of yours are open here already.", next_step=_LATER)
        sizes = [len(buffer) for buffer in frame.buffers]
        if sizes:
            transport.limits.check_sizes(sizes)
        return transport.routes.accept(frame, sizes, self.peer, transport.clock)

    # --- handlers that take their time: each ends with its caller's deadline, and frees what it held ---

    def _start(
        self, route: Route, call: ServedDatagram, later: asyncio.Future[Any] | None, timeout_ms: int
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
        self.calls[call.id] = call
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

    async def _run(self, route: Route, call: ServedDatagram) -> None:
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

    def _on_done(self, call: ServedDatagram, later: asyncio.Future[Any]) -> None:
        error = _cancelled() if later.cancelled() else later.exception()
        if error is None or isinstance(error, Exception):
            self._end(call, error or later.result())

    def _expire(self, call: ServedDatagram) -> None:
        self._end(call, DeadlineExceeded("the deadline passed before the answer was ready."))
        if call.work is not None:
            call.work.cancel()

    def _end(self, call: ServedDatagram, outcome: Any) -> None:
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

    def _cancel(self, call: ServedDatagram) -> None:
        self._finish(call)
        if call.work is not None:
            call.work.cancel()

    def _finish(self, call: ServedDatagram) -> None:
        """Free what a call holds."""
        call.is_over = True
        self.calls.pop(call.id, None)
        call.buffers = ()
        if call.timer is not None:
            call.timer.cancel()
        self.transport.budget.give_back(call.held_bytes)

    # --- answers ---

    def _answer(self, call_id: int, method: str, returned: Any) -> None:
        """Send what a handler returned, or that it is too large for datagrams."""
        reply = EMPTY_REPLY
        try:
            reply = returned if type(returned) is Reply else checked_reply(returned)
            content: Any = (5, call_id, reply.payload)
            size_bytes = 0
            if reply.buffers:
                views = byte_views(reply.buffers)
                content = (5, call_id, reply.payload, views)
                size_bytes = sum(map(len, views))
            if size_bytes <= _MAX_ANSWER_BYTES:
                frame = encode_head(method, content, self.transport.limits.max_head_bytes)
                size_bytes = len(frame)
            if size_bytes > _MAX_ANSWER_BYTES:
                frame = self._too_large(call_id, method, size_bytes)
        except Exception as error:  # noqa: BLE001 - what cannot be sent is told to the caller
            release(reply)
            self._fail(call_id, method, error)
            return
        if reply.on_sent is not None:
            release(reply)
        self._send_outcome(call_id, frame)

    def _too_large(self, call_id: int, method: str, size_bytes: int) -> bytes:
        if self.transport.streams is None:
            raise LimitExceeded(
                f"the answer of {method} takes {size_bytes:,} bytes, more than {wire.MAX_PARTS} datagrams.",
                cause="this peer answers over datagrams alone.",
                next_step="ask for less at once, or give the peer a stream transport.",
            )
        return encode(wire.TooLarge(call_id, size_bytes))

    def _fail(self, call_id: int, method: str, error: Exception) -> None:
        self._log(method, error)
        self._send_outcome(call_id, wire.encode_failure(call_id, to_wire(error)))

    def _log(self, method: str, error: Exception) -> None:
        if not isinstance(error, ShoalError):
            log.error("%s, called by %s, failed", method, self.peer, exc_info=error)

    def _send_outcome(self, call_id: int, frame: bytes) -> None:
        if not self.is_open or call_id < self._oldest_open:  # its caller has left, or has given it up
            return
        if len(frame) <= wire.MAX_FRAME_BYTES:
            self.queue(frame)
            return
        for part in wire.cut(call_id, frame):
            self.queue(part)


def _cancelled() -> PeerBusy:
    return PeerBusy("the handler was cancelled.", next_step="try again.")
