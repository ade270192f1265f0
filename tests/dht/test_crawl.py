"""Finding everybody in a swarm, on real peers in virtual time."""

import contextlib

import pytest

from dht.living_swarm import LivingSwarm
from shoal import __version__
from shoal.core import Address, PeerRefused, PeerUnreachable, UsageError, run_virtual
from shoal.core.identity import Identity
from shoal.dht import crawl as crawl_module
from shoal.dht.crawl import crawl
from shoal.dht.node import DHT
from shoal.dht.settings import DHTSettings
from shoal.transport import Endpoint


@contextlib.asynccontextmanager
async def visitor(swarm):
    """A client in the same network that has joined nobody."""
    identity = Identity.from_seed(bytes(32))
    settings = DHTSettings(is_client=True)
    async with Endpoint(network=swarm.network.host("visitor"), peer_id=identity.peer_id) as endpoint:
        async with DHT(identity=identity, endpoint=endpoint, settings=settings) as dht:
            yield dht


def at(*names):
    return [Address(name, 1024) for name in names]


def in_swarm(work):
    """Run `work(swarm, visitor)` in a network without peers yet."""

    async def main():
        async with LivingSwarm() as swarm, visitor(swarm) as dht:
            return await work(swarm, dht)

    return run_virtual(main())


def test_everybody_is_found_once_with_what_it_says():
    async def work(swarm, dht):
        peers = await swarm.start_many(40)
        await peers[0].store("name", b"value", peers[0].in_s(600))
        told = []
        seen = await crawl(dht, at("p7"), tell=told.append)
        assert sorted(each.peer.id for each in seen.peers) == sorted(peer.peer_id for peer in peers)
        assert (seen.silent, seen.num_unasked, seen.estimated_size, seen.num_swarms) == ([], 0, 40, 1)
        by_id = {each.peer.id: each for each in seen.peers}
        for peer in peers:
            about = by_id[peer.peer_id].about
            assert about.software == __version__
            assert (about.num_records, about.num_contacts) == (len(peer.storage), len(peer.table))
        assert sum(each.about.num_records for each in seen.peers) == 5
        assert told[-1] == "40 asked, 0 more known"

    in_swarm(work)


def test_nobody_takes_note_of_the_visitor():
    async def work(swarm, dht):
        peers = await swarm.start_many(5)
        await crawl(dht, at("p0"))
        assert all(contact.id != dht.peer_id for peer in peers for contact in peer.table.contacts())

    in_swarm(work)


def test_a_limit_ends_it_and_the_size_is_estimated():
    async def work(swarm, dht):
        await swarm.start_many(120)
        seen = await crawl(dht, at("p3"), limit=30)
        assert len(seen.peers) == 30
        assert seen.num_unasked > 0
        assert 80 <= seen.estimated_size <= 180

    in_swarm(work)


def test_a_peer_that_was_killed_is_silent():
    async def work(swarm, dht):
        peers = await swarm.start_many(8)
        gone = peers[5].peer
        await swarm.kill("p5")
        seen = await crawl(dht, at("p0"))
        assert len(seen.peers) == seen.estimated_size == 7
        (silent,) = seen.silent
        assert silent.peer == gone
        assert silent.about is None
        assert "before the deadline" in silent.error

    in_swarm(work)


def test_swarms_that_do_not_know_of_each_other_are_told_apart():
    async def work(swarm, dht):
        await swarm.start_many(4)
        await swarm.start("q0", join=())
        await swarm.start("q1", join=["q0"])
        seen = await crawl(dht, at("p1", "p2", "q1"))
        assert (len(seen.peers), seen.num_swarms) == (6, 2)
        await swarm.start("both", join=["p0", "q0"])
        seen = await crawl(dht, at("p1", "q1"))
        assert (len(seen.peers), seen.num_swarms) == (7, 1)

    in_swarm(work)


def test_a_start_that_does_not_answer_is_told_beside_the_others():
    async def work(swarm, dht):
        await swarm.start_many(3)
        seen = await crawl(dht, at("nobody", "p0"))
        assert len(seen.peers) == 3
        assert [each.peer.address for each in seen.silent] == at("nobody")
        with pytest.raises(PeerUnreachable, match="Nobody answers at nobody:1024") as error:
            await crawl(dht, at("nobody"))
        assert "shoal doctor --join nobody:1024" in error.value.next_step
        assert error.value.cause

    in_swarm(work)


def test_a_start_that_dies_after_its_first_answer_is_unreachable(monkeypatch):
    async def work(swarm, dht):
        await swarm.start_many(1)
        meet = crawl_module.first_ping

        async def ping_and_kill(dht, peer):
            answered = await meet(dht, peer)
            await swarm.kill("p0")
            return answered

        monkeypatch.setattr(crawl_module, "first_ping", ping_and_kill)
        with pytest.raises(PeerUnreachable, match=r"p0:1024\) answers no more") as error:
            await crawl(dht, at("p0"))
        assert "before its deadline" in error.value.cause
        assert "shoal doctor --join p0:1024" in error.value.next_step

    in_swarm(work)


def test_a_start_without_a_dht_is_told_from_one_that_does_not_answer():
    async def work(swarm, dht):
        await swarm.start_many(2)
        async with Endpoint(network=swarm.network.host("bare")) as bare:
            await bare.listen(Address("bare", 1024))
            with pytest.raises(PeerRefused, match="At bare:1024 is a Shoal peer without a DHT") as error:
                await crawl(dht, at("nobody", "bare"))
            assert "shoal dht" in error.value.next_step
            seen = await crawl(dht, at("bare", "p0"))
            assert len(seen.peers) == 2
            assert [each.error for each in seen.silent] == ["At bare:1024 is a Shoal peer without a DHT."]

    in_swarm(work)


def test_a_peer_is_not_visited_under_its_own_identity():
    async def work(swarm, dht):
        peers = await swarm.start_many(2)
        own = peers[1].identity
        async with Endpoint(network=swarm.network.host("twin"), peer_id=own.peer_id) as endpoint:
            async with DHT(identity=own, endpoint=endpoint, settings=DHTSettings(is_client=True)) as twin:
                with pytest.raises(PeerRefused, match="p1:1024 has the identity that is to visit it"):
                    await crawl(twin, at("p0", "p1"))

    in_swarm(work)


def test_a_crawl_without_a_start_is_refused():
    async def work(_, dht):
        for starts, limit in (((), 5), (at("p0"), 0)):
            with pytest.raises(UsageError, match="needs an address"):
                await crawl(dht, starts, limit=limit)

    in_swarm(work)
