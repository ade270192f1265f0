"""Peers come and are killed without a word, half of them every ten minutes, and records stay readable."""

import asyncio
import gc
import random
import sys
import types

import pytest

from dht.living_swarm import LivingSwarm
from shoal.core import VirtualLoop, run_virtual
from shoal.dht.records import Entry
from shoal.dht.wire import ContactBook
from shoal.transport import MemoryNetwork
from shoal.transport.network.memory import MemoryHost

NUM_OWNERS = 4
NUM_RECORDS = 10
LIFETIME_S = 600.0
SHARED = "all owners"
NOT_ITS_OWN = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.CodeType,
    MemoryNetwork,
    MemoryHost,
    VirtualLoop,
    asyncio.Task,
    ContactBook,  # remembers whom it has met, up to a limit of its own
)


class Churn:
    """Owners and an observer that live, and others of which some are replaced every minute."""

    def __init__(self, num_peers, seed=0):
        self.swarm = LivingSwarm(seed=seed)
        self.random = random.Random(seed)
        self.num_peers = num_peers
        self.mortals = []
        self.num_killed = 0
        self.lost = []
        self.num_read = 0
        self.sizes = []

    async def run(self, num_minutes):
        async with self.swarm:
            await self._begin()
            every_s = 600.0 / (self.num_peers / 2)
            next_kill_s = every_s
            for minute in range(1, num_minutes + 1):
                while next_kill_s <= minute * 60:
                    await asyncio.sleep(next_kill_s - asyncio.get_running_loop().time())
                    await self._replace_one()
                    next_kill_s += every_s
                await asyncio.sleep(max(0.0, minute * 60 - asyncio.get_running_loop().time()))
                await self._read_all(minute)
                self.sizes.append(sizes_of(self.swarm.peers["observer"]))

    async def _begin(self):
        await self.swarm.start("observer", join=[])
        owners = [await self.swarm.start(f"owner{number}") for number in range(NUM_OWNERS)]
        while len(self.swarm.peers) < self.num_peers:
            await self._start_one()
        for number, owner in enumerate(owners):
            owner.keeper.keep(lambda at_s, number=number: entries(number, at_s), LIFETIME_S)
        await asyncio.sleep(1)

    async def _start_one(self):
        name = f"m{len(self.mortals) + self.num_killed}"
        join = self.random.sample(list(self.swarm.peers), min(3, len(self.swarm.peers)))
        await self.swarm.start(name, join=join)
        self.mortals.append(name)

    async def _replace_one(self):
        victim = self.mortals.pop(self.random.randrange(len(self.mortals)))
        await self.swarm.kill(victim)
        self.num_killed += 1
        await self._start_one()

    async def _read_all(self, minute):
        """By the newest peer, which has nothing cached, by any other, and by the observer."""
        names = [f"record {number}.{index}" for number in range(NUM_OWNERS) for index in range(NUM_RECORDS)]
        for reader in (self.mortals[-1], self.random.choice(self.mortals), "observer"):
            dht = self.swarm.peers[reader]
            found = await dht.get_many(names)
            self.num_read += len(found)
            self.lost += [
                (minute, reader, name) for name, value in zip(names, found, strict=True) if value is None
            ]
            shared = await dht.get(SHARED, latest=True)
            if shared is None or len(shared.value) < NUM_OWNERS:
                self.lost.append((minute, reader, SHARED))


def entries(number, at_s):
    records = [
        Entry(f"record {number}.{index}", index, at_s, is_owned=index == 0) for index in range(NUM_RECORDS)
    ]
    return [*records, Entry(SHARED, number, at_s, subkey=number)]


def sizes_of(dht):
    """How much a peer keeps of each kind."""
    return {
        "contacts": len(dht.table),
        "records": len(dht.storage),
        "record bytes": dht.storage.size_bytes,
        "cached": len(dht.cache),
        "sessions": dht.endpoint.datagrams.num_sessions,
        "connections": dht.endpoint.streams.num_connections,
        "bytes": own_bytes(dht),
    }


def own_bytes(root):
    """The memory of all that can be reached from an object and is not shared by the whole world."""
    seen = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, NOT_ITS_OWN):
            seen[id(each)] = sys.getsizeof(each)
            waiting += gc.get_referents(each)
    return sum(seen.values())


def check_flat(sizes, num_came):
    """In the last ten minutes nothing is more than in the second ten, but for chance.

    In all, a peer may remember a little of everyone who came: who said hello, and how often it asked. Those
    memories are small and have limits of their own, which an hour does not reach.
    """
    for kind in sizes[0]:
        early, late = (
            sum(minute[kind] for minute in minutes) / 10 for minutes in (sizes[10:20], sizes[-10:])
        )
        remembered = 512 * num_came if kind == "bytes" else 5
        assert late <= 1.2 * early + remembered, (kind, early, late)
        assert sizes[-1]["bytes"] < 1 << 20


def test_records_that_owners_refresh_stay_readable():
    churn = Churn(num_peers=24)
    run_virtual(churn.run(num_minutes=10))
    assert churn.num_killed == 12
    assert churn.lost == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_hour_of_churn():
    churn = Churn(num_peers=60)
    run_virtual(churn.run(num_minutes=60))
    assert churn.num_killed == 180
    assert churn.num_read == 60 * 3 * NUM_OWNERS * NUM_RECORDS
    assert churn.lost == []
    check_flat(churn.sizes, churn.num_killed)
