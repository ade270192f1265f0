"""Becoming part of a swarm, in virtual time."""

import asyncio
import logging

import pytest

from dht.worlds import in_world, opened
from shoal.core import PeerRefused, PeerUnreachable, UsageError
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import ID_BITS, number_of
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript, Skew

LENIENT = DHTSettings(is_strict=False)


def skewed(offset_s, peer="late"):
    return Conditions(script=FaultScript(fault=[Skew(peer=f"{peer}:*", offset_s=offset_s)]))


def test_a_first_peer_begins_a_swarm():
    async def work(swarm, one):
        assert len(one.table) == 0
        assert await one.rejoin() == 0
        assert asyncio.get_running_loop().time() == 0.0

    in_world(work, 1)


def test_whoever_joins_knows_and_is_known_by_its_neighbours():
    async def work(swarm, *peers):
        numbers = {name: number_of(peer.peer_id.digest) for name, peer in swarm.peers.items()}
        for name, peer in swarm.peers.items():
            nearest = sorted(numbers, key=lambda other: numbers[other] ^ numbers[name])[1:6]
            known = {contact.peer.address.host for contact in peer.table.contacts()}
            assert known.issuperset(nearest[:3])
            assert sum(host in known for host in nearest) >= 4

    in_world(work, 40)


def test_somebody_is_known_in_every_part_of_the_swarm():
    async def work(swarm, *peers):
        numbers = [number_of(peer.peer_id.digest) for peer in peers]
        for own, peer in zip(numbers, peers, strict=True):
            there = {ID_BITS - (other ^ own).bit_length() for other in numbers if other != own}
            known = {ID_BITS - (contact.number ^ own).bit_length() for contact in peer.table.contacts()}
            assert known == there

    in_world(work, 40)


# --- nobody there ---


def test_an_address_where_nobody_answers_is_told_with_what_to_do_next():
    async def work(swarm):
        with pytest.raises(PeerUnreachable) as error:
            await swarm.start(join=["nowhere"])
        assert asyncio.get_running_loop().time() < 4.0
        return str(error.value)

    text = in_world(work)
    assert "Nobody answers at nowhere:1024" in text
    assert "shoal doctor --join nowhere:1024" in text


def test_who_is_lenient_begins_alone_and_finds_the_swarm_when_it_comes(caplog):
    async def work(swarm):
        early = await swarm.start("early", join=["first"])
        assert "Nobody answers at first:1024" in caplog.text
        assert "tried again" in caplog.text
        first = await swarm.start("first", join=[])
        await asyncio.sleep(70)
        assert early.table.contacts() == [early.protocol.book.of(first.peer)]
        assert await early.store("name", 1, early.in_s(60))
        assert (await first.get("name")).value == 1

    caplog.set_level(logging.WARNING)
    in_world(work, is_strict=False)


@pytest.mark.parametrize("join", [["dead", "p0"], ["p0", "dead"], ["dead", "gone", "p1", "p0", "lost"]])
def test_one_address_that_answers_is_enough(join):
    async def work(swarm, *peers):
        late = await swarm.start("late", join=join)
        assert len(late.table) == len(peers)
        assert asyncio.get_running_loop().time() <= 3.1

    in_world(work, 5)


def test_with_enough_that_answer_the_dead_are_not_waited_for():
    async def work(swarm, *peers):
        await swarm.start("late", join=["dead", "p0", "p1", "p2"])
        assert asyncio.get_running_loop().time() < 1.0

    in_world(work, 5)


def test_with_its_own_address_among_others_a_peer_is_the_first_or_one_more():
    async def work(swarm):
        everywhere = ["one", "two"]
        one = await swarm.start("one", join=everywhere)
        assert len(one.table) == 0
        two = await swarm.start("two", join=everywhere)
        assert two.table.contacts() == [two.protocol.book.of(one.peer)]

    in_world(work)


def test_two_peers_with_one_identity_are_told_apart():
    async def work(swarm, one):
        twin = opened(swarm, "twin", identity=one.identity, join=[one.peer.address])
        with pytest.raises(PeerRefused, match="has the identity of this peer"):
            await twin.__aenter__()

    in_world(work, 1)


# --- those of last time ---


def test_peers_of_last_time_are_joined_when_no_address_answers(tmp_path, caplog):
    async def work(swarm, *peers):
        for each in ("a", "b"):
            await swarm.start(each, peers_file=tmp_path / each)
        await swarm.stop("a")
        await swarm.stop("b")
        await swarm.kill("p0")
        back = await swarm.start("a", join=["p0"], peers_file=tmp_path / "a")
        assert len(back.table) >= 3
        assert "trying" in caplog.text
        again = await swarm.start("b", join=[], peers_file=tmp_path / "b")
        assert len(again.table) >= 3

    caplog.set_level(logging.WARNING)
    in_world(work, 5)


# --- clocks ---


@pytest.mark.parametrize("offset_s", [-3.2, 3.2, 3600.0])
def test_a_clock_that_is_off_is_refused(offset_s):
    async def work(swarm, one):
        with pytest.raises(UsageError, match="s apart") as error:
            await swarm.start("late")
        assert "NTP" in str(error.value)
        assert f"{abs(offset_s):.1f} s" in str(error.value)

    in_world(work, 1, conditions=skewed(offset_s))


@pytest.mark.parametrize("offset_s", [-2.9, 2.9])
def test_a_clock_that_is_off_a_little_is_fine(offset_s):
    async def work(swarm, one):
        late = await swarm.start("late")
        assert await late.store("name", 1, one.in_s(60))
        assert (await one.get("name")).value == 1

    in_world(work, 1, conditions=skewed(offset_s))


def test_who_is_lenient_is_only_warned(caplog):
    async def work(swarm, one):
        late = await swarm.start("late", settings=LENIENT)
        assert len(late.table) == 1
        assert (await late.ping(one.peer)).clock_gap_s == pytest.approx(-60.0)

    caplog.set_level(logging.WARNING)
    in_world(work, 1, conditions=skewed(60.0))
    assert "60.0 s apart" in caplog.text


# --- again ---


def test_rejoining_meets_the_swarm_again():
    async def work(swarm, *peers):
        lost = peers[3]
        for contact in lost.table.contacts():
            lost.table.on_failed(contact, asyncio.get_running_loop().time())
        assert len(lost.table) == 0
        assert await lost.rejoin() == 1
        assert lost.protocol.book.of(peers[0].peer) in lost.table
        await asyncio.sleep(60)
        assert len(lost.table) == 5

    in_world(work, 6)
