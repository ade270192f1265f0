"""The callee's side of datagrams: a request is served once, and its answer kept while it may be asked for.

A caller tells with every packet which of its calls is the oldest still open; answers to earlier ones are
forgotten. A request that comes again while its handler runs is answered with 'working', one whose answer is
kept with that answer. No handler runs for an address that has not proven itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Deadline, LimitExceeded, Peer, PeerBusy, PeerRefused, ShoalError
from shoal.transport.datagrams.contents import memory_for
from shoal.transport.datagrams.handlers import LATER, Handlers, HandlingHub, ServedCall
from shoal.transport.datagrams.kept import FORGOTTEN, MAX_SPAN, NEW, RUNNING, KeepingHub, Kept, KeptAnswers
from shoal.transport.datagrams.packets import (
    LEFT,
    MAX_FRAME_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Cancel,
    Fetch,
    Goodbye,
    Proof,
    Request,
    cut,
    encode_failure,
)
from shoal.transport.datagrams.parking import Parking
from shoal.transport.datagrams.ports import Hub
from shoal.transport.datagrams.sessions import Session, peer_at
from shoal.transport.frames import UNREADABLE, Mode, decode_payload, encode, to_wire
from shoal.transport.limits import Limits
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
    release,
)

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = MAX_PARTS * PART_BYTES
_HANDLER_BYTES = 4096  # what a handler that runs takes beside its packet, about
_ONE_WAY = int(Mode.ONE_WAY)
_NEVER = Deadline.never()


class AnsweringHub(Hub, HandlingHub, KeepingHub, Protocol):
    """What this side needs besides."""

    limits: Limits
    pool: BufferPool
    routes: Routes
    parking: Parking | None
    """None where there are no streams."""

    def prove(
        self, answerer: Answerer, packet: bytes, where: tuple[Any, ...], port: Port, token: bytes
    ) -> bool:
        """Whether the token shows that the caller receives there; asks for one where it does not."""

    def on_left(self, answerer: Answerer) -> None:
        """The caller has ended the session."""


class Answerer(Session):
    """A session that the other side has begun, to ask."""

    hub: AnsweringHub

    def __init__(
        self, hub: AnsweringHub, port: Port, peer: Peer, where: tuple[Any, ...], session_id: bytes
    ) -> None:
        super().__init__(hub, port, peer, where, session_id)
        self.is_proven = False
        """Whether the caller has shown that it receives where its packets come from."""
        self.hello_nonce = b""
        self.kept = KeptAnswers(hub)
        self._handlers = Handlers(hub, self._on_reply, self._on_error)

    @property
    def num_open(self) -> int:
        """Handlers that run."""
        return len(self._handlers)

    @property
    def is_settled(self) -> bool:
        """Whether both sides know each other, and where."""
        return self.is_proven and self.is_open

    def receive(self, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """Requests have come."""
        frames = self.read(packet, where)
        if frames is None:
            return
        if where != self.where or not self.is_proven:
            first = frames.frames[0] if frames.frames else None
            token = first.token if type(first) is Proof else b""
            if not self.hub.prove(self, packet, where, port, token):
                return
            self.is_proven, self.where, self.port = True, where, port
            self.peer = Peer(peer_at(where).address, self.peer.id)
        self.used_at_s = self.hub.loop.time()
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
                self.hub.on_left(self)
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
            self.hub.stats.duplicates += 1
            if kept is not NEW:
                self._repeat(call_id, kept)
            return
        if call_id - self.kept.oldest > MAX_SPAN:  # told and not remembered
            self.queue(encode_failure(call_id, to_wire(_too_many())))
            return
        try:
            route, head = self._accept(frame)
            buffers = memory_for(route, head, frame.buffers, self.hub.pool) if frame.buffers else ()
            reply = route.serve(head, buffers) if route.is_plain_function else None  # type: ignore[misc]
            later = reply if isinstance(reply, asyncio.Future) else None
            if later is not None or not route.is_plain_function:
                held_bytes = min(packet_bytes + _HANDLER_BYTES, self.hub.budget.max_bytes)
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
        hub = self.hub
        if len(self._handlers) >= hub.limits.max_calls:
            raise _too_many()
        route = hub.routes.find(frame.method)
        if route.serve is None:
            raise PeerRefused(
                f"{frame.method} is a channel.",
                next_step="use call() for calls, open_channel() for channels.",
            )
        sizes = [len(buffer) for buffer in frame.buffers]
        if sizes:
            hub.limits.check_sizes(sizes)
        try:
            payload = decode_payload(frame.payload, route.decoder)
        except UNREADABLE as error:
            raise PeerRefused(f"the payload of {frame.method} is not what it takes: {error}.") from error
        clock = hub.clock
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
            frame = encode_head(method, content, self.hub.limits.max_head_bytes)
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
        parking = self.hub.parking
        if parking is None:
            raise LimitExceeded(
                f"the answer of {method} takes {size_bytes:,} bytes, more than {MAX_PARTS} datagrams.",
                cause="this peer answers over datagrams alone.",
                next_step="ask for less at once, or give the peer a stream transport.",
            )
        ticket = parking.park(reply, size_bytes, self.peer.id, self.hub.loop)
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
