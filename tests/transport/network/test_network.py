"""The network of real sockets: what transports stand on."""

import asyncio
import socket
from pathlib import Path

import pytest

from shoal.core import Address, UsageError
from shoal.transport.network.sockets import SocketNetwork
from transport.wire import LOOPBACK, until


class Talker(asyncio.BufferedProtocol):
    def __init__(self):
        self.carrier = None
        self.heard = b""
        self.is_over = False
        self._memory = bytearray(100)

    def connection_made(self, transport):
        self.carrier = transport

    def get_buffer(self, sizehint):
        return self._memory

    def buffer_updated(self, nbytes):
        self.heard += self._memory[:nbytes]

    def connection_lost(self, exc):
        self.is_over = True


class Packets(asyncio.DatagramProtocol):
    def __init__(self):
        self.heard = []

    def datagram_received(self, data, addr):
        self.heard.append((data, addr))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_streams_both_ways(run, host):
    async def check():
        network, server, client = SocketNetwork(), Talker(), Talker()
        listener = await network.listen(Address(host, 0))
        await network.dial(Address(host, listener.address.port), client)
        accepted = await listener.accept()
        assert accepted.origin == Address(*client.carrier.get_extra_info("sockname")[:2])
        await network.adopt(accepted, server)
        client.carrier.write(b"hello")
        server.carrier.write(b"welcome")
        await until(lambda: server.heard == b"hello" and client.heard == b"welcome")
        client.carrier.close()
        await until(lambda: server.is_over and client.is_over)
        listener.close()

    run(check())


def test_a_stream_from_a_port_that_is_listened_on(run):
    async def check():
        network, talkers = SocketNetwork(), [Talker() for _ in range(5)]
        shared = await network.listen(Address("127.0.0.1", 0), is_shared=True)
        others = [await network.listen(LOOPBACK) for _ in range(2)]
        for listener, client, server in zip(others, talkers[:2], talkers[2:], strict=False):
            dialed = await network.connect_from(shared.address.port, listener.address)
            accepted = await listener.accept()
            assert accepted.origin == shared.address  # the same port dials several
            await network.adopt(dialed, client, is_server=False)
            await network.adopt(accepted, server)
            client.carrier.write(b"hello")
            await until(lambda server=server: server.heard == b"hello")
        await network.dial(shared.address, talkers[-1])  # and is dialed
        (await shared.accept()).close()
        for listener in (shared, *others):
            listener.close()
        for talker in talkers:
            talker.carrier.abort()
        await until(lambda: all(talker.is_over for talker in talkers))

    run(check())


def test_a_port_that_is_not_shared_cannot_be_dialed_from(run):
    async def check():
        network = SocketNetwork()
        own, other = await network.listen(LOOPBACK), await network.listen(LOOPBACK)
        with pytest.raises(OSError, match="in use"):
            await network.connect_from(own.address.port, other.address)
        own.close()
        other.close()

    run(check())


def test_a_stream_that_is_refused_hears_why(run):
    async def check():
        network, client = SocketNetwork(), Talker()
        listener = await network.listen(LOOPBACK)
        await network.dial(listener.address, client)
        (await listener.accept()).refuse(b"no room")
        await until(lambda: client.is_over)
        assert client.heard == b"no room"
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await network.dial(listener.address, Talker())
        with pytest.raises(socket.gaierror):
            await network.dial(Address("no.such.host.invalid", 1), Talker())

    run(check())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_datagrams_both_ways_between_resolved_addresses(run, host):
    allowed_bytes = int(Path("/proc/sys/net/core/rmem_max").read_text())

    async def check():
        network, one, other = SocketNetwork(), Packets(), Packets()
        carriers = [await network.open_datagrams(Address(host, 0), protocol) for protocol in (one, other)]
        ports = [carrier.get_extra_info("sockname")[1] for carrier in carriers]
        where = [await network.resolve(Address(host, port)) for port in ports]
        carriers[0].sendto(b"to the other", where[1])
        carriers[1].sendto(b"to the one", where[0])
        await until(lambda: one.heard and other.heard)
        assert (one.heard, other.heard) == ([(b"to the one", where[1])], [(b"to the other", where[0])])
        kept = carriers[0].get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert kept >= min(4 << 20, allowed_bytes)
        for carrier in carriers:
            carrier.close()

    run(check())


def test_a_name_is_resolved_and_an_unknown_one_is_an_error(run):
    async def check():
        network = SocketNetwork()
        assert (await network.resolve(Address("localhost", 7)))[1] == 7
        with pytest.raises(socket.gaierror):
            await network.resolve(Address("no.such.host.invalid", 7))

    run(check())


def test_a_port_that_is_taken_is_said_to_be(run):
    async def check():
        network = SocketNetwork()
        listener = await network.listen(LOOPBACK)
        with pytest.raises(UsageError, match="another port"):
            await network.listen(listener.address)
        carrier = await network.open_datagrams(listener.address, Packets())  # TCP and UDP ports are separate
        with pytest.raises(UsageError, match="another port"):
            await network.open_datagrams(listener.address, Packets())
        with pytest.raises(UsageError, match="address of this machine"):
            await network.open_datagrams(Address("no.such.host.invalid", 0), Packets())
        carrier.close()
        listener.close()

    run(check())
