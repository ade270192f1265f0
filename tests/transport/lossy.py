"""A network of datagrams that loses, repeats, delays and reorders them as a seed says; tests may look."""

import asyncio
import contextlib
import random

from shoal.core import Address, running_clock
from shoal.core.virtual import VirtualLoop
from shoal.transport.datagrams.transport import DatagramTransport


class Air:
    """All hosts, and what happens to packets between them."""

    def __init__(self, seed=0, *, loss=0.0, duplicate=0.0, delay_s=(0.001, 0.001)):
        self.random = random.Random(seed)
        self.loss, self.duplicate, self.delay_s = loss, duplicate, delay_s
        self.ports = {}
        self.packets = []
        """Every packet sent: (source, target, bytes)."""
        self.should_pass = lambda source, target, packet: True
        self.origin = {}
        """Addresses as others see them, where they differ: a NAT."""

    def host(self, name, *, is_simulated=False):
        return Host(self, name, is_simulated)

    def send(self, source, target, packet):
        source = self.origin.get(source, source)
        self.packets.append((source, target, packet))
        if not self.should_pass(source, target, packet) or self.random.random() < self.loss:
            return
        for _ in range(1 + (self.random.random() < self.duplicate)):
            self.deliver(source, target, packet, self.random.uniform(*self.delay_s))

    def deliver(self, source, target, packet, after_s=0.0):
        asyncio.get_running_loop().call_later(after_s, self._arrive, source, target, packet)

    def _arrive(self, source, target, packet):
        inside = {seen: real for real, seen in self.origin.items()}
        carrier = self.ports.get(inside.get(target, target))
        if carrier is not None:
            carrier.protocol.datagram_received(packet, source)

    def between(self, source, target):
        """Packets sent from one host to another."""
        return [packet for at, to, packet in self.packets if at[0] == source and to[0] == target]


class Host:
    """One host's Network."""

    def __init__(self, air, name, is_simulated):
        self.air, self.name, self.is_simulated = air, name, is_simulated
        self.random = random.Random(name)
        self.clock = running_clock()

    async def open_datagrams(self, address, protocol):
        port = address.port or 1000 + len(self.air.ports)
        carrier = Carrier(self.air, (self.name, port), protocol)
        self.air.ports[self.name, port] = carrier
        protocol.connection_made(carrier)
        return carrier

    async def resolve(self, address):
        return (address.host, address.port)


class Carrier(asyncio.DatagramTransport):
    def __init__(self, air, where, protocol):
        super().__init__({"sockname": where})
        self.air, self.where, self.protocol = air, where, protocol

    def sendto(self, data, addr=None):
        self.air.send(self.where, addr, bytes(data))

    def close(self):
        self.air.ports.pop(self.where, None)
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


@contextlib.asynccontextmanager
async def open_on(air, name, *, listen=True, port=0, handlers=lambda transport: None, **options):
    """A transport on a host of its own, and where it listens."""
    options.setdefault("is_insecure", True)
    async with DatagramTransport(network=air.host(name), **options) as transport:
        handlers(transport)
        address = await transport.listen(Address(name, port)) if listen else None
        yield transport, address


def run_virtual(work):
    """Run a coroutine in virtual time; whatever asyncio reports as unhandled fails the test."""
    loop = VirtualLoop(limit_s=3600)
    unhandled = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        result = loop.run_until_complete(work)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    assert not unhandled, unhandled
    return result
