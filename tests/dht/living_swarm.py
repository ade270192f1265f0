"""Peers of a DHT on links in memory that come, are killed without a word, and come back."""

import contextlib
import hashlib

from shoal.core import Address
from shoal.core.identity import Identity
from shoal.dht.node import DHT
from shoal.dht.records import key_of
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import number_of
from shoal.transport import Endpoint, Membership, MemoryNetwork


class LivingSwarm:
    """Peers by name; those that live at the end are closed with the block."""

    def __init__(self, conditions=None, *, seed=0, secret=None, **settings):
        self.network = MemoryNetwork(conditions, seed)
        self.secret = secret
        """The swarm's, if it has one: then ids are proven, else they are claims."""
        self.settings = DHTSettings(**settings)
        self.peers = {}
        self._closing = {}
        self._num_named = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        for name in list(self.peers):
            await self.stop(name)

    async def start(self, name=None, *, join=None, **options):
        """One more peer; it joins by the names given, or by the first that lives."""
        if name is None:
            name = f"p{self._num_named}"
            self._num_named += 1
        identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        addresses = [Address(each, 1024) for each in (list(self.peers)[:1] if join is None else join)]
        async with contextlib.AsyncExitStack() as closing:
            endpoint = self.endpoint(name, identity)
            await closing.enter_async_context(endpoint)
            await endpoint.listen(Address(name, 1024))
            dht = DHT(
                join=addresses,
                identity=identity,
                endpoint=endpoint,
                settings=options.pop("settings", self.settings),
                **options,
            )
            await closing.enter_async_context(dht)
            self._closing[name] = closing.pop_all()
        self.peers[name] = dht
        return dht

    def endpoint(self, name, identity):
        """An endpoint of a member of the swarm."""
        membership = None if self.secret is None else Membership(identity, self.secret)
        host = self.network.host(name)
        return Endpoint(network=host, peer_id=identity.peer_id, membership=membership)

    async def start_many(self, num_peers, **options):
        """Several of them."""
        return [await self.start(**options) for _ in range(num_peers)]

    async def stop(self, name):
        """Close a peer."""
        del self.peers[name]
        await self._closing.pop(name).aclose()

    async def kill(self, name):
        """End a peer: nobody hears from it any more."""
        self.network.hosts[name].kill()
        await self.stop(name)
        del self.network.hosts[name]

    def holders(self, name):
        """The names of those that hold a record, nearest first."""
        key = key_of(name).digest
        return [
            each
            for each in self.nearest(name)
            if self.peers[each].storage.get(key, self.peers[each].wall_s())
        ]

    def nearest(self, name):
        """The names of all that live, nearest to a record first."""
        number = number_of(key_of(name).digest)
        return sorted(self.peers, key=lambda each: number_of(self.peers[each].peer_id.digest) ^ number)
