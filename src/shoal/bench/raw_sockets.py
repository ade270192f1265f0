"""The ceiling of the transport benchmark: plain blocking sockets, full duplex, and no protocol at all.

Each side has one sending and one receiving thread, and buffers that are made once. Nothing in Python that
moves bytes both ways over TCP can be much faster.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from shoal.bench.workers import Parent

_Buffers = queue.SimpleQueue[memoryview | None]


def serve(arguments: dict[str, Any], parent: Parent) -> None:
    """A process that echoes messages of `size_bytes` on one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.tell(port=listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo_all(connection, connection, arguments["size_bytes"], arguments["in_flight"])


def echo_all(receiving: socket.socket, sending: socket.socket, size_bytes: int, in_flight: int) -> None:
    """Send back every message that comes, until the other side has gone."""
    free: _Buffers = queue.SimpleQueue()
    full: _Buffers = queue.SimpleQueue()
    for _ in range(in_flight + 1):
        free.put(memoryview(bytearray(size_bytes)))
    with _thread(_send_all, sending, full, free):
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                buffer = free.get()
                assert buffer is not None
                receive_exactly(receiving, buffer)
                full.put(buffer)
        full.put(None)


def _send_all(connection: socket.socket, full: _Buffers, free: _Buffers) -> None:
    with contextlib.suppress(ConnectionError):
        while (buffer := full.get()) is not None:
            connection.sendall(buffer)
            free.put(buffer)


class RawClient:
    """The other end: keeps a number of messages under way and counts what comes back."""

    def __init__(self, port: int, size_bytes: int, in_flight: int) -> None:
        self._sending, self._receiving = self._connect(port)
        self._size_bytes = size_bytes
        self._in_flight = in_flight
        self._outgoing = [memoryview(bytearray(size_bytes)) for _ in range(in_flight)]
        self._incoming = [memoryview(bytearray(size_bytes)) for _ in range(in_flight)]

    def _connect(self, port: int) -> tuple[socket.socket, socket.socket]:
        """Where to send and where to receive: one connection does both here."""
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, connection

    def close(self) -> None:
        """Let the server go."""
        self._sending.close()
        self._receiving.close()

    def echo_for(self, seconds: float) -> float:
        """Echo for about so long; bytes a second, both directions counted."""
        todo: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        num_echoes = 0
        with _thread(_send_all, self._sending, todo, queue.SimpleQueue()):
            for buffer in self._outgoing:
                todo.put(buffer)
            num_open = len(self._outgoing)
            began_s = time.perf_counter()
            while num_open:
                receive_exactly(self._receiving, self._incoming[num_echoes % self._in_flight])
                num_echoes += 1
                if time.perf_counter() - began_s < seconds:
                    todo.put(self._outgoing[num_echoes % self._in_flight])
                else:
                    num_open -= 1
            took_s = time.perf_counter() - began_s
            todo.put(None)
        return 2 * self._size_bytes * num_echoes / took_s


def receive_exactly(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; EOFError when the other side has gone."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if count == 0:
            raise EOFError
        received += count


@contextlib.contextmanager
def _thread(function: Any, *arguments: Any) -> Iterator[None]:
    thread = threading.Thread(
        target=function, args=arguments
    )  # law: the ceiling is blocking sockets in threads
    thread.start()
    try:
        yield
    finally:
        thread.join()
