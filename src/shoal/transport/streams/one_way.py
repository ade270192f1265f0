"""A connection over a blocking socket, for threads that do nothing but move large buffers one way.

Blocking sockets copy without the interpreter's lock, straight out of the memory where something lies and into
the memory where it belongs. What goes over the connection may be sealed with AES-256-GCM: records of TLS
itself are of 16 KB, and with a call of Python for each of them all took twice as long.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.core.errors import TensorError
from shoal.core.fork import close_in_children, keep_in_children

_NOTHING = memoryview(b"")
_NOW_BYTES = 1 << 20
"""Up to this size a buffer leaves in the thread that sends it, if nothing is before it."""
_JOINED_BYTES = 64 << 10
"""Up to this size a buffer is copied behind its head, so that both leave at once."""
_RECORD_BYTES, _TAG_BYTES = 512 << 10, 16
"""Sealed records are this long at most: Python does not count any more, and caches still hold them."""
KEY_BYTES = 32
"""The length of a key by which a connection is sealed."""
_RECORD_HEAD = struct.Struct("<I")
_CAN_SEAL_INTO = hasattr(AESGCM, "encrypt_into")
_FAST_BYTES_PER_US = 5000
"""A network of 40 Gbit/s. What it carries in a round trip is as much as the system must hold of a connection
that is as fast; where more is under way, the processor's caches lose it before it is copied a second time,
and all takes 40 % longer between processes of one machine. On longer ways the system finds its own size."""
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 256 << 10, 1 << 20
_RTT_OFFSET = 68
"""Of `tcpi_rtt`, microseconds, in Linux's `struct tcp_info`."""


class OneWayConnection:
    """One connection, over which bytes go as they are, or sealed with a key of its own.

    Sealed are records of AES-256-GCM, each with its length before it; their number is the nonce.
    """

    def __init__(self, connected: socket.socket, key: bytes | None = None) -> None:
        self.socket = connected
        self._cipher = None if key is None else AESGCM(key)
        self._num_records = 0
        self._record = memoryview(
            bytearray(0 if key is None else _RECORD_HEAD.size + _RECORD_BYTES + _TAG_BYTES)
        )
        self._opened = _NOTHING
        """What is left of the last record that has come."""
        close_in_children(connected.fileno())

    def send_now(self, head: bytes, view: memoryview) -> memoryview | None:
        """Sends what can be sent without waiting, and gives the rest; None where it is too large for that."""
        size_bytes = len(head) + view.nbytes
        if self._cipher is None:
            if size_bytes > _NOW_BYTES:
                return None
            sent = self.socket.sendmsg([head, view], (), socket.MSG_DONTWAIT)
            return view[sent - len(head) :] if sent >= len(head) else memoryview(head + view)[sent:]
        if size_bytes > _JOINED_BYTES:
            return None
        # a copy: what is left of it is sent by another thread, which may seal others
        record = memoryview(bytes(self._seal(memoryview(head + view))))
        try:
            return record[self.socket.send(record, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return record

    def send(self, head: bytes, view: memoryview) -> None:
        """Sends all of it, however long that takes."""
        if view.nbytes <= _JOINED_BYTES:
            head, view = head + view, view[:0]
        for part in (memoryview(head), view):
            if self._cipher is None:
                self.socket.sendall(part)
                continue
            for start in range(0, part.nbytes, _RECORD_BYTES):
                self.socket.sendall(self._seal(part[start : start + _RECORD_BYTES]))

    def fill(self, view: memoryview, *, is_first: bool = False) -> bool:
        """Receives as much as the memory holds; False where the connection ends before, if it `is_first`."""
        if self._cipher is None:
            return fill(self.socket, view, is_first=is_first)
        while len(view):
            if not len(self._opened):
                head = self._record[: _RECORD_HEAD.size]
                if not fill(self.socket, head, is_first=is_first):
                    return False
                taken = self._open(view)
            else:
                taken = min(len(view), len(self._opened))
                view[:taken] = self._opened[:taken]
                self._opened = self._opened[taken:]
            view, is_first = view[taken:], False
        return True

    def shut(self) -> None:
        """Ends the connection, so that a thread that blocks on it goes on."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the connection back."""
        if self.socket.fileno() >= 0:
            keep_in_children(self.socket.fileno())
        self.socket.close()

    def _nonce(self) -> bytes:
        self._num_records += 1
        return self._num_records.to_bytes(12, "little")

    def _seal(self, content: memoryview) -> memoryview:
        """Gives the record of some bytes, in memory that the next one uses."""
        assert self._cipher is not None
        end = _RECORD_HEAD.size + content.nbytes + _TAG_BYTES
        head = _RECORD_HEAD.pack(content.nbytes + _TAG_BYTES)
        self._record[: _RECORD_HEAD.size] = head
        sealed = self._record[_RECORD_HEAD.size : end]
        if _CAN_SEAL_INTO:
            self._cipher.encrypt_into(self._nonce(), content, head, sealed)
        else:
            sealed[:] = self._cipher.encrypt(self._nonce(), content, head)
        return self._record[:end]

    def _open(self, view: memoryview) -> int:
        """Receives the rest of a record; gives how much of it lies in `view`, if all of it fits there."""
        assert self._cipher is not None
        head = bytes(self._record[: _RECORD_HEAD.size])
        (size_bytes,) = _RECORD_HEAD.unpack(head)
        if not _TAG_BYTES < size_bytes <= _RECORD_BYTES + _TAG_BYTES:
            raise TensorError(f"a record of {size_bytes} bytes came")
        sealed = self._record[_RECORD_HEAD.size : _RECORD_HEAD.size + size_bytes]
        fill(self.socket, sealed)
        num_bytes = int(size_bytes) - _TAG_BYTES
        try:
            if _CAN_SEAL_INTO and num_bytes <= len(view):
                self._cipher.decrypt_into(self._nonce(), sealed, head, view[:num_bytes])
                return num_bytes
            self._opened = memoryview(self._cipher.decrypt(self._nonce(), sealed, head))
        except InvalidTag:
            raise TensorError("what came was changed on its way") from None
        return 0


def prepare(connected: socket.socket) -> None:
    """Sets a connected socket up for large buffers, by what connecting has shown of the network's delay."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    buffer_bytes = _round_trip_us(connected) * _FAST_BYTES_PER_US
    if 0 < buffer_bytes <= _MAX_BUFFER_BYTES:
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, name, max(buffer_bytes, _MIN_BUFFER_BYTES))


def _round_trip_us(connected: socket.socket) -> int:
    """Gives what connecting has shown of the network's delay; 0 where the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    with contextlib.suppress(OSError, struct.error):
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
        return int(struct.unpack_from("=I", info, _RTT_OFFSET)[0])
    return 0


def fill(connected: socket.socket, view: memoryview, *, is_first: bool = False) -> bool:
    """Receives as much as the memory holds; False where the connection ends before, if it `is_first`."""
    flags = (socket.MSG_WAITALL,) if not isinstance(connected, ssl.SSLSocket) else ()
    while len(view):
        num_bytes = connected.recv_into(view, 0, *flags)
        if not num_bytes:
            if is_first:
                return False
            raise ConnectionError("it ended in the middle of a tensor")
        view, is_first = view[num_bytes:], False
    return True


def read_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    """Receives so many bytes."""
    memory = bytearray(num_bytes)
    fill(connected, memoryview(memory))
    return bytes(memory)
