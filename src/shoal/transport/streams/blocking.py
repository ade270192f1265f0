"""Small calls that a waiting thread makes by itself: it sends on a socket of its own and reads there.

A call through the loop crosses threads twice, which takes longer than all else that a small call needs. Here
no loop, task or future takes part. The bytes on the wire are those of any other connection: to the callee
there is no difference. A thread has a connection to itself for as long as its call lasts; afterwards the
connection waits for the next caller of the same peer.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from shoal.core import (
    SYSTEM_CLOCK,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    ProtocolError,
    UsageError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport import frames
from shoal.transport.frames import FrameKind, Mode, encode
from shoal.transport.messages import Reply, byte_views, encode_head, time_left
from shoal.transport.network.sockets import SocketNetwork, no_answer, unreachable
from shoal.transport.streams.calls import ConnectionRetired
from shoal.transport.streams.connection import greeting_peer, own_hello, proven_id
from shoal.transport.streams.decoder import WORD_FIRST, FrameDecoder, first_word
from shoal.transport.trust.tls import explain

if TYPE_CHECKING:
    import msgspec

    from shoal.transport.streams.transport import StreamTransport

MAX_CALL_BYTES = frames.INLINE_BYTES
"""The most that the buffers of a call may have; answers may be of any size."""
_MAX_IDLE = 256  # connections to all peers together that wait for their next call
_DIAL_S = 2.0  # for connecting and the hello; the loop, which dials too, is more patient
_FRESH_S = 0.01  # after a call, during which nobody asks the kernel whether the peer has left
_LOOK_S = 1.0  # how often a thread that waits looks at its deadline, where that is far
_TIMEVAL = struct.Struct("@ll")
_HEADER_BYTES = frames.HEADER.size
_REPLY_WORD = first_word(FrameKind.REPLY)
_decode_reply = cast("Any", frames.DECODERS[FrameKind.REPLY]).decode
_DIAL_AGAIN_S = 5.0  # after a peer has had no place for one more connection


class BlockingCaller:
    """Makes small calls for threads that wait for them; may be used from any thread but the loop's."""

    def __init__(self, transport: StreamTransport) -> None:
        self._transport = transport
        self._idle: dict[Peer, list[_BlockingConnection]] = {}
        self._num_idle = 0
        self._dial_at_s: dict[Peer, float] = {}
        """When peers that had no place may be dialed again: a dial for each call would cost them most."""
        self.is_open = type(transport.network) is SocketNetwork and hasattr(select, "poll")
        """Whether calls can be made: over real sockets only, and not once it is closed."""
        self._lock = threading.Lock()

    def call(
        self,
        peer: Peer,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        deadline: Deadline,
        decoder: msgspec.msgpack.Decoder[Any] | None = None,
    ) -> Reply:
        """Ask and wait for the answer, whose payload `decoder` reads; fails as `StreamTransport.call`."""
        while True:
            connection = self._take(peer) or self._dial(peer, deadline)
            try:
                outcome = connection.call(method, payload, buffers, deadline, decoder)
            except BaseException:
                connection.close()
                raise
            self._put_back(peer, connection)
            if type(outcome) is Reply:
                return outcome
            if not isinstance(outcome, ConnectionRetired):  # else a new one is not, or fails to begin
                raise cast("Exception", outcome)

    def close(self) -> None:
        """Close connections that wait; those in use are closed when their calls have ended."""
        with self._lock:
            self.is_open = False
            idle, self._idle, self._num_idle = self._idle, {}, 0
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _take(self, peer: Peer) -> _BlockingConnection | None:
        while True:
            with self._lock:
                if not (connections := self._idle.get(peer)):
                    return None
                connection = connections.pop()
                self._num_idle -= 1
            if connection.is_fresh():
                return connection
            connection.close()

    def _dial(self, peer: Peer, deadline: Deadline) -> _BlockingConnection:
        if peer.address.is_relayed:
            raise PeerBusy(f"{peer} is behind a relay, to which only the loop speaks.", peer=peer)
        now_s = SYSTEM_CLOCK.now_s()
        if now_s < self._dial_at_s.get(peer, 0.0):
            raise PeerBusy(f"{peer} had no place for one more connection a moment ago.", peer=peer)
        self._dial_at_s.pop(peer, None)
        if deadline.is_past:
            raise no_answer(peer)
        try:
            return _BlockingConnection(self._transport, peer, deadline)
        except (PeerBusy, DeadlineExceeded) as error:
            self._dial_at_s[peer] = now_s + _DIAL_AGAIN_S
            if isinstance(error, PeerBusy) or deadline.is_past:
                raise
            # it may have run out of descriptors; a connection that it has already may still serve
            raise PeerBusy(f"{peer} did not accept a connection.", peer=peer, cause=error.cause) from error

    def _put_back(self, peer: Peer, connection: _BlockingConnection) -> None:
        dropped: list[_BlockingConnection] = []
        with self._lock:
            if not (self.is_open and connection.is_usable):
                dropped.append(connection)
            else:
                if (connections := self._idle.get(peer)) is None:
                    connections = self._idle[peer] = []
                connections.append(connection)
                self._num_idle += 1
                if self._num_idle > _MAX_IDLE:  # those of the peer that was met first
                    dropped = self._idle.pop(next(iter(self._idle)))
                    self._num_idle -= len(dropped)
        for each in dropped:
            each.close()


