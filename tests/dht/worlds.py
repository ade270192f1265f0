"""Swarms in virtual time, with peers that do not listen and peers that lie among them."""

import contextlib
import hashlib

import msgspec

from dht.living_swarm import LivingSwarm
from dht.signing import sign
from shoal.core import Address, Deadline, Peer, run_virtual
from shoal.core.identity import Identity
from shoal.dht.node import DHT
from shoal.dht.records import PLAIN, Slot, Verdict, encode_subkey, encode_value, key_of
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import (
    FIND,
    PING,
    STORE,
    Find,
    Finding,
    Found,
    Item,
    LookupKind,
    Ping,
    Pong,
    State,
    Store,
    StoreAnswer,
    Want,
    number_of,
    pack,
    pack_coordinates,
)
from shoal.transport import Endpoint, Reply

NUM_HUGE = 3000
"""Contacts that a liar names who names very many."""


def in_world(work, num_peers=0, *, conditions=None, seed=0, secret=None, **settings):
    """Run `work(swarm, *peers)` in a swarm of so many peers, in virtual time."""

    async def main():
        async with LivingSwarm(conditions, seed=seed, secret=secret, **settings) as swarm:
            return await work(swarm, *await swarm.start_many(num_peers))

    return run_virtual(main())


def identity_of(name):
    """The same one each time."""
    return Identity.from_seed(hashlib.sha256(name.encode()).digest())


@contextlib.asynccontextmanager
async def opened(swarm, name, *, is_listening=True, **options):
    """A peer beside the swarm's own, with what a DHT can be given."""
    options.setdefault("identity", identity_of(name))
    async with Endpoint(network=swarm.network.host(name), peer_id=options["identity"].peer_id) as endpoint:
        if is_listening:
            await endpoint.listen(Address(name, 1024))
        async with DHT(endpoint=endpoint, **options) as dht:
            yield dht


def client_of(swarm, name="client", **settings):
    """A peer that only dials out."""
    return opened(
        swarm,
        name,
        is_listening=False,
        join=[next(iter(swarm.peers.values())).peer.address],
        settings=DHTSettings(is_client=True, **settings),
    )


def keep_at(dht, name, value, lifetime_s=60.0, subkey=None):
    """Have one peer alone hold a record; its verdict."""
    subkey = PLAIN if subkey is None else encode_subkey(subkey)
    slot = Slot(subkey, encode_value(value), dht.in_s(lifetime_s))
    return dht.records.store(key_of(name).digest, slot, dht.wall_s())


async def send(sender, target, method, payload):
    """Send a request as it is, past everything that an honest peer does before; the raw answer."""
    reply = await sender.endpoint.datagrams.call(target.peer, method, payload, deadline=Deadline.after(3))
    return reply.payload


async def send_store(sender, target, store):
    """Send a Store likewise; the verdicts."""
    answer = msgspec.msgpack.decode(await send(sender, target, STORE, store), type=StoreAnswer)
    return [Verdict(code) for code in answer.verdicts]


async def send_find(sender, target, *wants, port=0):
    """Send a Find likewise."""
    return msgspec.msgpack.decode(await send(sender, target, FIND, Find(port, list(wants))), type=Found)


async def send_slots(sender, target, name, *slots, **options):
    """Send slots of one name to one peer, likewise."""
    return await send_store(sender, target, Store(0, [Item(key_of(name).digest, list(slots))], **options))


