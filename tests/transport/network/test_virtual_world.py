"""Whole transports in virtual time: the same calls, deadlines and faults, in seconds instead of hours."""

import asyncio
import contextlib
import os
import time

import pytest

from shoal.core import Address, Deadline, DeadlineExceeded, Peer, PeerLost, PeerUnreachable, Scope, ShoalError
from shoal.core.virtual import run_virtual
from shoal.transport.messages import Reply
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import Profile
from shoal.transport.streams.transport import StreamTransport


async def _answer_slowly(head, buffers):
    await asyncio.sleep(head.payload)
    return Reply("slow")


@contextlib.asynccontextmanager
async def peers(*names, profile=None, script=None):
    """Open transports on hosts of these names, as a list of (transport, where it listens)."""
    conditions = Conditions(
        Profile.load(profile) if profile else None, FaultScript.parse(script) if script else None, seed=3
    )
    network = MemoryNetwork(conditions, seed=3)
    async with contextlib.AsyncExitStack() as opened:
        found = []
        for name in names:
            transport = await opened.enter_async_context(StreamTransport(network=network.host(name)))
            transport.handle("echo", lambda head, buffers: Reply(head.payload, buffers))
            transport.handle("slow", _answer_slowly)
            found.append((transport, Peer(await transport.listen(Address(name, 0)))))
        yield found


def test_an_hour_of_calls_and_waiting_takes_seconds():
    async def main():
        async with peers("one", "other", profile="wan") as [(transport, _), (_, other)]:
            for minute in range(60):
                reply = await transport.call(other, "echo", minute, deadline=Deadline.after(5))
                assert reply.payload == minute
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time()

    began_s = time.perf_counter()
    assert run_virtual(main()) >= 3600
    assert time.perf_counter() - began_s < 2


def test_a_call_takes_what_the_profile_says():
    async def main():
        loop = asyncio.get_running_loop()
        async with peers("one", "other", profile="wan") as [(transport, _), (_, other)]:
            await transport.call(other, "echo", 0, deadline=Deadline.after(5))
            took_s = []
            for _ in range(100):
                began_s = loop.time()
                await transport.call(other, "echo", 0, deadline=Deadline.after(5))
                took_s.append(loop.time() - began_s)
        return sum(took_s) / len(took_s)

    assert run_virtual(main()) == pytest.approx(0.08, rel=0.1)  # 40 ms each way


def test_large_payloads_arrive_whole_and_at_the_speed_of_the_line():
    data = os.urandom(5_000_000)

    async def main():
        loop = asyncio.get_running_loop()
        async with peers("one", "other", profile="wan") as [(transport, _), (_, other)]:
            began_s = loop.time()
            reply = await transport.call(other, "echo", None, [data], deadline=Deadline.after(60))
            assert bytes(reply.buffers[0]) == data
            return loop.time() - began_s

    assert run_virtual(main()) == pytest.approx(0.8 + 0.24, rel=0.2)  # 100 Mbit/s both ways, and delays


def test_deadlines_pass_in_virtual_time():
    async def main():
        loop = asyncio.get_running_loop()
        async with peers("one", "other", profile="wan") as [(transport, _), (_, other)]:
            began_s = loop.time()
            with pytest.raises(DeadlineExceeded):
                await transport.call(other, "slow", 10_000.0, deadline=Deadline.after(1800))
            return loop.time() - began_s

    assert run_virtual(main()) == pytest.approx(1800, abs=0.01)


def test_a_cancelled_call_frees_both_sides():
    async def main():
        async with peers("one", "other", profile="wan") as [(transport, _), (server, other)]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100):
                    await transport.call(other, "slow", 10_000.0, deadline=Deadline.after(5000))
            assert transport.num_calls == 0
            await asyncio.sleep(1)
            assert server.num_calls == 0

    run_virtual(main())


def test_a_killed_host_is_lost_to_the_others():
    script = """
[[fault]]
kind = "kill"
peer = "other:*"
at_s = 30
"""

    async def main():
        loop = asyncio.get_running_loop()
        async with peers("one", "other", profile="wan", script=script) as [(transport, _), (_, other)]:
            with pytest.raises(PeerLost):
                await transport.call(other, "slow", 1000.0, deadline=Deadline.after(2000))
            lost_at_s = loop.time()
            with pytest.raises((PeerUnreachable, DeadlineExceeded)):
                await transport.call(other, "echo", 1, deadline=Deadline.after(20))
            return lost_at_s

    assert run_virtual(main()) == pytest.approx(30, abs=0.1)


def test_a_partition_holds_calls_up_until_it_heals():
    script = """
[[fault]]
kind = "partition"
between = [["one:*"], ["other:*"]]
at_s = 10
for_s = 20
"""

    async def main():
        loop = asyncio.get_running_loop()
        async with peers("one", "other", profile="wan", script=script) as [(transport, _), (_, other)]:
            await transport.call(other, "echo", 1, deadline=Deadline.after(5))
            await asyncio.sleep(12)
            with pytest.raises(DeadlineExceeded):
                await transport.call(other, "echo", 1, deadline=Deadline.after(5))
            reply = await transport.call(other, "echo", 2, deadline=Deadline.after(60))
            assert reply.payload == 2
            return loop.time()

    assert 30 < run_virtual(main()) < 32


def test_idle_connections_are_closed_and_made_again():
    async def main():
        async with peers("one", "other") as [(transport, _), (server, other)]:
            await transport.call(other, "echo", 1, deadline=Deadline.after(5))
            assert transport.num_connections == server.num_connections == 1
            await asyncio.sleep(200)
            assert transport.num_connections == server.num_connections == 0
            await transport.call(other, "echo", 1, deadline=Deadline.after(5))

    run_virtual(main())


def test_many_callers_at_once():
    async def main():
        async with peers("one", "other", profile="lan") as [(transport, _), (_, other)]:

            async def ask(number):
                reply = await transport.call(other, "slow", number * 0.01, deadline=Deadline.after(500))
                assert reply.payload == "slow"

            async with Scope("callers") as scope:
                for number in range(500):
                    scope.start_soon(ask(number))

    run_virtual(main())


def test_a_program_that_waits_for_nothing_is_told_so_though_a_transport_is_open():
    async def check():
        world = MemoryNetwork()
        async with (
            StreamTransport(network=world.host("a")) as one,
            StreamTransport(network=world.host("b")) as other,
        ):
            other.handle("echo", lambda head, buffers: Reply(head.payload))
            address = await other.listen(Address("b", 0))
            await one.call(address, "echo", 1, deadline=Deadline.after(5))
            await asyncio.Event().wait()

    with pytest.raises(ShoalError, match="Nothing can happen any more"):
        run_virtual(check())
