"""Peers of a DHT on links in memory, for tests in virtual time."""

import contextlib
import hashlib

from shoal.core import Address, run_virtual
from shoal.core.identity import Identity
from shoal.dht.node import DHT
from shoal.dht.settings import DHTSettings
from shoal.transport import Endpoint
from shoal.transport.network.memory import MemoryNetwork


class MemorySwarm:
    """Opens peers that join by the first one; all are closed with the block."""

    def __init__(self, conditions=None, seed=0):
        self.network = MemoryNetwork(conditions, seed)
        self.peers = []
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        await self._closing.aclose()

    async def add(self, **settings):
        """One more peer, with these settings."""
        name = f"p{len(self.peers)}"
        identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        host = self.network.host(name)
        endpoint = await self._closing.enter_async_context(Endpoint(network=host, peer_id=identity.peer_id))
        await endpoint.listen(Address(name, 0))
        join = [self.peers[0].peer.address] if self.peers else []
        dht = DHT(join=join, identity=identity, endpoint=endpoint, settings=DHTSettings(**settings))
        self.peers.append(dht)
        return await self._closing.enter_async_context(dht)

    async def add_many(self, num_peers):
        """Several of them."""
        return [await self.add() for _ in range(num_peers)]

    def num_streams(self):
        """Connections that are open, anywhere in the swarm."""
        return sum(peer.endpoint.streams.num_connections for peer in self.peers)


def in_swarm(num_peers, work):
    """Run `work(swarm, *peers)` in a swarm of so many peers."""

    async def main():
        async with MemorySwarm() as swarm:
            return await work(swarm, *await swarm.add_many(num_peers))

    return run_virtual(main())
