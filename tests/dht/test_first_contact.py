"""Who answers at the addresses that a peer joins by; on real sockets where names and hosts matter."""

import asyncio
import contextlib
import logging
import socket

import pytest

from dht.worlds import in_world, opened
from shoal.core import Address, PeerRefused, PeerUnreachable, UsageError
from shoal.core.identity import Identity
from shoal.dht.node import DHT
from shoal.dht.protocol import Answered
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript, Skew


def skewed(*peers, offset_s=60.0):
    return Conditions(script=FaultScript(fault=[Skew(peer=f"{peer}:*", offset_s=offset_s) for peer in peers]))


# --- clocks ---


@pytest.mark.parametrize("join", [["wrong", "p0"], ["p0", "wrong"]])
def test_who_has_a_wrong_clock_is_left_out_and_told_of_once(caplog, join):
    async def work(swarm, *peers):
        await swarm.start("wrong", join=[])
        late = await swarm.start("late", join=join)
        assert late.protocol.book.of(peers[1].peer) in late.table
        for _ in range(3):
            assert await late.rejoin() == 1

    caplog.set_level(logging.WARNING)
    in_world(work, 2, conditions=skewed("wrong"))
    assert caplog.text.count("60.0 s apart. That peer is left out") == 1


def test_many_wrong_clocks_that_answer_soon_do_not_hide_the_right_one():
    async def work(swarm):
        wrong = [f"wrong{number}" for number in range(4)]
        for name in wrong:
            await swarm.start(name, join=[])
        await swarm.start("right", join=[])
        late = await swarm.start("late", join=[*wrong, "right"])
        assert await late.rejoin() >= 1

    in_world(work, conditions=skewed(*(f"wrong{number}" for number in range(4))))


def test_only_wrong_clocks_are_an_error_when_joining_and_none_later(caplog):
    async def work(swarm):
        wrong = await swarm.start("wrong", join=[])
        with pytest.raises(UsageError, match="s apart"):
            await swarm.start("late", join=["gone", "wrong"])
        late = await swarm.start("early", join=[])
        late.joining.addresses.append(wrong.peer.address)
        for _ in range(3):
            assert await late.rejoin() == 0

    caplog.set_level(logging.WARNING)
    in_world(work, conditions=skewed("wrong"))
    assert caplog.text.count("That peer is left out") == 1


# --- itself ---


def test_the_first_of_a_common_list_begins_the_swarm_and_the_others_find_it():
    async def work(swarm):
        names = ["a", "b", "c"]
        peers = [await swarm.start(name, join=names) for name in names]
        assert [len(peer.table) for peer in peers] == [2, 2, 2]
        assert await peers[0].rejoin() == 2

    in_world(work)


def test_whoever_refuses_is_not_taken_for_nobody():
    async def work(swarm, one):
        twin = opened(swarm, "twin", identity=one.identity, join=[one.peer.address, Address("twin", 1024)])
        with pytest.raises(PeerRefused, match="p0:1024 has the identity of this peer"):
            await twin.__aenter__()

    in_world(work, 1)


def on_sockets(work):
    """Run `work(start)`, where `start(...)` opens a peer on this machine's sockets."""

    async def main():
        async with contextlib.AsyncExitStack() as closing:

            async def start(listen="127.0.0.1:0", join=(), **options):
                return await closing.enter_async_context(
                    DHT(listen=listen, join=join, is_insecure=True, **options)
                )

            await work(start)

    asyncio.run(main())


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.5"])
def test_a_peer_that_listens_everywhere_knows_itself_at_any_of_its_addresses(host):
    async def work(start):
        port = free_port()
        alone = await start(f"0.0.0.0:{port}", [f"{host}:{port}"])
        assert len(alone.table) == 0
        assert await alone.rejoin() == 0

    on_sockets(work)


def test_a_copied_identity_at_the_same_port_is_no_peer_itself():
    async def work(start):
        identity, port = Identity.generate(), free_port()
        await start(f"127.0.0.1:{port}", identity=identity)
        with pytest.raises(PeerRefused, match="has the identity of this peer"):
            await start(f"127.0.0.2:{port}", [f"127.0.0.1:{port}"], identity=identity)

    on_sockets(work)


# --- names ---


def test_whoever_is_joined_by_a_name_is_known_by_its_address():
    async def work(start):
        first = await start()
        port = first.peer.address.port
        second = await start(join=[f"localhost:{port}"])
        third = await start(join=[second.peer.address])
        for dht in (second, third):
            hosts = [contact.peer.address.host for contact in dht.table.contacts()]
            assert hosts == ["127.0.0.1"] * 2
        assert await second.rejoin() == 1
        await second.upkeep._splits._ask(Address("localhost", port))
        assert len(second.table) == 2

    on_sockets(work)


def test_a_name_that_nobody_knows_is_told_of():
    async def work(start):
        with pytest.raises(PeerUnreachable, match="is not known here") as error:
            await start(join=[Address("no name at all", 31337)])
        assert "Nobody answers at no name at all:31337" in str(error.value)

    on_sockets(work)


# --- how others see it ---


def test_its_own_host_is_what_most_others_say(monkeypatch):
    async def work(swarm, *peers):
        dht = await swarm.start("dht")
        words = {"p0": "10.9.9.9:1", "p1": "10.0.0.7:1", "p2": "10.0.0.7:2", "p3": "nonsense"}
        ping = dht.protocol.call_ping

        async def say(peer, deadline=None):
            answered = await ping(peer, deadline)
            said = words.get(peer.address.host, "")
            return Answered(answered.peer, answered.round_trip_s, answered.clock_gap_s, said)

        monkeypatch.setattr(dht.protocol, "call_ping", say)
        dht.joining.addresses[:] = [Address(name, 1024) for name in words]
        await dht.rejoin()
        assert dht.joining.seen_as == "10.0.0.7"
        words.update(p1="10.0.0.8:1", p2="10.0.0.6:1")
        await dht.rejoin()
        assert dht.joining.seen_as == "10.9.9.9"  # all were named once, and this one first
        words.clear()
        await dht.rejoin()
        assert dht.joining.seen_as == "10.9.9.9"

    in_world(work, 4)
