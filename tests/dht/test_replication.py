import asyncio

from dht.living_swarm import LivingSwarm
from shoal.core import run_virtual
from shoal.dht.records import Entry
from shoal.dht.replication import new_holders

NAMES = [f"record {number}" for number in range(40)]


def entries(dht, lifetime_s=50_000.0):
    return [Entry(name, index, dht.in_s(lifetime_s)) for index, name in enumerate(NAMES)]


def num_stores(swarm):
    return sum(dht.counts.num_stores for dht in swarm.peers.values())


class TestNewHolders:
    """Ids are small numbers and the key is 0, so that distances are the ids."""

    def test_none_while_nothing_changes(self):
        assert new_holders(0, [1, 2, 3], [1, 2, 3], 2) == []

    def test_a_newcomer_that_is_nearer_than_the_farthest_holder(self):
        assert new_holders(0, [2, 4, 6], [2, 3, 4, 6], 2) == [2, 3]
        assert new_holders(0, [2, 4, 6], [1, 2, 4, 6], 2) == [2, 1]

    def test_no_newcomer_that_is_farther(self):
        assert new_holders(0, [2, 4, 6], [2, 4, 5, 6], 2) == []

    def test_the_next_in_line_after_a_death(self):
        assert new_holders(0, [2, 4, 6, 8], [2, 6, 8], 2) == [2, 6]

    def test_those_who_were_there_before_come_first_and_the_nearest_of_all(self):
        assert new_holders(0, [3, 6, 9], [1, 2, 3, 6, 9], 4) == [3, 6, 1, 2]

    def test_nobody_follows_when_there_is_nobody(self):
        assert new_holders(0, [1, 2], [2], 2) == []


def test_a_newcomer_is_handed_what_belongs_to_it():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(12)
            first = swarm.peers["p0"]
            await first.store_many(entries(first))
            await asyncio.sleep(60)
            await swarm.start_many(6)
            await asyncio.sleep(5)
            newcomers = {f"p{number}" for number in range(12, 18)}
            missed = [
                name
                for name in NAMES
                if newcomers.intersection(swarm.nearest(name)[:5]) - set(swarm.holders(name))
            ]
            assert missed == []

    run_virtual(main())


def test_a_record_outlives_its_holders_when_they_are_killed_one_after_another():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(16)
            first = swarm.peers["p0"]
            await first.store("x", "still here", first.in_s(50_000.0))
            for _ in range(10):
                await swarm.kill(swarm.holders("x")[0])
                await asyncio.sleep(100)
                assert len(swarm.holders("x")) >= 5
                assert len(set(swarm.holders("x")).intersection(swarm.nearest("x")[:5])) >= 4
            reader = swarm.peers[swarm.nearest("x")[-1]]
            assert (await reader.get("x")).value == "still here"

    run_virtual(main())


def test_records_are_sent_again_to_those_who_have_lost_them():
    async def main():
        async with LivingSwarm(republish_s=300.0) as swarm:
            await swarm.start_many(12)
            first = swarm.peers["p0"]
            await first.store("x", 1, first.in_s(50_000.0))
            await asyncio.sleep(10)
            for forgetful in swarm.holders("x")[1:]:
                storage = swarm.peers[forgetful].storage
                storage.__init__(swarm.peers[forgetful].peer_id, swarm.settings)
            assert len(swarm.holders("x")) == 1
            await asyncio.sleep(400)
            assert swarm.holders("x") == swarm.nearest("x")[:5]

    run_virtual(main())


def test_only_one_of_the_holders_sends_a_record_again():
    async def main():
        async with LivingSwarm(republish_s=300.0) as swarm:
            await swarm.start_many(12)
            first = swarm.peers["p0"]
            await first.store("x", 1, first.in_s(50_000.0))
            await asyncio.sleep(60)
            before = num_stores(swarm)
            await asyncio.sleep(1800)
            num_rounds = (num_stores(swarm) - before) / 4
            assert 4 <= num_rounds <= 6

    run_virtual(main())


def test_what_its_writer_stores_again_need_not_be_sent():
    async def main():
        async with LivingSwarm(republish_s=300.0, refresh_s=1e6) as swarm:
            await swarm.start_many(12)
            first = swarm.peers["p0"]
            await first.keeper.keep(lambda at_s: [Entry("x", 1, at_s)], 500.0).stored()
            await asyncio.sleep(60)
            before = num_stores(swarm) - first.counts.num_stores
            await asyncio.sleep(1800)
            assert num_stores(swarm) - first.counts.num_stores == before

    run_virtual(main())
