"""Sockets of one peer among many in a process that can die as a killed process does: at once, without a word.

Also what notices that a peer still sends to the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Container
from typing import TYPE_CHECKING, Any, cast

from shoal.core import Address
from shoal.transport import Network, SocketNetwork
from shoal.transport.network.sockets import Accepted, SocketAccepted, SocketListener

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NO_LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # struct linger {1, 0}: closing sends a reset, nothing else


class MortalNetwork(SocketNetwork):
    """TCP and UDP of this machine, until it is killed; stays dead."""

    def __init__(self) -> None:
        super().__init__()
        self._is_dead = False
        self._carriers: list[tuple[asyncio.DatagramTransport, asyncio.DatagramProtocol]] = []
        self._streams: list[socket.socket] = []

    def kill(self) -> None:
        """Close its sockets; whatever the peer does after this, nobody hears of it.

        Those that listen for streams are closed by their owner, which should be closed right after.
        """
        self._is_dead = True
        for carrier, protocol in self._carriers:
            carrier.abort()
            protocol.pause_writing()  # it learns of its end a moment later, and would send meanwhile
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                stream.shutdown(socket.SHUT_RDWR)

    async def listen(self, address: Address, *, is_shared: bool = False) -> SocketListener:
        """Listens as any network does."""
        self._check_alive()
        return await super().listen(address, is_shared=is_shared)

    async def connect(self, address: Address, *, from_port: int = 0) -> socket.socket:
        """Connects as any network does."""
        self._check_alive()
        return self._noted(await super().connect(address, from_port=from_port))

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: ssl.SSLContext | None = None,
        is_server: bool = True,
    ) -> None:
        """Adopts a connection as any network does."""
        self._check_alive()
        self._noted(cast("SocketAccepted", accepted).socket)
        await super().adopt(accepted, protocol, tls=tls, is_server=is_server)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Opens datagrams as any network does."""
        self._check_alive()
        carrier = await super().open_datagrams(address, protocol)
        self._carriers.append((carrier, protocol))
        return carrier

    def _noted(self, stream: socket.socket) -> socket.socket:
        self._streams = [known for known in self._streams if known.fileno() >= 0]
        self._streams.append(stream)
        return stream

    def _check_alive(self) -> None:
        if self._is_dead:
            raise OSError(errno.ENETDOWN, "this peer was killed")


class TappedNetwork:
    """Another network, and a count of the datagrams that its peer sends to the dead."""

    def __init__(self, inner: Network, dead: Container[tuple[str, int]]) -> None:
        self.num_to_dead = 0
        self.dead = dead
        """The hosts and ports at which peers listened that are dead."""
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Open datagrams as the other network does, and look at what is sent."""
        begin = protocol.connection_made

        def begin_tapped(transport: asyncio.BaseTransport) -> None:
            begin(cast("asyncio.DatagramTransport", _Carrier(transport, self)))

        protocol.connection_made = begin_tapped  # type: ignore[method-assign]
        return await self._inner.open_datagrams(address, protocol)


class _Carrier:
    """A socket whose sends the tap hears of."""

    def __init__(self, carrier: Any, tap: TappedNetwork) -> None:
        self._carrier = carrier
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        self._tap.num_to_dead += addr[:2] in self._tap.dead
        self._carrier.sendto(data, addr)
