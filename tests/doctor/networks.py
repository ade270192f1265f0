"""Networks that block a direction or have a clock that is off, and peers on loopback to try them with."""

import asyncio
import contextlib

from shoal.core import Address, SystemClock
from shoal.transport.endpoint import Endpoint
from shoal.transport.introductions import answer
from shoal.transport.network.sockets import SocketNetwork

LOOPBACK = Address("127.0.0.1", 0)


class SkewedClock(SystemClock):
    def __init__(self, ahead_s):
        self.ahead_s = ahead_s

    def wall_s(self):
        return super().wall_s() + self.ahead_s


class BadNetwork(SocketNetwork):
    """Blocks what this side sends.

    `tcp` is what becomes of dialing: open, dropped, refused or unroutable. `udp` is what becomes of packets:
    open, dropped, or dropped but for the first socket, the one that listens. `foreign` hosts are not this
    machine's.
    """

    def __init__(self, *, tcp="open", udp="open", ahead_s=0.0, foreign=()):
        super().__init__()
        self.clock = SkewedClock(ahead_s)
        self._tcp = tcp
        self._udp = udp
        self._foreign = foreign
        self._num_sockets = 0

    async def dial(self, address, protocol, *, tls=None, sock=None):
        if self._tcp == "dropped":
            await asyncio.Event().wait()
        if self._tcp == "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        if self._tcp == "unroutable":
            raise OSError(113, "No route to host")
        await super().dial(address, protocol, tls=tls, sock=sock)

    async def open_datagrams(self, address, protocol):
        if address.host in self._foreign:
            raise OSError(99, "Cannot assign requested address")
        self._num_sockets += 1
        is_lost = self._udp == "dropped" or (
            self._udp == "dropped but for the first" and self._num_sockets > 1
        )
        return await super().open_datagrams(address, Losing(protocol) if is_lost else protocol)


class Losing(asyncio.DatagramProtocol):
    """Loses what its protocol sends."""

    def __init__(self, protocol):
        self._protocol = protocol
        self.datagram_received = protocol.datagram_received
        self.error_received = protocol.error_received
        self.connection_lost = protocol.connection_lost
        self.pause_writing = protocol.pause_writing
        self.resume_writing = protocol.resume_writing

    def connection_made(self, transport):
        self._protocol.connection_made(LosingCarrier(transport))


class LosingCarrier:
    def __init__(self, carrier):
        self._carrier = carrier

    def sendto(self, data, where=None):
        pass

    def __getattr__(self, name):
        return getattr(self._carrier, name)


@contextlib.asynccontextmanager
async def serving(membership=None, network=None, listen=LOOPBACK, **settings):
    """A peer that answers; gives its address."""
    endpoint = Endpoint(membership=membership, network=network, **settings)
    answer(endpoint)
    async with endpoint:
        yield await endpoint.listen(listen)


@contextlib.asynccontextmanager
async def saying(words, context=None):
    """Says these bytes to whoever dials it, and waits for the end; gives its address."""

    async def answer(reader, writer):
        with contextlib.suppress(OSError):
            writer.write(words)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
