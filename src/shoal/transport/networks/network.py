"""What lies under the transports: a network that carries streams of bytes and datagrams between addresses.

The one on real sockets is here; links in memory are `memory_network`'s, and `shaping` makes real sockets
behave like a worse network. A transport does not know which of them it runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
from typing import Any, Protocol, cast

from shoal.core import SYSTEM_CLOCK, Address, Clock
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport.networks.sockets import bind, bind_datagrams
from shoal.transport.trust.tls import carry


class Accepted(Protocol):
    """A stream that somebody has dialed and nobody serves yet. For any thread."""

    origin: Address

    def refuse(self, last_words: bytes) -> None:
        """Send what can be sent at once, and close."""

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""


class Listener(Protocol):
    """Where streams are accepted."""

    address: Address

    async def accept(self) -> Accepted:
        """The next stream; OSError when there is none to be had now."""

    def close(self) -> None:
        """Accept no more."""


class Network(Protocol):
    """What carries bytes between addresses. Errors are the operating system's: transports translate them."""

    clock: Clock
    """This peer's own clock."""
    random: random.Random
    """Where this peer's random numbers come from: the system, or a seed where everything is simulated."""
    is_simulated: bool
    """Whether everything happens in this process: then there is nobody to hide from, and no TLS."""

    async def listen(self, address: Address) -> Listener:
        """Accept streams there; UsageError when that cannot be."""

    async def dial(
        self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` speak to whoever listens there."""

    async def adopt(
        self, accepted: Accepted, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` serve a stream, on the running loop."""

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Send and receive datagrams there; UsageError when that cannot be."""

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """How `sendto` and `datagram_received` name an address."""


class SocketAccepted:
    """A TCP connection that was accepted."""

    def __init__(self, accepted: socket.socket, origin: Address) -> None:
        self.socket = accepted
        self.origin = origin
        close_in_children(accepted.fileno())

    def refuse(self, last_words: bytes) -> None:
        """Send what can be sent at once, and close."""
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)
            self.socket.send(last_words)
        self.close()

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""
        if (descriptor := self.socket.fileno()) >= 0:
            keep_in_children(descriptor)
        self.socket.close()


class SocketListener:
    """A TCP socket that listens."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.address = Address(*listener.getsockname()[:2])
        close_in_children(listener.fileno())

    async def accept(self) -> SocketAccepted:
        """The next connection; OSError when there is none to be had now."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, origin = await loop.sock_accept(self._socket)
            except ConnectionAbortedError:  # the caller has changed its mind
                continue
            return SocketAccepted(accepted, Address(origin[0], origin[1]))

    def close(self) -> None:
        """Accept no more."""
        keep_in_children(self._socket.fileno())
        self._socket.close()


class SocketNetwork:
    """TCP and UDP of this machine."""

    is_simulated = False

    def __init__(self) -> None:
        self.clock: Clock = SYSTEM_CLOCK
        self.random: random.Random = random.SystemRandom()

    async def listen(self, address: Address) -> SocketListener:
        """Accept TCP connections there; UsageError when that cannot be."""
        return SocketListener(await bind(address))

    async def connect(self, address: Address) -> socket.socket:
        """A connected TCP socket; tries every address that the name has."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        refusals: list[OSError] = []
        for family, kind, protocol, _, where in infos:
            candidate = socket.socket(family, kind, protocol)
            try:
                candidate.setblocking(False)
                await loop.sock_connect(candidate, where)
                candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                candidate.close()
                refusals.append(error)
            except BaseException:
                candidate.close()
                raise
            else:
                return candidate
        raise refusals[0] if refusals else OSError(f"no address is known for {address.host}")

    async def dial(
        self,
        address: Address,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: ssl.SSLContext | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        """Have `protocol` speak to whoever listens there, through `sock` where it is connected already."""
        connected = sock or await self.connect(address)
        await _carry(connected, protocol, tls, is_server=False)

    async def adopt(
        self, accepted: Accepted, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` serve an accepted connection, on the running loop."""
        await _carry(cast("SocketAccepted", accepted).socket, protocol, tls, is_server=True)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """A UDP socket there; UsageError when that cannot be."""
        loop = asyncio.get_running_loop()
        bound = await bind_datagrams(address)
        try:
            carrier, _ = await loop.create_datagram_endpoint(lambda: protocol, sock=bound)
        except BaseException:
            bound.close()
            raise
        return carrier

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """A socket address; OSError or ValueError for a name that nobody knows."""
        with contextlib.suppress(ValueError):
            version = ipaddress.ip_address(address.host).version
            return (address.host, address.port) if version == 4 else (address.host, address.port, 0, 0)
        infos = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM
        )
        return tuple(infos[0][4])


async def _carry(
    connected: socket.socket,
    protocol: asyncio.BufferedProtocol,
    tls: ssl.SSLContext | None,
    *,
    is_server: bool,
) -> None:
    """Join a protocol to a connected socket, which belongs to the loop from then on."""
    keep_in_children(connected.fileno())  # the loop may close it unseen; a protocol that has it says so again
    if tls is not None:
        await carry(protocol, connected, tls, is_server=is_server)
        return
    loop = asyncio.get_running_loop()
    try:
        if is_server:
            await loop.connect_accepted_socket(lambda: protocol, connected)
        else:
            await loop.create_connection(lambda: protocol, sock=connected)
    except BaseException:
        connected.close()
        raise
