"""A stream between two hosts in memory: two ends that look like asyncio's transports, joined by two pipes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from shoal.core import Address
from shoal.transport.networks.pipes import Link, Pipe

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

# what a socket's own buffer takes before the sender notices a slow line; small frames always fit
SOCKET_BYTES = 16 << 10
_HIGH_WATER_BYTES = 64 << 10


class MemoryStream(asyncio.Transport):
    """One end of a stream. It takes part in the stream before a protocol is given to it with `attach`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, here: Address, there: Address) -> None:
        super().__init__({"sockname": (here.host, here.port), "peername": (there.host, there.port)})
        self._loop = loop
        self._protocol: asyncio.BaseProtocol | None = None
        self._buffered: asyncio.BufferedProtocol | None = None
        self._outgoing: Pipe
        self._incoming: Pipe
        self._other: MemoryStream
        self._on_lost: Callable[[MemoryStream], None] | None = None
        self._unread = b""
        self._high_bytes = _HIGH_WATER_BYTES
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._is_closing = False
        self._is_lost = False
        self._has_sent_eof = False
        self._has_sent_reset = False

    # --- joining ---

    def send(self, what: Callable[[], None]) -> None:
        """Have something happen at the other end, after all that was sent before."""
        self._outgoing.push_eof(what)

    def wait_for_protocol(self, on_lost: Callable[[MemoryStream], None]) -> None:
        """Open this end; bytes wait until `attach`."""
        self._on_lost = on_lost
        self._incoming.pause()

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Have a protocol speak; ConnectionResetError when the stream has ended meanwhile."""
        if self._is_closing:
            raise ConnectionResetError("the stream was closed before it was served")
        self.set_protocol(protocol)
        protocol.connection_made(self)
        if not self._is_reading_paused:
            self._incoming.resume()

    @property
    def has_protocol(self) -> bool:
        """Whether somebody speaks here."""
        return self._protocol is not None

    # --- what protocols use ---

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Speak to this one from now on."""
        self._protocol = protocol
        is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._buffered = cast("asyncio.BufferedProtocol", protocol) if is_buffered else None

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The one that speaks."""
        return cast("asyncio.BaseProtocol", self._protocol)

    def write(self, data: Buffer) -> None:
        """Send a copy of these bytes; `bytes` need none."""
        if self._is_closing or self._has_sent_eof:
            return
        outgoing = self._outgoing
        outgoing.push(bytes(data))
        if outgoing.is_full and not self._is_writing_paused:
            self._pause_writing_if_full()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send copies of all of them, in one piece."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def write_eof(self) -> None:
        """Send nothing more; the other end may go on."""
        if not self._has_sent_eof:
            self._has_sent_eof = True
            self._outgoing.push_eof(self._other._hear_eof)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Pause the protocol above `high`; it goes on when everything has left, whatever `low` is."""
        self._high_bytes = (4 * low if low else _HIGH_WATER_BYTES) if high is None else high
        self._pause_writing_if_full()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Low and high."""
        return 0, self._high_bytes

    def get_write_buffer_size(self) -> int:
        """Bytes that wait beyond those in the socket's own buffer."""
        return max(0, self._outgoing.queued_bytes - SOCKET_BYTES)

    def pause_reading(self) -> None:
        """Pass nothing on until `resume_reading`."""
        if not self._is_closing:
            self._is_reading_paused = True
            self._incoming.pause()

    def resume_reading(self) -> None:
        """Pass bytes on again."""
        if self._is_reading_paused and not self._is_closing:
            self._is_reading_paused = False
            self._loop.call_soon(self._read_on)

    def is_reading(self) -> bool:
        """Whether bytes are passed on."""
        return not self._is_reading_paused and not self._is_closing

    def is_closing(self) -> bool:
        """Whether it has ended or is about to."""
        return self._is_closing

    def close(self) -> None:
        """End it when everything has been sent."""
        if self._is_closing:
            return
        self.write_eof()
        self._is_closing = True
        self._incoming.resume()  # whoever sends on should hear that nobody listens
        if not self._outgoing.is_full:
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """End it now and drop what has not left."""
        if not self._is_lost:
            self._is_closing = True
            self._reset_other(is_cutting=True)
            self._loop.call_soon(self._lose, None)

    def reset(self) -> None:
        """The other end is gone."""
        if not self._is_lost:
            self._is_closing = True
            self._outgoing.close()
            self._lose(ConnectionResetError("the connection was reset by the other side"))

    def kill(self) -> None:
        """Lose the host: the other end hears of it after all that has left, when the link lets it through."""
        if not self._is_lost:
            self._is_closing = True
            self._reset_other(is_cutting=True)
            self._lose(ConnectionAbortedError("this host was killed"))

    # --- what the pipes tell ---

    def _hear(self, data: bytes) -> None:
        if self._is_closing:
            if self._is_lost:
                self._reset_other(is_cutting=False)
            return
        try:
            if self._buffered is not None:
                self._fill(self._buffered, data)
            else:
                cast("asyncio.Protocol", self._protocol).data_received(data)
        except Exception as error:  # noqa: BLE001 - a protocol's failure ends its stream, not the loop
            self._fail(error)

    def _fill(self, protocol: asyncio.BufferedProtocol, data: bytes) -> None:
        """Copy into the protocol's own memory."""
        size_bytes = len(data)
        target: Any = protocol.get_buffer(size_bytes)
        if size_bytes <= len(target):
            target[:size_bytes] = data
            protocol.buffer_updated(size_bytes)
            return
        rest = memoryview(data)
        while rest and not self._is_closing:
            if self._is_reading_paused:
                self._unread = bytes(rest)
                return
            target = protocol.get_buffer(len(rest))
            num_bytes = min(len(target), len(rest))
            if not num_bytes:
                raise RuntimeError("get_buffer() returned an empty buffer")
            target[:num_bytes] = rest[:num_bytes]
            rest = rest[num_bytes:]
            protocol.buffer_updated(num_bytes)

    def _read_on(self) -> None:
        if self._is_reading_paused or self._is_closing:
            return
        unread, self._unread = self._unread, b""
        if unread:
            self._hear(unread)
        if not self._is_reading_paused:
            self._incoming.resume()

    def _hear_eof(self) -> None:
        if self._is_closing or self._protocol is None:
            self.close()
            return
        try:
            keeps_open = cast("asyncio.Protocol", self._protocol).eof_received()
        except Exception as error:  # noqa: BLE001 - a protocol's failure ends its stream, not the loop
            self._fail(error)
            return
        if not keeps_open:
            self.close()

    def _drained(self) -> None:
        if self._is_closing:
            self._lose(None)
        elif self._is_writing_paused and self._protocol is not None:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def _pause_writing_if_full(self) -> None:
        if (
            self._protocol is not None
            and not self._is_writing_paused
            and self.get_write_buffer_size() > self._high_bytes
        ):
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def _reset_other(self, *, is_cutting: bool) -> None:
        if self._outgoing.is_unused:  # the other end does not know of this one yet, and never will
            self._outgoing.close()
        elif not self._has_sent_reset:
            self._has_sent_reset = True
            send = self._outgoing.cut if is_cutting else self._outgoing.push_eof
            send(self._other.reset)

    def _fail(self, error: Exception) -> None:
        log.error("a protocol failed in memory", exc_info=error)
        self._is_closing = True
        self._reset_other(is_cutting=True)
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._unread = b""
        protocol, self._protocol, self._buffered = self._protocol, None, None
        if self._on_lost is not None:
            self._on_lost(self)
        if protocol is not None:
            protocol.connection_lost(error)


def join(
    one: MemoryStream,
    other: MemoryStream,
    links: tuple[Link, Link],
    choices: tuple[random.Random, random.Random],
) -> None:
    """Make two ends a stream; `links` and `choices` are those of `one`'s direction and of `other`'s."""
    for sender, receiver, link, choice in (
        (one, other, links[0], choices[0]),
        (other, one, links[1], choices[1]),
    ):
        sender._other = receiver
        sender._outgoing = receiver._incoming = Pipe(
            sender._loop, link, receiver._hear, sender._drained, buffer_bytes=SOCKET_BYTES, choice=choice
        )
