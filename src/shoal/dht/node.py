"""A peer of the DHT: what programs call.

A get looks into this peer's own `records` first and then runs a look-up over the swarm (`search`), a store
is a look-up of the nearest peers and a request to each (`store`). All talking to others is `protocol`'s; how
a peer becomes part of the swarm is `join`'s, what it does unasked `upkeep`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.core import Address, Deadline, Key, Peer, PeerId, UsageError
from shoal.core.identity import Identity
from shoal.core.ids import is_loopback
from shoal.dht.join import Joining
from shoal.dht.protocol import Answered, DHTProtocol
from shoal.dht.records import (
    Entry,
    OwnSubkey,
    Schema,
    Stored,
    Validator,
    Value,
    encode_value,
    key_of,
    owner_of_subkey,
    reserved,
    value_of,
)
from shoal.dht.replication import Keeper, Kept
from shoal.dht.search import Lookup, find_records, look_up, mark_absent
from shoal.dht.settings import DHTSettings
from shoal.dht.store import signed_slots, store_slots
from shoal.dht.upkeep import Upkeep
from shoal.dht.wire import About, Contact, LookupKind, coordinates_of
from shoal.transport import Endpoint, Membership
from shoal.transport.network.sockets import is_wildcard, outward_host
from shoal.transport.relay import DEFAULT_LIMITS, NUM_RELAYS, RelayLimits

_PRESENCE = "presence"
_SCHEMAS = (Schema(_PRESENCE, Any, OwnSubkey),)  # nobody can be there first with something else


class DHT:
    """A peer of the swarm's DHT; open it with `async with` on the loop that it should live on.

    Names are hashed into keys; every value expires. `join` are addresses of any peers that are there; without
    them a swarm begins here; of a relayed one the relay is joined by. Without `listen` it is a client, which
    asks and stores nothing for others; they can call it after `use_relays`. An `endpoint` that is given is
    open already, and stays open; without one, the DHT has its own, which relays for others within `relaying`.
    """

    def __init__(
        self,
        *,
        join: Sequence[Address | str] = (),
        listen: Address | str | None = "127.0.0.1:0",
        membership: Membership | None = None,
        identity: Identity | None = None,
        is_insecure: bool = False,
        settings: DHTSettings | None = None,
        endpoint: Endpoint | None = None,
        schemas: Sequence[Schema] = (),
        peers_file: Path | None = None,
        relaying: RelayLimits | None = DEFAULT_LIMITS,
    ) -> None:
        self.settings = settings or DHTSettings()
        self.identity = _identity_of(membership, identity, endpoint)
        self.peer_id = self.identity.peer_id
        self._is_client_by_choice = self.settings.is_client or (listen is None and endpoint is None)
        self._listen = None if self._is_client_by_choice else _address(listen)
        self._is_own_endpoint = endpoint is None
        self.endpoint = endpoint or Endpoint(
            membership=membership, is_insecure=is_insecure, peer_id=self.peer_id, relaying=relaying
        )
        validator = Validator((*_SCHEMAS, *schemas), self.settings)
        self.protocol = DHTProtocol(self.endpoint, self.peer_id, self.settings, validator)
        self.protocol.is_client = self._is_client_by_choice
        self.counts = self.protocol.counts
        self.table = self.protocol.table
        self.records = self.protocol.records
        self.storage, self.cache = self.records.storage, self.records.cache
        self.joining = Joining(self.protocol, [_address(address).relay for address in join], peers_file)
        self.keeper = Keeper(self.protocol, self.store_many)
        self.joining.on_rejoined = self.keeper.store_all_again
        self.upkeep = Upkeep(self.protocol, self.joining)
        self.protocol.on_new_peer = self.upkeep.on_new_peer
        self.last_hops: list[int] = []
        """Of the latest look-up: how many answers followed from each other, for each name."""
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        protocol = self.protocol
        protocol.is_client = self._is_client_by_choice
        async with contextlib.AsyncExitStack() as closing:
            if self._is_own_endpoint:
                await closing.enter_async_context(self.endpoint)
            await protocol.open()
            closing.push_async_callback(self._close)
            if not protocol.is_client:
                protocol.serve()
                if self._is_own_endpoint and self._listen is not None:
                    await self.endpoint.listen(self._listen)
                if not self.endpoint.addresses:
                    raise UsageError(
                        "The DHT's endpoint does not listen.",
                        cause="others could not call this peer.",
                        next_step="call endpoint.listen() first, or set is_client in DHTSettings.",
                    )
            await self.joining.join()
            assert protocol.scope is not None
            protocol.scope.start_soon(self.upkeep.run(), name="dht upkeep")
            protocol.scope.start_soon(self.keeper.run(), name="dht keeper")
            self.endpoint.relays.on_change.append(self.keeper.store_all_again)
            self._closing = closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    async def _close(self) -> None:
        relays = self.endpoint.relays
        relays.on_change = [each for each in relays.on_change if each != self.keeper.store_all_again]
        relays.keep(lambda: (), 0)
        await self.protocol.close()
        self.joining.remember()

    # --- who this is ---

    @property
    def is_client(self) -> bool:
        """Whether it only asks: nobody is told to call this peer."""
        return self.protocol.is_client

    @property
    def peer(self) -> Peer:
        """Itself, as others call it, a client through its first relay; UsageError for one without relays."""
        if self.is_client and self.endpoint.relays.addresses:
            return Peer(self.endpoint.relays.addresses[0], self.peer_id)
        if not self.endpoint.addresses:
            raise UsageError(
                "A client has no address.",
                next_step="give `listen` to be called by others, or use_relays() behind a router.",
            )
        address = self.endpoint.addresses[0]
        if is_wildcard(address.host):  # others see it by one of this machine's addresses
            address = Address(self.joining.seen_as or outward_host(address.host), address.port)
        return Peer(address, self.peer_id)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where others can call this peer: its own address, or a client's through each of its relays."""
        return self.endpoint.relays.addresses if self.is_client else (self.peer.address,)

    async def use_relays(self, num: int = NUM_RELAYS, *, deadline: Deadline | None = None) -> None:
        """Have a client registered at so many of the peers that it knows, so that others can call it.

        Returns once one has taken it; PeerUnreachable when none does. Relays that go are replaced, and then
        records that are kept are stored again. A peer that others can call needs no relay, and has none.
        """
        if self.is_client:
            self.endpoint.relays.keep(self._possible_relays, num)
            await self.endpoint.relays.registered(self.protocol.look_up_deadline(deadline))

    def _possible_relays(self) -> list[Peer]:
        """Peers that can be called, in any order, those of this machine last: others cannot reach them."""
        contacts = self.table.contacts()
        peers = [contact.peer for contact in self.protocol.random.sample(contacts, len(contacts))]
        return sorted(peers, key=lambda peer: is_loopback(peer.address.host))

    @property
    def num_served(self) -> int:
        """Requests of others answered so far."""
        return self.protocol.num_served

    def in_s(self, seconds: float) -> float:
        """The wall time so long from now: what expirations are given as."""
        return self.wall_s() + seconds

    def wall_s(self) -> float:
        """The calendar that records expire by."""
        return self.protocol.wall_s()

    def now_s(self) -> float:
        """The loop's time, by which waits are measured."""
        return self.protocol.now_s()

    def add_schema(self, schema: Schema) -> None:
        """Refuse, from now on, what does not fit this schema under its prefix."""
        self.protocol.validator.add_schema(schema)

    # --- storing ---

    async def store(
        self,
        name: Any,
        value: Any,
        expires_at_s: float,
        *,
        subkey: Any = None,
        is_owned: bool = False,
        deadline: Deadline | None = None,
    ) -> Stored:
        """Have the nearest peers keep a value until it expires; false when none of them took it."""
        entry = Entry(name, value, expires_at_s, subkey, is_owned)
        return (await self.store_many([entry], deadline=deadline))[0]

    async def store_many(self, entries: Sequence[Entry], *, deadline: Deadline | None = None) -> list[Stored]:
        """Store a batch in one fan-out; each entry's own success, in order."""
        return await store_slots(
            self.protocol, signed_slots(entries, self.identity), self.protocol.look_up_deadline(deadline)
        )

    # --- reading ---

    async def get(self, name: Any, *, latest: bool = False, deadline: Deadline | None = None) -> Value | None:
        """The first live value met, from this peer's own memory where it has one; None when there is none.

        `latest` asks all replicas, and merges what they have. DeadlineExceeded when it was not looked for
        everywhere in time, PeerUnreachable when those that could be asked were all silent. A peer that knows
        no other, and is no client, has looked everywhere when it has looked at its own memory: None.
        """
        return (await self.get_many([name], latest=latest, deadline=deadline, must_end=True))[0]

    async def get_many(
        self,
        names: Sequence[Any],
        *,
        latest: bool = False,
        deadline: Deadline | None = None,
        must_end: bool = False,
    ) -> list[Value | None]:
        """Look up a batch in one fan-out; in the order of the names.

        None also stands for what was not found before the deadline, and for what no peer could be asked for,
        unless it `must_end`: then these are DeadlineExceeded and PeerUnreachable.
        """
        keys = [key_of(name).digest for name in names]
        found, lookups = await find_records(
            self.protocol, keys, self.protocol.look_up_deadline(deadline), latest=latest, must_end=must_end
        )
        self.last_hops = [lookups[key].hops if key in lookups else 0 for key in keys]
        wall_s = self.wall_s()
        return [value_of(found[key], wall_s) for key in keys]

    async def get_coordinates(
        self, names: Sequence[Any], *, deadline: Deadline | None = None, remembers_absence: bool = True
    ) -> list[tuple[int, ...] | None]:
        """The numbers among the live subkeys of each name, ascending; None where there is nothing.

        That there was nothing is told to the peers nearest to the name, who say so to the next that asks
        until something is stored there.
        """
        keys = [key_of(name).digest for name in names]
        wall_s = self.wall_s()
        known = {key: coordinates_of(self.records.get(key, wall_s, is_use=True)) for key in keys}
        lookups = {
            key: Lookup(key, LookupKind.COORDINATES, self.settings.beam) for key in keys if not known[key]
        }
        await look_up(self.protocol, list(lookups.values()), self.protocol.look_up_deadline(deadline))
        self.last_hops = [lookups[key].hops if key in lookups else 0 for key in keys]
        if remembers_absence:
            mark_absent(self.protocol, [lookup for lookup in lookups.values() if not lookup.coordinates])
        return [tuple(known[key] or lookups[key].coordinates) or None for key in keys]

    # --- peers ---

    async def find_nearest(
        self, key: Key | PeerId, limit: int | None = None, *, deadline: Deadline | None = None
    ) -> list[Contact]:
        """The peers nearest to a key that answer, nearest first, without this one."""
        limit = limit or self.settings.bucket_size
        lookup = Lookup(key.digest, LookupKind.PEERS, limit)
        await look_up(self.protocol, [lookup], self.protocol.look_up_deadline(deadline))
        self.last_hops = [lookup.hops]
        return lookup.answered()[:limit]

    async def find_peer(self, peer_id: PeerId, *, deadline: Deadline | None = None) -> Peer | None:
        """Where a peer listens; None when nobody near its id knows it."""
        if peer_id == self.peer_id:
            return None if self.is_client else self.peer
        nearest = await self.find_nearest(peer_id, self.settings.num_replicas, deadline=deadline)
        return next((contact.peer for contact in nearest if contact.id == peer_id), None)

    async def ping(self, peer: Peer | Address | str, *, deadline: Deadline | None = None) -> Answered:
        """Ask a peer who it is; how long that took, and how far its clock is off."""
        return await self.protocol.call_ping(_address(peer), deadline)

    async def about(self, peer: Peer, *, deadline: Deadline | None = None) -> About:
        """Ask a peer how much it holds and knows."""
        return await self.protocol.call_about(peer, deadline)

    def start_soon(self, work: Coroutine[Any, Any, object], name: str) -> bool:
        """Do something in the background; False when too much is being done there already."""
        return self.protocol.start_soon(work, name)

    async def rejoin(self) -> int:
        """Ask the addresses that this peer has joined by, and those last known; how many answered."""
        return await self.joining.rejoin()