class Liar:
    """A peer that is who it says it is, and nothing else that it says is true.

    It answers every request: it has wrong values of every key, knows only of peers that are of no use, and
    says that it stored what it has thrown away.
    """

    def __init__(self, swarm, name, *, values="owned", near="invented", is_absent=False, peer_id=None):
        self.identity = identity_of(name)
        self.peer_id = peer_id or self.identity.peer_id
        """Where there is no secret, whatever it claims to be."""
        if peer_id is None:
            self.endpoint = swarm.endpoint(name, self.identity)
        else:
            self.endpoint = Endpoint(network=swarm.network.host(name), peer_id=peer_id)
        self.values = values
        """Its answer to every question: owned and unowned values, or None for nothing."""
        self.near = near
        """Whom it tells of: other liars, invented peers, honest ones where they are not, or very many."""
        self.is_absent = is_absent
        self.others = []
        """Contacts of other liars, packed, and of honest peers."""
        self.honest = []
        self.num_asked = 0
        self._swarm = swarm
        self._name = name
        self._num_told = 0
        chance = swarm.network.host(name).random
        self._endings = [
            chance.randbytes(6) + b"\x04\x00\x00" + f"nowhere{index}".encode() for index in range(NUM_HUGE)
        ]
        self.endpoint.handle(PING, self._ping, payload_type=Ping)
        self.endpoint.handle(FIND, self._find, payload_type=Find)
        self.endpoint.handle(STORE, self._store, payload_type=Store)

    async def __aenter__(self):
        await self.endpoint.__aenter__()
        await self.endpoint.listen(Address(self._name, 1024))
        self.peer = Peer(Address(self._name, 1024), self.peer_id)
        return self

    async def __aexit__(self, *error):
        await self.endpoint.__aexit__(*error)

    async def mingle(self, peers):
        """Become known to all of these."""
        for peer in peers:
            await self.call(peer, FIND, Find(1024, []))

    async def call(self, target, method, payload):
        """Ask; what comes back."""
        return await self.endpoint.datagrams.call(target.peer, method, payload, deadline=Deadline.after(3))

    def _ping(self, head, buffers):
        wall_s = self.endpoint.network.clock.wall_s()
        return _reply(Pong(self.peer_id.digest, str(head.peer.address), wall_s))

    def _store(self, head, buffers):
        items = head.payload.items
        told = [self._contacts(Want(item.key))[:8] for item in items[:4]]
        near = [bytes(range(8 * at, 8 * at + len(some))) for at, some in enumerate(told)]
        verdicts = bytes(sum(len(item.slots) for item in items))
        return _reply(StoreAnswer(verdicts, [contact for some in told for contact in some], near))

    def _find(self, head, buffers):
        self.num_asked += 1
        contacts = []
        findings = []
        for want in head.payload.wants:
            told = self._contacts(want)
            near = bytes(range(len(contacts), min(256, len(contacts) + len(told))))
            contacts += told
            findings.append(self._finding(want, near))
        return _reply(Found(contacts, findings))

    def _finding(self, want, near):
        if want.kind == LookupKind.PEERS or (self.values is None and not self.is_absent):
            return Finding(State.NOTHING, near)
        if self.is_absent:
            return Finding(State.ABSENT, near)
        if want.kind == LookupKind.COORDINATES:
            return Finding(State.HERE, near, [], pack_coordinates([6, 66, 666]))
        expires_at_s = self.endpoint.network.clock.wall_s() + 6 * 86_400
        lie = encode_value("a lie")
        if self.values == "owned":
            return Finding(State.HERE, near, [sign(self.identity, want.key, PLAIN, lie, expires_at_s)])
        return Finding(State.HERE, near, [Slot(PLAIN, lie, expires_at_s)])

    def _contacts(self, want):
        number = number_of(want.key)
        if self.near == "liars":
            return sorted(self.others, key=lambda packed: number_of(packed[:20]) ^ number)[:8]
        if self.near == "stolen":
            nearest = sorted(self.honest, key=lambda packed: number_of(packed[:20]) ^ number)[:8]
            return [packed[:20] + b"\x04\x00" + packed[22:] + b"x" for packed in nearest]
        self._num_told += 1
        num = 8 if self.near == "invented" else NUM_HUGE
        start = want.key[:10] + self._num_told.to_bytes(4)
        return [start + end for end in self._endings[:num]]


@contextlib.asynccontextmanager
async def liars_among(swarm, num_liars, *, label="", **lies):
    """So many liars, of all kinds unless one is given, that know each other and all peers of the swarm."""
    kinds = ["liars", "invented", "stolen", "huge"]
    async with contextlib.AsyncExitStack() as closing:
        liars = []
        for index in range(num_liars):
            options = {"near": kinds[index % len(kinds)], **lies}
            liar = Liar(swarm, f"{label}liar{index}", **options)
            liars.append(await closing.enter_async_context(liar))
        for liar in liars:
            liar.others = [pack(other.peer) for other in liars if other is not liar]
            liar.honest = [pack(peer.peer) for peer in swarm.peers.values()]
            await liar.mingle(swarm.peers.values())
        yield liars


def _reply(answer):
    return Reply(msgspec.msgpack.encode(answer))
