"""Sockets that die at once, and what is sent to them after."""

import asyncio
import contextlib

import pytest

from shoal.bench.processes.dht import MortalNetwork, TappedNetwork
from shoal.core import Address, Deadline, DeadlineExceeded, LoopThread, PeerError
from shoal.transport import Endpoint, MemoryNetwork, Reply

ANY = Address("127.0.0.1", 0)


def _echo(head, buffers):
    return Reply(head.payload)


@contextlib.asynccontextmanager
async def _two_endpoints():
    dead = set()
    network, tap = MortalNetwork(), TappedNetwork(MortalNetwork(), dead)
    async with Endpoint(network=network) as mortal, Endpoint(network=tap) as caller:
        mortal.handle("echo", _echo)
        address = await mortal.listen(ANY)
        await caller.listen(ANY)
        yield network, address, caller, tap, dead


async def _ask(transport, address, timeout_s=5.0):
    return (await transport.call(address, "echo", 7, deadline=Deadline.after(timeout_s))).payload


async def _die():
    async with _two_endpoints() as (network, address, caller, tap, dead):
        assert await _ask(caller.datagrams, address) == 7
        assert await _ask(caller.streams, address) == 7
        assert tap.num_to_dead == 0
        network.kill()
        dead.add((address.host, address.port))
        with pytest.raises(DeadlineExceeded):
            await _ask(caller.datagrams, address, 0.2)
        assert tap.num_to_dead >= 1
        with pytest.raises((PeerError, DeadlineExceeded)):  # the stream that was open is cut
            await _ask(caller.streams, address, 0.5)
        for opening in (network.listen(ANY), network.connect(address)):
            with pytest.raises(OSError, match="killed"):
                await opening


def test_the_dead_answer_nothing_and_what_is_sent_to_them_is_counted():
    with LoopThread() as loop:
        loop.run(_die())


class _Sender(asyncio.DatagramProtocol):
    """Sends for as long as it is not told to stop, as every protocol does."""

    def __init__(self):
        self.carrier = None
        self.num_sent = 0

    def connection_made(self, transport):
        self.carrier = transport

    def pause_writing(self):
        self.carrier = None

    def send(self, count):
        for _ in range(count):
            if self.carrier is not None:
                self.carrier.sendto(b"hello", ("127.0.0.1", 9))
                self.num_sent += 1


@pytest.mark.parametrize("is_tapped", [False, True])
def test_the_dead_do_not_even_try_to_send(is_tapped, caplog):
    async def die():
        network, sender = MortalNetwork(), _Sender()
        outer = TappedNetwork(network, set()) if is_tapped else network
        await outer.open_datagrams(ANY, sender)
        sender.send(1)
        network.kill()
        sender.send(20)  # before the loop has told it that its socket is gone
        return sender.num_sent

    with LoopThread() as loop:
        assert loop.run(die()) == 1
    assert not caplog.records  # of asyncio, which complains of sends to closed sockets


async def _look(network):
    return network.is_simulated, network.random, network.clock


def test_a_tapped_network_is_otherwise_the_one_below():
    with LoopThread() as loop:
        host = loop.run(_host())
        tap = TappedNetwork(host, set())
        assert loop.run(_look(tap)) == (True, host.random, host.clock)


async def _host():
    return MemoryNetwork().host("a")
