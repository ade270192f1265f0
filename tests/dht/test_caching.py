"""What look-ups leave behind at other peers, and how entries become slots."""

import asyncio

import pytest

from dht.worlds import identity_of, in_world, keep_at, send_store
from shoal.core import UsageError
from shoal.dht.records import (
    PLAIN,
    Entry,
    Slot,
    Validator,
    encode_subkey,
    encode_value,
    key_of,
    reserved,
    signer_of,
)
from shoal.dht.store import signed_slots
from shoal.dht.wire import MAX_WANTS, Store

ALICE = identity_of("alice")


# --- entries ---


def test_entries_become_slots_in_their_order():
    entries = [Entry("a", {"x": (1,)}, 10), Entry(b"b", None, 11.5, subkey=3), Entry(("c", 1), 2, 12.0)]
    assert signed_slots(entries, ALICE) == [
        (key_of("a").digest, Slot(PLAIN, encode_value({"x": (1,)}), 10.0)),
        (key_of(b"b").digest, Slot(encode_subkey(3), encode_value(None), 11.5)),
        (key_of(("c", 1)).digest, Slot(PLAIN, encode_value(2), 12.0)),
    ]


def test_those_that_are_to_be_owned_are_signed():
    entries = [Entry(f"n{at}", at, 10.0, is_owned=at % 3 == 0) for at in range(200)]
    entries.append(Entry("dict", 1, 10.0, subkey=reserved(ALICE.peer_id), is_owned=True))
    check = Validator().check
    for entry, (key, slot) in zip(entries, signed_slots(entries, ALICE), strict=True):
        assert check(key, slot) is None
        assert signer_of(slot) == (ALICE.peer_id if entry.is_owned else None)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry("a", 1, float("nan")), "cannot expire"),
        (Entry("a", 1, None), "cannot expire"),
        (Entry("a", {1, 2}, 1.0), "set"),
        (Entry("a", object(), 1.0), "cannot be stored"),
        (Entry("a", 1, 1.0, subkey=1.5), "subkey"),
        (Entry("a", 1, 1.0, subkey=["a"]), "subkey"),
        (Entry({1}, 1, 1.0), "set"),
    ],
)
def test_what_cannot_be_an_entry_is_told(entry, why):
    with pytest.raises(UsageError, match=why):
        signed_slots([Entry("fine", 1, 1.0), entry], ALICE)


# --- caching on the way ---


def cachers(swarm, name):
    """Who has a copy of a record, of those that do not hold it, nearest first."""
    key = key_of(name).digest
    peers = {host: swarm.peers[host] for host in swarm.nearest(name) if host not in swarm.holders(name)}
    return [host for host, peer in peers.items() if peer.records.get(key, peer.wall_s())]


def test_a_found_value_is_cached_by_the_reader_and_where_the_next_passes_by():
    async def work(swarm, *peers):
        name = "name"
        nearest = swarm.nearest(name)
        keep_at(swarm.peers[nearest[4]], name, "value")
        reader = swarm.peers[nearest[-1]]
        assert (await reader.get(name)).value == "value"
        await asyncio.sleep(1)
        nearer, last = cachers(swarm, name)
        assert last == nearest[-1]
        assert nearest.index(nearer) < 4
        num_finds = reader.counts.num_finds
        assert (await reader.get(name)).value == "value"
        assert reader.counts.num_finds == num_finds
        num_hops = []
        for host in nearest[10:25]:
            assert (await swarm.peers[host].get(name)).value == "value"
            num_hops += swarm.peers[host].last_hops
        assert max(num_hops) <= 2

    in_world(work, 40)


def test_a_cached_value_ends_with_the_record():
    async def work(swarm, *peers):
        await peers[1].store("name", "value", peers[1].in_s(20))
        assert (await peers[9].get("name")).value == "value"
        await asyncio.sleep(21)
        assert [await peer.get("name") for peer in peers] == [None] * len(peers)

    in_world(work, 12)


