"""One connection between two peers: many calls each way, multiplexed over one stream of bytes.

It is an asyncio protocol and does not care what carries its bytes: a socket, TLS, or a link in memory.
How a call flows through it is drawn in docs/architecture.md. Every frame passes here; what is done with one
is elsewhere: in `calls`, `channel` and `decoder`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import operator
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from shoal._version import __version__
from shoal.core import (
    IdentityError,
    LimitExceeded,
    Peer,
    PeerError,
    PeerId,
    PeerLost,
    PeerRefused,
    ProtocolError,
    Scope,
    ShoalError,
    VersionMismatch,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.ids import ID_BYTES
from shoal.transport import frames
from shoal.transport.frames import FrameKind, encode
from shoal.transport.limits import CallSlots, Limits
from shoal.transport.messages import other_peer
from shoal.transport.network.sockets import release, sending_directly
from shoal.transport.streams.calls import Calling, ConnectionRetired, Serving
from shoal.transport.streams.channel import StreamChannel
from shoal.transport.streams.decoder import FrameDecoder
from shoal.transport.streams.outbox import RELAYED_CHUNK_BYTES, Outbox
from shoal.transport.trust.tls import explain, peer_id_of

if TYPE_CHECKING:
    from shoal.transport.streams.transport import Shard

log = logging.getLogger(__name__)

_GOODBYE_CODES = {VersionMismatch: "version", PeerRefused: "refused"}
_MAX_ELAPSED_S = 2.0  # of one look: when this process itself stood still, the peer is not to blame
_LAST_WORDS_S = 1.0  # for the goodbye to a peer that is cut off: one that does not read keeps its socket open


ConnectionKind = Literal["direct", "punched", "relayed"]
"""How a connection reaches its peer: dialed, dialed by both through their routers, or through a relay."""


class _State(enum.Enum):
    GREETING = "greeting"
    READY = "ready"
    LEAVING = "leaving"  # calls under way may end, new ones are refused
    CLOSING = "closing"  # nothing is sent or heard any more; the socket may still hold bytes
    CLOSED = "closed"


class Connection(asyncio.BufferedProtocol):
    """Lives on one loop; every method is called on that loop's thread."""

    def __init__(self, shard: Shard, scope: Scope, peer: Peer, *, is_dialer: bool) -> None:
        self.shard = shard
        self.limits = shard.limits
        self.routes = shard.routes
        self.budget = shard.budget
        self.scope = scope
        self.peer = peer
        self.is_dialer = is_dialer
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.used_at_s = self.loop.time()
        self.received_bytes = 0
        self.is_usable = False
        """Whether new calls may begin here."""
        self.is_punched = False
        """Whether both sides have dialed it, through their routers."""
        # twice what an honest peer may have left unread: an answer to each of its calls
        self.max_waiting_bytes = 2 * self.limits.max_calls * (frames.INLINE_BYTES + 1024)
        self._state = _State.GREETING
        self._reason: ShoalError | None = None
        self.pool = shard.pool
        self._decoder = FrameDecoder(self._on_frame, self.limits.max_head_bytes)
        self.arrivals = self._decoder.arrivals
        self._peer_max_message_bytes = self.limits.max_message_bytes
        self.calling = Calling(self, first_id=1 if is_dialer else 2)
        self.serving = Serving(self, first_id=2 if is_dialer else 1)
        self.channels: dict[int, StreamChannel] = {}
        """Those of calls under way, both ways, by call id."""
        # looked at about once a second; a sender may have more to do between the parts of a message than
        # inside a frame, and a reader before it reads
        self._frame_stall = StallTimer(self.limits.frame_s, self.limits.min_bytes_per_s)
        self._message_stall = StallTimer(3 * self.limits.frame_s, self.limits.min_bytes_per_s)
        self._reading_stall = StallTimer(3 * self.limits.frame_s, self.limits.min_bytes_per_s)
        self._seen_frames = 0  # that had begun to arrive at the last look
        self._seen_bytes = 0  # that had been received at the last look
        self._transport: asyncio.Transport | None = None
        self._is_unwanted = False
        self.is_watched = False
        """Whether the shard looks after it; whoever makes it busy says `watch`."""
        self._last_words: asyncio.TimerHandle | None = None
        self._descriptor: int | None = None
        self._proven_id: PeerId | None = None
        self.outbox: Outbox

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the hello, now that bytes may flow."""
        self._transport = cast("asyncio.Transport", transport)
        if self.shard.access is None:
            self._transport = sending_directly(self._transport, self)
        if self._is_unwanted:
            self._transport.abort()
        chunk_bytes = (RELAYED_CHUNK_BYTES,) if self.is_relayed else ()
        self.outbox = Outbox(self.loop, self._transport, *chunk_bytes)
        # 'resumed' then means that every byte has left, and buffers may be used again; TLS has copies of its
        # own, and takes zero for 'always full'
        self._transport.set_write_buffer_limits(high=0 if self.shard.access is None else 1)
        socket = transport.get_extra_info("socket")
        if socket is not None:
            self._descriptor = socket.fileno()
            close_in_children(self._descriptor)
        if self.shard.access is not None:
            self._identify(self._transport)
            self.check_access()
        self._send_now(FrameKind.HELLO, encode(own_hello(self.shard.peer_id, self.limits)))
        self.watch()

    def _identify(self, transport: asyncio.Transport) -> None:
        """Take the peer's id from its certificate, whose key TLS has seen it use."""
        try:
            self._proven_id = proven_id(transport.get_extra_info("ssl_object"))
        except ProtocolError as error:
            self._cut_off(error)
            return
        if self.peer.id is None:
            self.peer = Peer(self.peer.address, self._proven_id)

    def check_access(self) -> None:
        """Cut off a peer that may not talk to this one, or may no more."""
        access, peer_id = self.shard.access, self._proven_id
        if access is not None and peer_id is not None and not access.is_allowed(peer_id):
            self._cut_off(PeerRefused(f"The peer {peer_id.short} is not allowed here.", peer=self.peer))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes should go."""
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Read the bytes that have come."""
        self.received_bytes += nbytes
        is_held_back = self.outbox.hold_back()  # answers that are ready leave together, at the end of this
        try:
            self._decoder.buffer_updated(nbytes)
        except (ProtocolError, LimitExceeded) as error:
            self._cut_off(error)
        if is_held_back:
            self.outbox.let_go()
        else:
            self.outbox.flush_small()
        if not self.is_watched and not self._is_quiet:
            self.watch()
        if self.outbox.waiting_bytes > self.max_waiting_bytes:
            self._cut_off(LimitExceeded("It asks on and on, and does not read the answers."))

    def pause_writing(self) -> None:
        """Hold back what is to be sent: the socket is full."""
        self.outbox.pause()

    def resume_writing(self) -> None:
        """Send on: the socket has passed on all that it was given."""
        self.outbox.resume()

    def eof_received(self) -> bool:
        """The other side sends no more: nothing is left to talk about."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call, and tell everybody who waits why."""
        if self._descriptor is not None:
            keep_in_children(self._descriptor)
            self._descriptor = None
        release(self._transport)
        if self._state is _State.CLOSED:  # it was given up, and has begun after that
            return
        if self._last_words is not None:
            self._last_words.cancel()
        if not self._is_over and self._decoder.is_inside_frame:
            self.shard.complain(self.peer, ProtocolError("It ended in the middle of a frame."))
        self._reason = self._reason or self._why_lost(exc)
        self._state = _State.CLOSED
        self.is_usable = False
        if not self.ready.done():
            self.ready.set_exception(self._reason)
            self.ready.exception()  # nobody may be waiting for an accepted connection: that is no error
        self.calling.fail_all(self.error_for)
        self.serving.abandon_all()
        self.arrivals.clear()
        if self._transport is not None:
            self.outbox.close()
        self._decoder.close()
        log.debug("connection to %s ended: %s", self.peer, self._reason.what)
        self.shard.on_lost(self)

    def _why_lost(self, exc: Exception | None) -> ShoalError:
        if isinstance(exc, ssl.SSLError):
            return explain(exc, self.peer)
        cause = str(exc) if exc else "the other side closed it."
        next_step = ""
        if self._state is _State.GREETING:
            if self.shard.access is None:
                cause += " It may belong to a swarm with a secret, and this peer has none."
                next_step = "if so, start this peer with the swarm's --secret-file or SHOAL_SECRET."
            else:
                cause += " It may not take this peer's certificate."
                next_step = "compare the clocks of the two machines, and look into the log of the other."
        what = f"The connection to {self.peer} ended."
        return PeerLost(what, peer=self.peer, cause=cause, next_step=next_step)

    def _on_frame(self, kind: int, call_id: int, head: Any, body: memoryview) -> None:
        """Pass a frame, which the decoder has found, to whom it concerns."""
        if self._state is _State.GREETING and kind not in (FrameKind.HELLO, FrameKind.GOODBYE):
            raise ProtocolError(f"A {FrameKind(kind).name} frame came before the hello.")
        _HANDLERS[kind](self)(call_id, head, body)

    # --- what the two sides of a call use ---

    @property
    def is_connected(self) -> bool:
        """Whether there is, or was, something that carries its bytes."""
        return self._transport is not None

    @property
    def is_relayed(self) -> bool:
        """Whether its bytes pass a relay."""
        return self.peer.address.is_relayed

    @property
    def kind(self) -> ConnectionKind:
        """How it reaches the peer."""
        return "relayed" if self.is_relayed else "punched" if self.is_punched else "direct"

    @property
    def num_open(self) -> int:
        """The number of calls under way, both ways."""
        return len(self.calling.pending) + len(self.serving.calls)

    def send(self, kind: FrameKind, call_id: int, head: bytes = b"") -> None:
        """Send a frame without a body, unless the connection is over."""
        if not self._is_over:
            self.outbox.send_frame(kind, call_id, head)

    def _send_now(self, kind: FrameKind, head: bytes) -> None:
        """Send a frame that belongs to no call, without waiting for the end of this turn of the loop."""
        is_held_back = self.outbox.hold_back()
        self.send(kind, 0, head)
        if is_held_back:
            self.outbox.let_go()

    @property
    def _is_over(self) -> bool:
        return self._state is _State.CLOSED or self._state is _State.CLOSING

    def watch(self) -> None:
        """Have it looked after until it is quiet again."""
        self.is_watched = True
        self.shard.watch(self)

    def rest(self) -> None:
        """Something has ended: unless more is expected, nobody needs to look after it."""
        if self.is_watched and self._is_quiet:
            self._stop_watching()
            self.shard.unwatch(self)

    def _stop_watching(self) -> None:
        """Nothing is expected of the peer now: what is expected later is something new."""
        self.is_watched = False
        for stall in (self._frame_stall, self._message_stall, self._reading_stall):
            stall.is_waiting = False

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is expected of the other side."""
        return not (
            self._state is not _State.READY
            or self.num_open
            or self._decoder.is_inside_frame
            or self.outbox.is_paused
        )

    def forget(self, call_id: int) -> None:
        """Neither send nor receive more of a call's buffers; its memory is the owner's again."""
        self.arrivals.forget(call_id)
        if self._state is not _State.CLOSED:  # else the outbox has told the owners already, or will
            self.outbox.drop(call_id)

    def check_size_for_peer(self, method: str, total_bytes: int) -> None:
        """PeerRefused when the other side has said that it does not take so much."""
        if total_bytes > self._peer_max_message_bytes:
            raise PeerRefused(
                f"{method}: {total_bytes:,} bytes are more than the {self._peer_max_message_bytes:,} that "
                f"{self.peer} takes in one message.",
                peer=self.peer,
                next_step="send it in parts through a channel, or raise the receiver's max_message_bytes.",
            )

    def raise_closed(self, method: str) -> NoReturn:
        """Raise why no call can begin here: what ended the connection, or that another should be made."""
        if self._state is _State.CLOSED:
            raise self.error_for(method)
        raise ConnectionRetired

    def describe_wait(self, call_id: int) -> str:
        """How far a call has come, for its error message."""
        if (body := self.outbox.body_of(call_id)) is not None:
            return f"{body.sent_bytes:,} of {body.total_bytes:,} bytes had been sent."
        if (assembly := self.arrivals.get(call_id)) is not None:
            arrived = assembly.total_bytes - assembly.left_bytes
            return f"{arrived:,} of the answer's {assembly.total_bytes:,} bytes had arrived."
        return "the request had been sent; no answer had come."

    # --- ending ---

    def leave(self, reason: str, code: str = "leaving") -> None:
        """Say goodbye: calls under way may end, new ones are refused, then the connection closes."""
        if self._state not in (_State.GREETING, _State.READY) or self._transport is None:
            return
        self._state = _State.LEAVING
        self.is_usable = False
        self._send_now(FrameKind.GOODBYE, encode(frames.GoodbyeHead(code, reason, self.serving.last_call_id)))
        self.close_when_done()

    def close_when_done(self) -> None:
        """Close a connection that has been left, once no call uses it."""
        if self._state is _State.LEAVING and self.num_open == 0:
            self.close()

    def close(self, reason: ShoalError | None = None) -> None:
        """End the connection now; frames that wait are still sent where the socket takes them."""
        if self._is_over or self._transport is None:
            return
        self._reason = self._reason or reason
        self._state = _State.CLOSING
        self.is_usable = False
        self.outbox.seal()
        self._decoder.close()
        self._transport.close()

    def abort(self) -> None:
        """End the connection without a word, or have it end as soon as it begins."""
        self._is_unwanted = True
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """End a connection that failed to begin; a loop that was cancelled just then does not tell of it."""
        self.abort()
        if self._transport is not None:
            self.connection_lost(None)

    def check(self, now_s: float) -> bool:
        """Cut off a peer that stalls, leave one that is not needed; True when nothing is expected of it."""
        if not self._is_quiet:
            self._look(now_s)
            return False
        self._stop_watching()
        if self._has_heard():
            self.used_at_s = now_s
        elif now_s - self.used_at_s > self.limits.idle_s * (
            1 if self.is_dialer and not self.is_punched else 3
        ):
            self.leave("the connection was idle.")
        return True

    def _has_heard(self) -> bool:
        """Whether anything has come since the last time this was asked."""
        seen_bytes, self._seen_bytes = self._seen_bytes, self.received_bytes
        return seen_bytes != self.received_bytes

    def _look(self, now_s: float) -> None:
        limits, transport = self.limits, self._transport
        if self._state is _State.CLOSED or transport is None:
            return
        held_bytes = transport.get_write_buffer_size()
        if self._reading_stall.has_ended(
            now_s, self.outbox.sent_bytes - held_bytes, is_expected=held_bytes > 0
        ):
            self._cut_off(LimitExceeded("What it was sent stays unread."))
            self.abort()
            return
        if self._state is _State.CLOSING:
            return
        if self._state is _State.GREETING and now_s - self.used_at_s > limits.handshake_s:
            self._cut_off(ProtocolError(f"No hello came within {limits.handshake_s:g} s."))
            return
        if self._seen_frames != self._decoder.num_frames:  # the frame that is arriving is another one
            self._seen_frames = self._decoder.num_frames
            self._frame_stall.is_waiting = False
        if self._frame_stall.has_ended(now_s, self.received_bytes, is_expected=self._decoder.is_inside_frame):
            self._cut_off(
                LimitExceeded(f"A frame did not arrive at {limits.min_bytes_per_s:,} bytes/s or more.")
            )
            return
        self.calling.arm_timers()
        self.serving.arm_timers()
        arriving = self.arrivals.ids_with_room()
        if self._message_stall.has_ended(now_s, self.arrivals.arrived_bytes, is_expected=bool(arriving)):
            self._message_stall.is_waiting = False
            error = LimitExceeded("the buffers of this message stopped arriving.")
            for call_id in arriving:
                self.serving.give_up(call_id, error)
        self.close_when_done()
        if self._has_heard() or self.num_open:
            self.used_at_s = now_s

    def _cut_off(self, error: ShoalError) -> None:
        """The other side does not keep to the protocol: say why, close, and log one line."""
        if self._is_over or self._transport is None:
            return
        self._reason = self._reason or error
        code = _GOODBYE_CODES.get(type(error), "protocol")
        self.send(
            FrameKind.GOODBYE,
            0,
            encode(frames.GoodbyeHead(code, error.what[:500], self.serving.last_call_id)),
        )
        self.close()
        self._last_words = self.loop.call_later(_LAST_WORDS_S, self.abort)
        self.shard.complain(self.peer, error)

    def error_for(self, method: str) -> ShoalError:
        """What to raise for a call that the end of this connection has ended."""
        reason = self._reason or PeerLost("the connection is closed.", peer=self.peer)
        if isinstance(reason, PeerError):
            return type(reason)(
                f"{method} at {self.peer}: {reason.what}",
                peer=self.peer,
                cause=reason.cause,
                next_step=reason.next_step,
            )
        return PeerLost(f"{method} at {self.peer}: {reason.what}", peer=self.peer, cause=reason.cause)

    # --- frames ---

    def _on_hello(self, call_id: int, head: frames.HelloHead, body: memoryview) -> None:
        if self._state is not _State.GREETING:
            raise ProtocolError("A second hello came.")
        try:
            self.peer = Peer(self.peer.address, greeting_peer(head, self.peer, self._proven_id))
        except PeerRefused as error:
            self.close(error)
            return
        self.calling.slots = CallSlots(self.loop, max(1, min(head.max_calls, self.limits.max_calls)))
        self._peer_max_message_bytes = head.max_message_bytes
        self._decoder.welcome()
        self._state = _State.READY
        self.is_usable = True
        if not self.ready.done():
            self.ready.set_result(None)

    def _on_unexpected(self, call_id: int, head: Any, body: memoryview) -> None:
        raise ProtocolError("A frame came that only a decoder sees.")

    def _on_item(self, call_id: int, head: frames.MessageHead, body: memoryview) -> None:
        if (channel := self.channels.get(call_id)) is not None:
            channel.on_item(head, body)

    def _on_end(self, call_id: int, head: None, body: memoryview) -> None:
        if (channel := self.channels.get(call_id)) is not None:
            channel.on_end()

    def _on_window(self, call_id: int, head: frames.WindowHead, body: memoryview) -> None:
        if (channel := self.channels.get(call_id)) is not None:
            channel.on_window(head.size_bytes)

    def _on_goodbye(self, call_id: int, head: frames.GoodbyeHead, body: memoryview) -> None:
        self._reason = frames.from_goodbye(head, self.peer)
        self.calling.retire(head.last_call_id)
        if self._state is _State.GREETING:
            self.close()
        elif self._state is _State.READY:
            self._state = _State.LEAVING
            self.is_usable = False
            self.close_when_done()


def own_hello(peer_id: PeerId | None, limits: Limits) -> frames.HelloHead:
    """What a side says of itself."""
    digest = peer_id.digest if peer_id else b""
    return frames.HelloHead(__version__, digest, limits.max_calls, limits.max_message_bytes)


def proven_id(tls: Any) -> PeerId:
    """Whose certificate came with a TLS connection; ProtocolError when it is none of a peer."""
    certificate = tls.getpeercert(True) if tls else None
    if certificate is None:
        raise ProtocolError("No certificate came with the connection.")
    try:
        return peer_id_of(certificate)
    except IdentityError as error:
        raise ProtocolError(error.what) from error


def greeting_peer(head: frames.HelloHead, expected: Peer, proven: PeerId | None) -> PeerId | None:
    """Who says hello: ProtocolError when it lies, PeerRefused when somebody else is expected there."""
    if len(head.peer_id) not in (0, ID_BYTES):
        raise ProtocolError("A hello came with a peer id of the wrong length.")
    claimed = PeerId(head.peer_id) if head.peer_id else None
    if proven is not None and claimed != proven:
        other = claimed.short if claimed else "nobody in particular"
        raise ProtocolError(f"It says that it is {other}; its certificate is {proven.short}'s.")
    if expected.id is not None and claimed != expected.id:
        raise other_peer(expected, claimed)
    return claimed


def _handlers() -> list[Callable[[Connection], Callable[[int, Any, memoryview], None]]]:
    """Lists whom a frame concerns, by its number; one list serves all connections, which may be many."""
    names = {
        FrameKind.HELLO: "_on_hello",
        FrameKind.REQUEST: "serving.on_request",
        FrameKind.REPLY: "calling.on_reply",
        FrameKind.ERROR: "calling.on_error",
        FrameKind.GRANT: "calling.on_grant",
        FrameKind.CANCEL: "serving.on_cancel",
        FrameKind.ITEM: "_on_item",
        FrameKind.END: "_on_end",
        FrameKind.WINDOW: "_on_window",
        FrameKind.GOODBYE: "_on_goodbye",
    }
    return [operator.attrgetter(names.get(kind, "_on_unexpected")) for kind in (FrameKind.HELLO, *FrameKind)]


_HANDLERS = _handlers()


class StallTimer:
    """The time that a peer has left while something is expected of it: a stock of patience, in seconds.

    Time uses it up, bytes bring it back, so that a peer that sends a byte now and then is not taken for a
    slow one.
    """

    def __init__(self, max_s: float, min_bytes_per_s: int) -> None:
        self._max_s = self._left_s = max_s
        self._min_bytes_per_s = min_bytes_per_s
        self.is_waiting = False
        """Whether it counts; set to False when what is expected from now on is something new."""
        self._seen_at_s = 0.0
        self._seen_bytes = 0

    def has_ended(self, now_s: float, num_bytes: int, *, is_expected: bool) -> bool:
        """Look: `num_bytes` is what has moved in all, `is_expected` whether more should have."""
        elapsed_s = min(now_s - self._seen_at_s, _MAX_ELAPSED_S)
        moved_bytes = num_bytes - self._seen_bytes
        self._seen_at_s, self._seen_bytes = now_s, num_bytes
        if not (is_expected and self.is_waiting):  # since when is not known: count from this look on
            self.is_waiting, self._left_s = is_expected, self._max_s
        else:
            self._left_s = min(self._max_s, self._left_s - elapsed_s + moved_bytes / self._min_bytes_per_s)
        return self._left_s < 0
