import asyncio

import pytest

from dht.living_swarm import LivingSwarm
from shoal.core import Address, PeerUnreachable, run_virtual
from shoal.dht import upkeep
from shoal.dht.records import Entry, key_of
from shoal.dht.settings import DHTSettings
from shoal.transport import Conditions, FaultScript


def script(text):
    return Conditions(script=FaultScript.parse(f"[[fault]]\n{text}"))


def hosts(dht):
    return {contact.peer.address.host for contact in dht.table.contacts()}


def keep(dht, name, lifetime_s):
    return dht.keeper.keep(lambda at_s: [Entry(name, 1, at_s)], lifetime_s)


def test_after_a_sleep_a_peer_joins_again_and_stores_its_records_again():
    """Its wall clock is an hour late until it wakes up: what it stored before was over at once."""

    async def main():
        asleep = script('kind = "skew"\npeer = "p5:*"\noffset_s = -3600.0\nfor_s = 300.0')
        async with LivingSwarm(asleep, is_strict=False) as swarm:
            await swarm.start_many(6)
            dht = swarm.peers["p5"]
            await keep(dht, "mine", 7200.0).stored()
            await asyncio.sleep(290)
            assert dht.upkeep.num_rejoins == 0
            reader = swarm.peers["p1"]
            before_s = (await reader.get("mine", latest=True)).expires_at_s
            await asyncio.sleep(20)
            assert dht.upkeep.num_rejoins == 1
            assert (await reader.get("mine", latest=True)).expires_at_s > before_s + 3600

    run_virtual(main())


def test_a_process_that_was_stopped_joins_again(monkeypatch):
    """As if a look came late."""
    monkeypatch.setattr(upkeep, "_LATE_S", -10.0)

    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(2)
            await asyncio.sleep(12)
            assert swarm.peers["p1"].upkeep.num_rejoins >= 1

    run_virtual(main())


def test_a_paused_peer_is_found_again():
    async def main():
        pause = script('kind = "pause"\npeer = "p3:*"\nat_s = 100.0\nfor_s = 900.0')
        async with LivingSwarm(pause) as swarm:
            await swarm.start_many(8)
            first, paused = swarm.peers["p0"], swarm.peers["p3"]
            await keep(paused, "mine", 300.0).stored()
            await asyncio.sleep(900)
            for name in swarm.peers:
                await swarm.peers[name].find_nearest(swarm.peers[name].peer_id)
            assert "p3" not in hosts(first)
            assert await first.get("mine") is None
            await asyncio.sleep(200)
            await first.store("meanwhile", 2, first.in_s(1000.0))
            assert "p3" in hosts(first)
            assert (await first.find_peer(paused.peer_id)).address == Address("p3", 1024)
            assert (await first.get("mine")).value == 1
            assert (await paused.get("meanwhile")).value == 2

    run_virtual(main())


def test_a_peer_that_has_lost_everybody_joins_when_somebody_is_back():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start("first", join=[])
            lonely = await swarm.start("lonely", join=["first"])
            keep(lonely, "mine", 3600.0)
            await asyncio.sleep(90)
            await swarm.kill("first")
            await asyncio.sleep(600)
            assert len(lonely.table) == 0
            back = await swarm.start("first", join=[])
            await asyncio.sleep(70)
            assert hosts(lonely) == {"first"}
            assert (await back.get("mine")).value == 1
            await asyncio.sleep(600)
            assert lonely.upkeep.num_rejoins < 20

    run_virtual(main())


def test_a_peer_that_is_alone_asks_nobody():
    async def main():
        async with LivingSwarm() as swarm:
            dht = await swarm.start("alone", join=[])
            await dht.store("x", 1, dht.in_s(10_000.0))
            await asyncio.sleep(3600)
            assert (dht.counts.num_pings, dht.counts.num_finds, dht.upkeep.num_rejoins) == (0, 0, 0)
            assert (await dht.get("x")).value == 1

    run_virtual(main())


def test_peers_of_last_time_are_a_way_back_when_no_join_address_answers(tmp_path, caplog):
    """The peer is killed too, so that nothing is written at its end."""
    path = tmp_path / "peers.json"

    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(5)
            await swarm.start("mine", join=["p0"], peers_file=path)
            await asyncio.sleep(120)
            await swarm.kill("mine")
            await swarm.kill("p0")
            await swarm.kill("p1")
            with pytest.raises(PeerUnreachable):
                await swarm.start("stranger", join=["p0"])
            dht = await swarm.start("mine", join=["p0"], peers_file=path)
            assert hosts(dht) == {"p2", "p3", "p4"}
            await dht.store("x", 1, dht.in_s(100.0))
            assert (await swarm.peers["p4"].get("x")).value == 1

    run_virtual(main())
    assert "peers of last time" in caplog.text


