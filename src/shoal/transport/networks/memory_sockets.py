"""What a host in memory holds open: listeners with the streams that wait there, and sockets for datagrams."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Address
from shoal.transport.networks.memory_streams import MemoryStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_DATAGRAM_BYTES = 65_507  # UDP over IPv4
_BACKLOG = 4096


class Ports(Protocol):
    """The host that these belong to."""

    def release(self, what: MemoryListener | MemoryDatagrams) -> None:
        """Free the port of something that was closed."""

    def send_datagram(self, source: Address, data: bytes, target: tuple[str, int]) -> None:
        """Pass a packet to the link, which may lose it."""


class MemoryListener:
    """Where a host accepts streams."""

    def __init__(self, host: Ports, address: Address) -> None:
        self.address = address
        self._host = host
        self._backlog: asyncio.Queue[MemoryAccepted] = asyncio.Queue()

    def offer(self, stream: MemoryStream) -> bool:
        """A newcomer; False when too many wait already."""
        if self._backlog.qsize() >= _BACKLOG:
            return False
        self._backlog.put_nowait(MemoryAccepted(stream))
        return True

    async def accept(self) -> MemoryAccepted:
        """The next stream, in order of arrival; waits on when the listener is closed."""
        while True:
            accepted = await self._backlog.get()
            if not accepted.stream.is_closing():
                return accepted

    def close(self) -> None:
        """Accept no more; those who wait are cut off."""
        self._host.release(self)
        while not self._backlog.empty():
            self._backlog.get_nowait().stream.abort()


class MemoryAccepted:
    """A stream that somebody has dialed."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.origin = Address(*stream.get_extra_info("peername"))

    def refuse(self, last_words: bytes) -> None:
        """Send these and close."""
        self.stream.write(last_words)
        self.close()

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""
        if not self.stream.has_protocol:
            self.stream.close()


class MemoryDatagrams(asyncio.DatagramTransport):
    """A socket for datagrams."""

    def __init__(self, host: Ports, address: Address, protocol: asyncio.DatagramProtocol) -> None:
        super().__init__({"sockname": (address.host, address.port)})
        self.address = address
        self.protocol = protocol
        self._host = host
        self._is_closing = False

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        """Send one packet; one that is too large is told to the protocol."""
        if self._is_closing:
            return
        packet = bytes(data)
        if len(packet) > MAX_DATAGRAM_BYTES:
            self.protocol.error_received(OSError(errno.EMSGSIZE, "the datagram is too long"))
        elif type(addr) is not tuple:
            raise ValueError(f"a datagram needs an address, not {addr!r}")
        else:
            self._host.send_datagram(self.address, packet, addr)

    def get_write_buffer_size(self) -> int:
        """None wait: the link drops what it cannot take."""
        return 0

    def is_closing(self) -> bool:
        """Whether it has been closed."""
        return self._is_closing

    def close(self) -> None:
        """Send and hear no more."""
        if not self._is_closing:
            self._is_closing = True
            self._host.release(self)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        """The same: nothing waits here."""
        self.close()
