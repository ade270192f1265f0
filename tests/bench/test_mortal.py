"""Sockets that die at once, and what is sent to them after."""

import contextlib

import pytest

from shoal.bench.mortal import Graveyard, MortalNetwork, TappedNetwork
from shoal.core import Address, Deadline, DeadlineExceeded, LoopThread, PeerError
from shoal.transport import Endpoint, MemoryNetwork, Reply

ANY = Address("127.0.0.1", 0)


def _echo(head, buffers):
    return Reply(head.payload)


@contextlib.asynccontextmanager
async def _two_endpoints():
    graveyard = Graveyard()
    network, tap = MortalNetwork(), TappedNetwork(MortalNetwork(), graveyard)
    async with Endpoint(network=network) as mortal, Endpoint(network=tap) as caller:
        mortal.handle("echo", _echo)
        address = await mortal.listen(ANY)
        await caller.listen(ANY)
        yield network, address, caller, tap, graveyard


async def _ask(transport, address, timeout_s=5.0):
    return (await transport.call(address, "echo", 7, deadline=Deadline.after(timeout_s))).payload


async def _die():
    async with _two_endpoints() as (network, address, caller, tap, graveyard):
        assert await _ask(caller.datagrams, address) == 7
        assert await _ask(caller.streams, address) == 7
        assert tap.num_to_dead == 0
        network.kill()
        graveyard.bury(address)
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


async def _look(network):
    return network.is_simulated, network.random, network.clock


def test_a_tapped_network_is_otherwise_the_one_below():
    with LoopThread() as loop:
        host = loop.run(_host())
        tap = TappedNetwork(host, Graveyard())
        assert loop.run(_look(tap)) == (True, host.random, host.clock)


async def _host():
    return MemoryNetwork().host("a")