def _identity_of(
    membership: Membership | None, identity: Identity | None, endpoint: Endpoint | None
) -> Identity:
    if endpoint is not None and endpoint.membership is not None:
        membership = endpoint.membership
    mine = membership.identity if membership is not None else identity or Identity.generate()
    for other in (identity.peer_id if identity else None, endpoint.peer_id if endpoint else None):
        if other is not None and other != mine.peer_id:
            raise UsageError(
                f"The DHT was given two identities, {mine.peer_id.short} and {other.short}.",
                next_step="give the identity that the membership, or the endpoint's peer_id, is made of.",
            )
    return mine


def _address(given: Any) -> Any:
    return Address.parse(given) if isinstance(given, str) else given


# --- who is there: every peer has a subkey of its own in one dictionary, stored again before it expires ---


def announce(dht: DHT, group_name: str, info: Any, lifetime_s: float) -> Kept:
    """Be present with `info` until the handle is stopped, or this peer vanishes, and `lifetime_s` more.

    `info` is a value, or a function without arguments that gives it whenever it is stored again.
    """
    name, subkey = f"{_PRESENCE}.{group_name}", reserved(dht.peer_id)
    if not callable(info):
        encode_value(info)  # what cannot be stored should be said here, not in a log

    def make(expires_at_s: float) -> list[Entry]:
        value = info() if callable(info) else info
        return [Entry(name, value, expires_at_s, subkey, is_owned=True)]

    return dht.keeper.keep(make, lifetime_s)


async def present(
    dht: DHT, group_name: str, *, latest: bool = True, deadline: Deadline | None = None
) -> dict[PeerId, Value]:
    """What each peer that is present has announced, in order of their ids.

    Without `latest` the first answer is taken, which may lack those who have only just come.
    """
    found = await dht.get(f"{_PRESENCE}.{group_name}", latest=latest, deadline=deadline)
    if found is None or not isinstance(found.value, dict):
        return {}
    peers = {
        peer_id: slot
        for subkey, slot in found.value.items()
        if (peer_id := owner_of_subkey(subkey)) is not None and slot.owner == peer_id
    }
    return dict(sorted(peers.items()))