def test_peers_are_written_down_at_the_end(tmp_path):
    path = tmp_path / "peers.json"

    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(2)
            await swarm.start("mine", peers_file=path)

    run_virtual(main())
    assert '"p0:1024"' in path.read_text()


def test_a_peer_that_failed_comes_back():
    async def main():
        cut = script('kind = "partition"\nbetween = [["p0:*"], ["p1:*"]]\nat_s = 10.0\nfor_s = 50.0')
        async with LivingSwarm(cut, check_s=1e6) as swarm:
            await swarm.start_many(3)
            first = swarm.peers["p0"]
            await asyncio.sleep(20)
            await first.find_nearest(swarm.peers["p1"].peer_id)
            assert hosts(first) == {"p2"}
            await asyncio.sleep(80)
            assert hosts(first) == {"p1", "p2"}

    run_virtual(main())


def test_one_that_is_gone_is_forgotten_without_being_asked_for_anything(monkeypatch):
    monkeypatch.setattr(upkeep.Upkeep, "_refresh_bucket", lambda self: None)  # it may ask it too

    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(4)
            first = swarm.peers["p0"]
            await swarm.kill("p2")
            await asyncio.sleep(1200)
            assert hosts(first) == {"p1", "p3"}
            sessions = first.endpoint.datagrams.sessions.values()
            assert {session.peer.address.host for session in sessions} == {"p1", "p3"}

    run_virtual(main())


def test_a_bucket_that_nobody_looks_into_is_refreshed():
    async def main():
        async with LivingSwarm(refresh_s=100.0, check_s=1e6) as swarm:
            await swarm.start_many(3)
            first = swarm.peers["p0"]
            await asyncio.sleep(90)
            before = first.counts.num_finds
            await asyncio.sleep(120)
            assert first.counts.num_finds > before
            assert first.table.stale_ranges(asyncio.get_running_loop().time(), 130.0) == []

    run_virtual(main())


def test_what_is_used_from_the_cache_is_fetched_again_before_it_expires():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(10)
            keep(swarm.peers["p0"], "x", 100.0)
            await asyncio.sleep(1)
            reader = swarm.peers[swarm.nearest("x")[-1]]
            key = key_of("x").digest
            for _ in range(2):
                assert (await reader.get("x")).value == 1
            await asyncio.sleep(120)
            num_finds = reader.counts.num_finds
            assert (await reader.get("x")).value == 1
            assert reader.counts.num_finds == num_finds
            await asyncio.sleep(600)
            assert key not in reader.cache  # once for each use

    run_virtual(main())


def test_records_that_are_over_are_dropped_without_being_asked_for():
    async def main():
        async with LivingSwarm() as swarm:
            dht = await swarm.start()
            await dht.store("x", 1, dht.in_s(30.0))
            assert len(dht.storage) == 1
            await asyncio.sleep(100)
            assert len(dht.storage) == 0

    run_virtual(main())


def test_a_client_is_looked_after_too():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(3)
            client = await swarm.start("client", settings=DHTSettings(is_client=True))
            await keep(client, "x", 60.0).stored()
            await asyncio.sleep(1800)
            assert (await swarm.peers["p1"].get("x")).value == 1
            assert len(client.storage) == 0
            assert "client" not in hosts(swarm.peers["p0"])

    run_virtual(main())


def test_closing_ends_all_of_it():
    async def main():
        swarm = LivingSwarm()
        async with swarm:
            await swarm.start_many(3)
            keep(swarm.peers["p0"], "x", 60.0)
            await asyncio.sleep(61)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []

    run_virtual(main())


def test_it_happens_the_same_way_every_time():
    async def main():
        async with LivingSwarm(script('kind = "drop"\nprobability = 0.05'), seed=7) as swarm:
            await swarm.start_many(10)
            first = swarm.peers["p0"]
            keep(first, "x", 100.0)
            await asyncio.sleep(100)
            await swarm.kill("p3")
            await swarm.start_many(2)
            await asyncio.sleep(900)
            return [
                (name, dht.counts.num_pings, dht.counts.num_finds, dht.counts.num_stores, sorted(hosts(dht)))
                for name, dht in swarm.peers.items()
            ]

    assert run_virtual(main()) == run_virtual(main())
