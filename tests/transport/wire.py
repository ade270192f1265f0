"""What the tests of the transport share: frames by hand, a transport without a socket, and bounded waits."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import socket
import time
from pathlib import Path

from shoal.core import SYSTEM_CLOCK, Address, Deadline, Peer, Scope
from shoal.transport.frames import HEADER, MAGIC, VERSION, FrameKind, encode, frame
from shoal.transport.limits import ByteBudget, Limits
from shoal.transport.memory import BufferPool
from shoal.transport.messages import MethodTable
from shoal.transport.streams.connection import Connection

LOOPBACK = Address("127.0.0.1", 0)


def soon(seconds=20.0):
    return Deadline.after(seconds)


async def until(condition, seconds=10.0):
    """Wait for something that somebody else makes true."""
    ends_at_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at_s, "it did not become true in time"
        await asyncio.sleep(0.002)


def open_descriptors():
    """How many descriptors this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes():
    """The memory that this process really takes, without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def hello(peer_id=b"", max_calls=1024, max_message_bytes=1 << 28):
    return frame(FrameKind.HELLO, 0, encode(["test", peer_id, max_calls, max_message_bytes]))


def request(call_id, method, payload=None, sizes=(), body=b"", mode=0, timeout_ms=0):
    head = encode([method, mode, timeout_ms, list(sizes), payload])
    return frame(FrameKind.REQUEST, call_id, head, len(body)) + body


def message(kind, call_id, payload=None, sizes=(), body=b""):
    return frame(kind, call_id, encode([list(sizes), payload]), len(body)) + body


def chunk(call_id, body, kind=FrameKind.CHUNK):
    return frame(kind, call_id, b"", len(body)) + body


def header(kind=FrameKind.HELLO, head_bytes=0, call_id=0, body_bytes=0, magic=MAGIC, version=VERSION):
    return HEADER.pack(magic, version, kind, head_bytes, call_id, body_bytes)


class FakeTransport:
    """Keeps what is written; a test says when the socket is full and when it has room again."""

    def __init__(self, protocol=None):
        self.protocol = protocol
        self.is_stuck = False  # takes bytes and passes none on
        self.is_closed = False
        self.is_aborted = False
        self.written = []
        self.held_bytes = 0

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_extra_info(self, name, default=None):
        return default

    def get_write_buffer_size(self):
        return self.held_bytes

    def write(self, data):
        assert not self.is_closed, "written after close"
        self.written.append(bytes(data))
        if self.is_stuck:
            was_empty = self.held_bytes == 0
            self.held_bytes += len(data)
            if was_empty:
                self.protocol.pause_writing()

    def writelines(self, parts):
        self.write(b"".join(parts))

    def drain(self):
        """Everything has left."""
        self.held_bytes = 0
        self.protocol.resume_writing()

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = self.is_aborted = True

    def frames(self):
        """(kind, call id, head, body) of every whole frame that was written."""
        return parse(b"".join(self.written))

    def kinds(self):
        return [kind for kind, *_ in self.frames()]


def parse(data):
    frames, start = [], 0
    while start < len(data):
        magic, _, kind, head_bytes, call_id, body_bytes = HEADER.unpack_from(data, start)
        assert magic == MAGIC
        head = start + HEADER.size
        body = head + head_bytes
        start = body + body_bytes
        frames.append((FrameKind(kind), call_id, data[head:body], data[body:start]))
    return frames


class FakeHost:
    """What a connection belongs to, without sockets."""

    def __init__(self, limits=None, peer_id=None):
        self.peer_id = peer_id
        self.limits = limits or Limits()
        self.routes = MethodTable()
        self.budget = ByteBudget(self.limits.max_bytes_in_flight, self.limits.max_bytes_in_flight // 16)
        self.pool = BufferPool()
        self.clock = SYSTEM_CLOCK
        self.access = None
        self.lost = []
        self.watched = []
        self.complaints = []

    def watch(self, connection):
        self.watched.append(connection)

    def unwatch(self, connection):
        self.watched.remove(connection)

    def on_lost(self, connection):
        self.lost.append(connection)

    def complain(self, peer, error):
        self.complaints.append(error)


def feed(connection, data, step=None):
    """Give bytes as a socket does: where the connection wants them, as many as fit there."""
    data = memoryview(data)
    while data:
        target = connection.get_buffer(-1)
        assert len(target) > 0
        num_bytes = min(len(target), len(data), step or len(data))
        target[:num_bytes] = data[:num_bytes]
        connection.buffer_updated(num_bytes)
        data = data[num_bytes:]


@contextlib.asynccontextmanager
async def fake_connection(host=None, *, is_dialer=False, greet=True, peer=None):
    """A connection on a fake transport, greeted unless told otherwise."""
    host = host or FakeHost()
    async with Scope("test") as scope:
        connection = Connection(host, scope, peer or Peer(Address("10.0.0.7", 7)), is_dialer=is_dialer)
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        await turn()
        transport.written.clear()
        if greet:
            feed(connection, hello())
        try:
            yield connection, transport
        finally:
            if connection not in host.lost:
                connection.connection_lost(None)
            scope.cancel()


async def turn(times=3):
    """Let the loop do what is due."""
    for _ in range(times):
        await asyncio.sleep(0)


def dial(address, timeout_s=5.0):
    """A raw client socket; blocking, so only for tests whose server lives on another thread."""
    return socket.create_connection((address.host, address.port), timeout=timeout_s)
