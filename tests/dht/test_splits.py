import asyncio
import logging

from dht.living_swarm import LivingSwarm
from dht.worlds import Liar
from shoal.core import Address, run_virtual
from shoal.dht.wire import MAX_CONTACTS, Finding, State
from shoal.transport import Conditions, FaultScript

ONE = [f"a{number}" for number in range(6)]
OTHER = [f"b{number}" for number in range(6)]


def partition(one, other, at_s, for_s):
    """Links between two groups are cut for a while."""
    groups = [[f"{name}:*" for name in group] for group in (one, other)]
    script = f'[[fault]]\nkind = "partition"\nbetween = {groups}\nat_s = {at_s}\nfor_s = {for_s}\n'
    return Conditions(script=FaultScript.parse(script))


async def find_each_other(swarm, one, other):
    """Whether every peer finds, and can read from, the other half."""
    for reader, writer in ((one[0], other[0]), (other[0], one[0])):
        dht = swarm.peers[writer]
        await dht.store(f"from {writer}", 1, dht.in_s(50_000.0))
        if await swarm.peers[reader].get(f"from {writer}", latest=True) is None:
            return False
    found = [await swarm.peers[a].find_peer(swarm.peers[b].peer_id) for a in one for b in other]
    return None not in found


def test_two_halves_that_share_a_bootstrap_peer_find_each_other(caplog):
    """The bootstrap peer is cut off from one half for so long that it is forgotten there."""

    async def main():
        conditions = partition(ONE, ["shared", *OTHER], at_s=10, for_s=3000)
        async with LivingSwarm(conditions) as swarm:
            await swarm.start("shared", join=[])
            for name in (*ONE, *OTHER):
                await swarm.start(name, join=["shared"])
            await asyncio.sleep(20)
            for dht in swarm.peers.values():
                await dht.find_nearest(dht.peer_id)
            await asyncio.sleep(2900)
            for name in ONE:
                assert {contact.peer.address.host for contact in swarm.peers[name].table.contacts()} <= set(
                    ONE
                )
            before = swarm.peers[ONE[1]]
            await before.store("of one half", 1, before.in_s(50_000.0))
            assert await swarm.peers[OTHER[1]].get("of one half") is None
            await asyncio.sleep(80 + 180)
            assert await find_each_other(swarm, ONE, OTHER)
            assert (await swarm.peers[OTHER[1]].get("of one half")).value == 1
            warned = [record for record in caplog.records if "was split" in record.message]
            assert warned
            assert {record.levelno for record in warned} == {logging.WARNING}

    run_virtual(main())


def test_halves_that_began_apart_meet_when_their_bootstrap_peer_appears():
    async def main():
        async with LivingSwarm(is_strict=False) as swarm:
            await swarm.start(ONE[0], join=["shared"])
            await swarm.start(OTHER[0], join=["shared"])
            for half in (ONE, OTHER):
                for name in half[1:]:
                    await swarm.start(name, join=[half[0], "shared"])
            await asyncio.sleep(300)
            assert swarm.peers[ONE[2]].table.contacts()
            assert not await find_each_other(swarm, ONE, OTHER)
            await swarm.start("shared", join=[])
            await asyncio.sleep(180)
            assert await find_each_other(swarm, ONE, OTHER)

    run_virtual(main())


def test_a_bootstrap_peer_is_asked_seldom_while_all_is_well():
    async def main():
        async with LivingSwarm(refresh_s=1e6) as swarm:
            await swarm.start_many(4)
            await asyncio.sleep(1200)  # 60 to 480 s between two questions by now
            dht = swarm.peers["p3"]
            before = dht.counts.num_finds
            await asyncio.sleep(4800)
            assert 5 <= dht.counts.num_finds - before <= 20
            assert dht.upkeep.num_rejoins == 0

    run_virtual(main())


def test_peers_of_before_are_asked_where_there_is_no_address_to_join():
    async def main():
        async with LivingSwarm(partition(["a0"], ["b0"], at_s=10, for_s=3000)) as swarm:
            first = await swarm.start("a0", join=[])
            await swarm.start("b0", join=["a0"])
            await asyncio.sleep(100)
            swarm.peers["b0"].joining.addresses.clear()
            await asyncio.sleep(2900)
            assert len(first.table) == len(swarm.peers["b0"].table) == 0
            await asyncio.sleep(120)
            assert [contact.peer.address for contact in first.table.contacts()] == [Address("b0", 1024)]

    run_virtual(main())


def test_a_bootstrap_peer_that_names_thousands_is_read_as_far_as_it_may_name():
    async def main():
        async with LivingSwarm() as swarm:
            (dht,) = await swarm.start_many(1)
            async with Liar(swarm, "liar", near="huge", values=None) as liar:
                await dht.upkeep._splits._ask(liar.peer.address)
                assert (
                    liar.num_asked == 2
                )  # by a datagram, into which its answer does not fit, and over a stream
                assert dht.counts.num_pings == 1 + MAX_CONTACTS

    run_virtual(main())


def test_a_bootstrap_peer_whose_names_lead_nowhere_is_harmless():
    async def main():
        async with LivingSwarm() as swarm:
            (dht,) = await swarm.start_many(1)
            async with Liar(swarm, "liar", near="liars", values=None) as liar:
                liar._finding = lambda want, near: Finding(State.NOTHING, bytes(range(256)))
                await dht.upkeep._splits._ask(liar.peer.address)
                assert liar.num_asked == 1
                assert dht.counts.num_pings == 1

    run_virtual(main())


def test_it_does_not_ask_itself():
    async def main():
        async with LivingSwarm() as swarm:
            (dht,) = await swarm.start_many(1)
            await dht.upkeep._splits._ask(dht.peer.address)
            assert (dht.counts.num_pings, dht.counts.num_finds) == (1, 0)

    run_virtual(main())