class _BlockingConnection:
    """One dialed connection with at most one call under way."""

    def __init__(self, transport: StreamTransport, peer: Peer, deadline: Deadline) -> None:
        self._peer = peer
        self._limits = transport.limits
        self._pool = transport.pool
        self._access = transport.access
        self._proven_id: PeerId | None = None
        self._decoder = FrameDecoder(self._on_frame, self._limits.max_head_bytes)
        self._arrivals = self._decoder.arrivals
        self._call_id = -1
        self._method = "hello"
        self._views: list[memoryview] = []
        self._payload_decoder: msgspec.msgpack.Decoder[Any] | None = None
        self._outcome: Reply | Exception | None = None
        self._deadline = deadline
        self.is_usable = True
        """Whether further calls may be made; not once the peer has said goodbye."""
        timeout_s = min(_DIAL_S, self._limits.handshake_s, deadline.remaining_s)
        try:
            self._socket = socket.create_connection((peer.address.host, peer.address.port), timeout_s)
        except TimeoutError:
            raise no_answer(peer) from None
        except (OSError, ValueError) as error:
            raise unreachable(peer, error) from error
        close_in_children(self._socket.fileno())
        try:
            self._greet(transport)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise no_answer(peer) from None
            if isinstance(error, ssl.SSLError):
                raise explain(error, peer) from error
            if isinstance(error, OSError):
                raise self._lost(str(error)) from error
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._used_at_s = SYSTEM_CLOCK.now_s()
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        self._limit_s = 0.0
        if self._is_plain:
            self._socket.settimeout(None)

    def _greet(self, transport: StreamTransport) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (tls := transport.client_tls()) is not None:
            descriptor = self._socket.fileno()
            self._socket = tls.wrap_socket(self._socket)
            assert self._socket.fileno() == descriptor
            self._proven_id = proven_id(self._socket)
            if not self._is_allowed:
                raise PeerRefused(f"The peer {self._proven_id.short} is not allowed here.", peer=self._peer)
        self._socket.sendall(
            frames.frame(FrameKind.HELLO, 0, encode(own_hello(transport.peer_id, self._limits)))
        )
        outcome = self._receive_outcome()
        if isinstance(outcome, Exception):
            raise outcome
        self._decoder.welcome()

    def is_fresh(self) -> bool:
        """Whether it can be used again: a peer that has left, or closed it, has made it readable."""
        if not self._is_allowed:
            return False
        # what has come just now, a goodbye, is read with the next answer
        return SYSTEM_CLOCK.now_s() - self._used_at_s < _FRESH_S or not self._poll.poll(0)

    @property
    def _is_allowed(self) -> bool:
        access, peer_id = self._access, self._proven_id
        return access is None or peer_id is None or access.is_allowed(peer_id)

    def call(
        self,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        deadline: Deadline,
        decoder: msgspec.msgpack.Decoder[Any] | None,
    ) -> Reply | Exception:
        """Send a request and read until its answer is here, which may be an error that the peer tells."""
        remaining_s, timeout_ms = time_left(method, self._peer, deadline)
        views = byte_views(buffers) if buffers else []
        sizes = list(map(len, views))
        total_bytes = sum(sizes)
        if total_bytes > MAX_CALL_BYTES:
            raise UsageError(f"{method} has {total_bytes:,} bytes, which is no small call.")
        head = encode_head(
            method, (method, _CALL, timeout_ms, sizes, payload), self._limits.max_head_bytes
        )  # a RequestHead
        self._call_id += 2
        self._method = method
        self._views = views
        self._payload_decoder = decoder
        self._outcome = None
        self._deadline = deadline
        header = frames.HEADER.pack(
            frames.MAGIC, frames.VERSION, _REQUEST, len(head), self._call_id, total_bytes
        )
        message = b"".join((header, head, *views))
        try:
            if not self._is_plain:
                self._socket.settimeout(None if remaining_s == math.inf else remaining_s)
            elif self._limit_s != _LOOK_S or remaining_s < _LOOK_S:
                self._limit_wait(remaining_s)
            self._send_all(message)
            return self._receive_outcome()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{method} at {self._peer} was not answered before its deadline.",
                cause="the request had been sent; no answer had come.",
            ) from None
        except OSError as error:
            raise self._lost(str(error)) from error
        finally:
            self._used_at_s = time.monotonic()

    def _limit_wait(self, seconds: float) -> None:
        """Have the kernel wake this thread after so long, to look at the deadline.

        With a timeout of its own, a Python socket asks the kernel twice for each time that it sends or
        receives. This one is set once, and again only for a call whose deadline is near.
        """
        limit_s = min(seconds, _LOOK_S)
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            whole_s, us = divmod(max(1, int(limit_s * 1e6)), 1_000_000)  # zero would be for ever
            wait = _TIMEVAL.pack(whole_s, us)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def _look_at_deadline(self) -> None:
        """TimeoutError once the time is over, after the kernel has waited for a while."""
        remaining_s = self._deadline.remaining_s
        if not self._is_plain or remaining_s <= 0:
            raise TimeoutError
        self._limit_wait(remaining_s)

    def _send_all(self, message: bytes) -> None:
        if not self._is_plain:
            self._socket.sendall(message)
            return
        rest = memoryview(message)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._look_at_deadline()

    def close(self) -> None:
        """End the connection; the peer drops what is under way."""
        if (descriptor := self._socket.fileno()) >= 0:
            keep_in_children(descriptor)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive_outcome(self) -> Reply | Exception:
        decoder, receive_into = self._decoder, self._socket.recv_into
        while self._outcome is None:
            buffer = decoder.get_buffer()
            try:
                num_bytes = receive_into(buffer)
            except BlockingIOError:
                self._look_at_deadline()
                continue
            if num_bytes == 0:
                raise self._lost("the other side closed it.")
            if (reply := self._whole_reply(buffer, num_bytes)) is not None:
                return reply
            try:
                decoder.buffer_updated(num_bytes)
            except LimitExceeded as error:
                raise ProtocolError(f"{self._peer}: {error.what}") from error
        return self._outcome

    def _whole_reply(self, buffer: memoryview, num_bytes: int) -> Reply | None:
        """The answer, when all of it has come, with one buffer or none, and nothing else; the usual case.

        None leaves it to the decoder, which knows all others, and says what is wrong.
        """
        decoder = self._payload_decoder
        if num_bytes < _HEADER_BYTES or decoder is None or self._decoder.is_inside_frame:
            return None
        word, head_bytes, call_id, body_bytes = WORD_FIRST.unpack_from(buffer)
        body_start = _HEADER_BYTES + head_bytes
        if word != _REPLY_WORD or call_id != self._call_id or body_start + body_bytes != num_bytes:
            return None
        try:
            head = _decode_reply(buffer[_HEADER_BYTES:body_start])
            payload = decoder.decode(head.payload)
        except frames.UNREADABLE:
            return None
        if body_bytes > MAX_CALL_BYTES or head.sizes != ([body_bytes] if body_bytes else []):
            return None
        return Reply(payload, [bytearray(buffer[body_start:num_bytes])] if body_bytes else [])

    def _lost(self, cause: str) -> PeerLost:
        return PeerLost(
            f"{self._method} at {self._peer}: The connection to {self._peer} ended.",
            peer=self._peer,
            cause=cause,
        )

    def _on_frame(self, kind: int, call_id: int, head: Any, body: memoryview) -> None:
        """Note what the peer says of the call under way; other calls have ended before."""
        if kind == _REPLY:
            if call_id == self._call_id and self._outcome is None:
                self._on_reply(head, body)
        elif kind == FrameKind.ERROR:
            if call_id == self._call_id:
                self._outcome = frames.from_wire(head, self._peer, self._method)
        elif kind == FrameKind.GOODBYE:
            self.is_usable = False
            if self._call_id < 0:
                self._outcome = frames.from_goodbye(head, self._peer)
            elif self._call_id > head.last_call_id:
                self._outcome = ConnectionRetired()
        elif kind == FrameKind.HELLO and self._call_id < 0:
            greeting_peer(head, self._peer, self._proven_id)
            self._outcome = Reply()
        elif kind == FrameKind.GRANT and self._call_id >= 0:
            # the peer had no room when the request came, dropped its buffers, and has room now
            if call_id == self._call_id and self._outcome is None and head.from_start:
                dropped = b"".join(self._views)
                self._send_all(frames.frame(FrameKind.CHUNK_FROM_START, call_id, b"", len(dropped)) + dropped)
        else:
            raise ProtocolError(f"A {FrameKind(kind).name} frame came that nothing here asked for.")

    def _on_reply(self, head: frames.MessageHead, body: memoryview) -> None:
        decoder = self._payload_decoder
        try:
            payload = frames.decode_payload(head.payload) if decoder is None else decoder.decode(head.payload)
        except frames.UNREADABLE as error:
            raise PeerRefused(
                f"{self._peer} answered what cannot be read: {error}.", peer=self._peer
            ) from None
        reply = Reply(payload)
        if self._arrivals.is_plain(head.sizes, body):
            reply.buffers = self._pool.copy_in(head.sizes, body)
            self._outcome = reply
            return
        self._limits.check_sizes(head.sizes)
        reply.buffers = self._pool.allocate_all(head.sizes)

        def on_complete() -> None:
            self._outcome = reply

        self._arrivals.receive(self._call_id, reply.buffers, body, on_complete)


_CALL, _REQUEST, _REPLY = int(Mode.CALL), int(FrameKind.REQUEST), int(FrameKind.REPLY)