def test_what_is_too_large_for_a_datagram_is_cached_by_the_reader_alone():
    async def work(swarm, *peers):
        nearest = swarm.nearest("name")
        keep_at(swarm.peers[nearest[4]], "name", b"x" * 5_000)
        assert await swarm.peers[nearest[-1]].get("name")
        await asyncio.sleep(1)
        assert cachers(swarm, "name") == [nearest[-1]]

    in_world(work, 20)


# --- absence ---


def marked(swarm, name):
    """Who says of a name that there is nothing, nearest first."""
    key = key_of(name).digest
    return [
        host for host in swarm.nearest(name) if swarm.peers[host].cache.is_absent(key, peer_wall_s(swarm))
    ]


def peer_wall_s(swarm):
    return next(iter(swarm.peers.values())).wall_s()


async def look(peer, name, **options):
    """What is found, and how many requests that took."""
    before = peer.counts.num_finds
    (found,) = await peer.get_coordinates([name], **options)
    await asyncio.sleep(0.1)
    return found, peer.counts.num_finds - before


def test_absence_is_told_to_the_nearest_and_shortens_the_next_look_up():
    async def work(swarm, *peers):
        num_first = num_again = 0
        for at in range(6):
            name = f"ffn.{at}."
            nearest = swarm.nearest(name)
            found, num_finds = await look(swarm.peers[nearest[20]], name)
            num_first += num_finds
            assert found is None
            assert marked(swarm, name) == nearest[:3]
            again, num_finds = await look(swarm.peers[nearest[30]], name)
            num_again += num_finds
            assert again is None
        assert num_again < 0.85 * num_first
        await asyncio.sleep(peers[0].settings.absent_s)
        assert not any(marked(swarm, f"ffn.{at}.") for at in range(6))

    in_world(work, 40)


def test_nothing_is_told_when_it_is_not_to_be_remembered():
    async def work(swarm, *peers):
        assert (await look(peers[1], "ffn.3.", remembers_absence=False))[0] is None
        assert marked(swarm, "ffn.3.") == []

    in_world(work, 10)


def test_a_store_ends_absence_at_once():
    async def work(swarm, *peers):
        await look(peers[5], "ffn.3.")
        assert await peers[6].store("ffn.3.", 1, peers[6].in_s(60), subkey=14)
        for peer in peers:
            assert await peer.get_coordinates(["ffn.3."]) == [(14,)]

    in_world(work, 25)


def test_one_marked_peer_that_was_told_is_enough():
    """Of the peers that know of an absence only one has heard of what was stored since."""

    async def work(swarm, *peers):
        for at in range(3):
            name = f"ffn.{at}."
            await look(peers[5], name)
            told = marked(swarm, name)[at]
            keep_at(swarm.peers[told], name, 1, subkey=14)
            for host in swarm.nearest(name)[3:]:
                assert await swarm.peers[host].get_coordinates([name]) == [(14,)]

    in_world(work, 25)


def test_markers_of_liars_hide_no_record():
    """They mark a name as absent at every peer that does not hold it."""

    async def work(swarm, *peers):
        keys = [key_of("ffn.3.").digest]
        assert await peers[6].store("ffn.3.", 1, peers[6].in_s(60), subkey=14)
        assert await peers[6].store("value", 1, peers[6].in_s(60))
        for peer in peers:
            absent = [*keys, key_of("value").digest]
            await send_store(peers[0], peer, Store(0, [], absent=absent, absent_s=300.0))
        assert len(marked(swarm, "ffn.3.")) == len(peers) - len(swarm.holders("ffn.3."))
        for peer in peers:
            assert await peer.get_coordinates(["ffn.3."]) == [(14,)]
            assert (await peer.get("value")).value == 1

    in_world(work, 25)


def test_many_absences_travel_in_datagrams():
    async def work(swarm, *peers):
        names = [f"ffn.{at}." for at in range(5 * MAX_WANTS)]
        assert await peers[1].get_coordinates(names) == [None] * len(names)
        await asyncio.sleep(1)
        assert sum(len(marked(swarm, name)) for name in names) >= 2 * len(names)
        assert sum(peer.endpoint.streams.num_connections for peer in peers) == 0

    in_world(work, 4)
