"""Many peers are killed at once, without a word: whatever record has a replica left is found.

Where 40 % of 128 peers die, all five replicas of a record die with them in 0.9 % of the cases, and where 20 %
die in 0.025 %: no look-up finds those. So 99.1 % and 99.97 % can be found at best, before any of the living
has done anything about it.
"""

import random

import pytest

from dht.worlds import in_world
from shoal.core import Deadline, fanout

NUM_PEERS, NUM_RECORDS = 128, 400


async def store_all(peers):
    """Every record is written by another peer, which holds it only if it is near."""
    for at in range(NUM_RECORDS):
        writer = peers[at % len(peers)]
        assert await writer.store(f"record {at}", at, writer.in_s(3600.0))


async def kill_at_once(swarm, num_killed, chance):
    victims = chance.sample(list(swarm.peers), num_killed)
    for name in victims:
        swarm.network.hosts[name].kill()
    for name in victims:
        await swarm.kill(name)


async def read_all(swarm, chance):
    """Every record by any peer that lives: those that were found, and those that had a replica left."""
    names = [f"record {at}" for at in range(NUM_RECORDS)]
    left = [name for name in names if swarm.holders(name)]
    readers = [swarm.peers[chance.choice(list(swarm.peers))] for _ in names]
    reads = [reader.get(name) for reader, name in zip(readers, names, strict=True)]
    values = await fanout(reads, Deadline.after(120.0), limit=16)
    found = [name for at, name in enumerate(names) if getattr(values[at], "value", None) == at]
    return found, left


def killed(share, seed):
    async def work(swarm):
        chance = random.Random(seed)
        peers = [await swarm.start(f"s{seed}p{at}") for at in range(NUM_PEERS)]
        await store_all(peers)
        await kill_at_once(swarm, round(share * NUM_PEERS), chance)
        return await read_all(swarm, chance)

    return in_world(work, seed=seed)


@pytest.mark.parametrize(("share", "least"), [(0.4, 0.99), (0.2, 0.999)])
def test_what_has_a_replica_left_is_found(share, least):
    found, left = killed(share, seed=0)
    assert found == left
    assert len(found) >= least * NUM_RECORDS


@pytest.mark.slow
@pytest.mark.parametrize(("share", "least"), [(0.4, 0.99), (0.2, 0.999)])
def test_so_it_is_in_many_swarms(share, least):
    num_found = 0
    for seed in range(1, 6):
        found, left = killed(share, seed)
        assert found == left
        num_found += len(found)
    assert num_found >= least * 5 * NUM_RECORDS
