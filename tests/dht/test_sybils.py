"""Sybils around one key: 64 peers that claim the ids nearest to it, between the key and every honest peer.

They can keep back the record there, and the one in so many that lies nearer to them than to any honest peer:
all whom a look-up asks in the end are theirs, and so are all with whom its owner stores it. They cannot put
another in its place where only its owner may write, and they cannot make a look-up last. Every other
record is found.
"""

import asyncio
import contextlib
import itertools

import pytest

from dht.worlds import Liar, in_world
from shoal.core import PeerId
from shoal.dht.records import reserved_key
from shoal.dht.wire import number_of, pack

NUM_HONEST, NUM_SYBILS = 40, 64


@contextlib.asynccontextmanager
async def sybils_around(swarm, key, **lies):
    """Peers at the 64 ids nearest to a key, known to everybody and told of by each other."""
    number = number_of(key.digest)
    async with contextlib.AsyncExitStack() as closing:
        sybils = []
        for index in range(NUM_SYBILS):
            peer_id = PeerId((number ^ index + 1).to_bytes(20))
            sybil = Liar(swarm, f"sybil{index}", near="liars", peer_id=peer_id, **lies)
            sybils.append(await closing.enter_async_context(sybil))
        for sybil in sybils:
            sybil.others = [pack(other.peer) for other in sybils if other is not sybil]
            await sybil.mingle(swarm.peers.values())
        yield sybils


def is_in_the_shadow(swarm, key, other):
    """Whether no honest peer is nearer to another key than the sybils are."""
    number = number_of(other.digest)
    honest = [number_of(peer.peer_id.digest) ^ number for peer in swarm.peers.values()]
    return min(honest) > number_of(key.digest) ^ number


async def timed(work):
    """What came of it, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    return await work, loop.time() - began_s


@pytest.mark.parametrize("values", ["owned", "unowned", None], ids=["signed lies", "lies", "silence"])
def test_records_there_may_be_kept_back_but_no_others_and_none_is_wrong(values):
    async def work(swarm, owner, *others):
        key = reserved_key(owner.peer_id, "address")
        for peer in (owner, *others):
            mine = reserved_key(peer.peer_id, "address")
            assert await peer.store(mine, str(peer.peer_id), peer.in_s(3600.0), is_owned=True)
        holders = [swarm.peers[name] for name in swarm.holders(key)]
        async with sybils_around(swarm, key, values=values) as sybils:
            num_found = 0
            for peer, reader in itertools.product((owner, *others), others[::9]):
                theirs = reserved_key(peer.peer_id, "address")
                found, took_s = await timed(reader.get(theirs))
                assert found is None or found[0::2] == (str(peer.peer_id), peer.peer_id)
                assert found is not None or is_in_the_shadow(swarm, key, theirs)
                assert took_s < 10.0
                num_found += found is not None
            assert num_found > 0.9 * NUM_HONEST * len(others[::9])
            assert sum(sybil.num_asked for sybil in sybils) > 0
            for holder in holders:
                assert (await holder.get(key)).owner == owner.peer_id
            await owner.store(key, "still here", owner.in_s(7200.0), is_owned=True)
            found, took_s = await timed(others[7].get(key, latest=True))
            assert found is None or found.owner == owner.peer_id
            assert took_s < 10.0
        for reader in others[::9]:  # when they have gone
            assert (await reader.get(key)).owner == owner.peer_id

    in_world(work, NUM_HONEST)
