"""A swarm in which 30 % of the peers lie: what honest peers own is found, by honest peers, as they stored it.

Liars are known to everybody, which honest peers are not. They have a value for every key, signed by them and
later than any other; they name only each other, peers that are nowhere, honest peers where they are not, or
thousands; they say that they have stored what they did not keep; they flood honest peers with requests.

What they cannot do is to write where only its owner may: under a key of its own, or under a subkey of its own
where a schema asks for such subkeys. Under a name that is anybody's, a signed lie is as good as a record.

One record in about a thousand is not stored by any honest peer, where the five peers nearest to it that its
owner knows of all lie: until its owner stores it again, as the keeper does.
"""

import asyncio
import itertools

import pytest

from dht.signing import sign
from dht.worlds import in_world, liars_among, send_slots
from shoal.core import Deadline, Key, PeerBusy, fanout
from shoal.dht.records import (
    PLAIN,
    Entry,
    OwnSubkey,
    Schema,
    Slot,
    Verdict,
    encode_value,
    key_of,
    reserved,
    reserved_key,
)
from shoal.dht.wire import FIND, STORE, Find, Item, Store, Want
from shoal.transport import SwarmSecret

NUM_HONEST, NUM_LIARS = 42, 18
LABELS = ("one",)
READ_BY = (5, 17, 23)


async def honest_peers(swarm, seed, num_peers):
    """Peers that hold records of one namespace to subkeys of their writers' own."""
    schema = Schema("group", int, OwnSubkey)
    return [await swarm.start(f"s{seed}p{at}", schemas=[schema]) for at in range(num_peers)]


async def settle(peers):
    """What use makes of a swarm: everybody has looked for something, somewhere."""
    for peer in peers:
        await peer.find_nearest(Key(peer.endpoint.network.random.randbytes(20)), 8)


async def store_all(peers, lifetime_s):
    """Have everybody store its records."""
    for at, peer in enumerate(peers):
        until_s = peer.in_s(lifetime_s)
        mine = [Entry(reserved_key(peer.peer_id, label), at, until_s, None, True) for label in LABELS]
        mine.append(Entry(f"plain.{at}", at, until_s, None, True))
        mine.append(Entry("group", at, until_s, reserved(peer.peer_id), True))
        assert all(await peer.store_many(mine))


async def read_all(peers):
    """Records of keys that are their owners' own: how many are found, of how many; none may be wrong."""
    num_found = num_read = 0
    for at, step in itertools.product(range(len(peers)), READ_BY):
        owner, reader = peers[at], peers[(at + step) % len(peers)]
        names = [reserved_key(owner.peer_id, label) for label in LABELS]
        found = [one for one in await reader.get_many(names) if one is not None]
        assert all((one.value, one.owner) == (at, owner.peer_id) for one in found)
        num_found += len(found)
        num_read += len(names)
    return num_found, num_read


async def read_group(peers, reader):
    """How many of the honest peers' entries in the shared dictionary are right."""
    found = (await reader.get("group", latest=True)).value
    entries = [found.get(reserved(peer.peer_id)) for peer in peers]
    assert all(entry is None or entry[0::2] == (at, peers[at].peer_id) for at, entry in enumerate(entries))
    return sum(entry is not None for entry in entries)


async def squat(liar, peers):
    """Be there first, with a plain value where others want to have subkeys; the verdicts."""
    key = key_of("group").digest
    lie = sign(liar.identity, key, PLAIN, encode_value("a lie"), peers[0].in_s(86_400.0))
    return [(await send_slots(liar, peer, "group", lie))[0] for peer in peers]


@pytest.mark.parametrize("secret", [None, SwarmSecret(bytes(range(32)))], ids=["open", "secret"])
def test_honest_owned_records_are_found(secret):
    async def work(swarm):
        peers = await honest_peers(swarm, 0, NUM_HONEST)
        async with liars_among(swarm, NUM_LIARS, label="s0") as liars:
            assert await squat(liars[0], peers) == [Verdict.BAD_VALUE] * NUM_HONEST
            await settle(peers)
            await store_all(peers, 3600.0)
            num_found, num_read = await read_all(peers)
            assert num_found >= 0.99 * num_read
            names = [reserved_key(peer.peer_id, label) for peer in peers for label in LABELS]
            num_lost = sum(not swarm.holders(name) for name in names)
            assert num_read - num_found == num_lost * len(READ_BY)
            for reader in peers[::14]:
                assert await read_group(peers, reader) >= NUM_HONEST - 1
            for liar in liars:
                liar.values = "unowned"
            for at in range(0, NUM_HONEST, 6):
                found = await peers[at - 7].get(f"plain.{at}", latest=True)
                assert (found.value, found.owner) == (at, peers[at].peer_id)
        assert min(liar.num_asked for liar in liars) > 0

    in_world(work, secret=secret)


@pytest.mark.slow
@pytest.mark.parametrize("is_absent", [False, True])
@pytest.mark.parametrize("seed", range(1, 5))
def test_all_of_those_that_their_owners_refresh_are_found(seed, is_absent):
    async def work(swarm):
        peers = await honest_peers(swarm, seed, NUM_HONEST)
        async with liars_among(swarm, NUM_LIARS, label=f"s{seed}", is_absent=is_absent):
            await settle(peers)
            await store_all(peers, 120.0)
            await asyncio.sleep(60.0)
            await store_all(peers, 3600.0)
            await asyncio.sleep(60.0)
            num_found, num_read = await read_all(peers)
            assert num_found == num_read
            for reader in peers[::6]:
                assert await read_group(peers, reader) == NUM_HONEST

    in_world(work, seed=seed)


# --- floods ---


async def flood(liar, peer, num_requests):
    """Send as much as goes: junk to be stored, and questions; how much of it was refused as too much."""
    chance = peer.endpoint.network.random
    until_s = peer.in_s(86_400.0)
    requests = []
    for _ in range(num_requests):
        junk = [Item(chance.randbytes(20), [Slot(PLAIN, bytes(20), until_s)]) for _ in range(12)]
        requests.append(liar.call(peer, STORE, Store(1024, junk)))
        requests.append(liar.call(peer, FIND, Find(1024, [Want(chance.randbytes(20)) for _ in range(30)])))
    outcomes = await fanout(requests, Deadline.after(60.0))
    return sum(isinstance(one, PeerBusy) for one in outcomes) / len(outcomes)


def test_floods_fill_no_memory_and_keep_nobody_from_reading():
    async def work(swarm):
        peers = await honest_peers(swarm, 9, 14)
        async with liars_among(swarm, 4, label="s9", near="liars") as liars:
            await store_all(peers, 3600.0)
            for _ in range(2):
                floods = [flood(liar, peer, 20) for liar in liars for peer in peers[:5]]
                assert min(await fanout(floods, Deadline.after(60.0))) > 0.0
                num_found, num_read = await read_all(peers)
                assert num_found >= 0.95 * num_read
                await asyncio.sleep(2.0)
            assert max(len(peer.storage) for peer in peers) == 200
            assert max(len(peer.cache) for peer in peers) <= 100
            assert max(len(peer.cache.absent) for peer in peers) <= 100

    in_world(work, max_records=200, max_cached=100, max_records_a_s=50.0, max_messages_a_s=100.0)
