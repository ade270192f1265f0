"""A peer of the DHT: what programs call, put together from the parts beside it.

Everything that a program can call stands here, hence the length. How keys are looked up is `search`'s, what
is sent and answered `asking`'s and `answering`'s, how records are spread over peers `spreading`'s; what
happens without being asked for is `upkeep`'s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.core import (
    Address,
    Deadline,
    Key,
    Peer,
    PeerBusy,
    PeerId,
    Scope,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.core.identity import Identity
from shoal.dht.answering import Answering, Holdings
from shoal.dht.asking import Answered, Asking, Counts
from shoal.dht.cache import Cache
from shoal.dht.joining import Joining
from shoal.dht.keeping import Keeper
from shoal.dht.pushed import Pushed
from shoal.dht.rates import Rates
from shoal.dht.reading import ask_those_set_aside, check_ended
from shoal.dht.records import Entry, OwnSubkey, Slot, Stored, Value, key_of, merge, value_of
from shoal.dht.search import Search
from shoal.dht.settings import DHTSettings
from shoal.dht.spreading import Spreading, slots_of
from shoal.dht.storage import Storage
from shoal.dht.table import RoutingTable
from shoal.dht.tracks import Track
from shoal.dht.upkeep import Upkeep
from shoal.dht.validation import Ownership, Schema, Schemas
from shoal.dht.wire import (
    MAX_INDEX,
    About,
    Contact,
    ContactBook,
    Found,
    Kind,
    Want,
    coordinates_of,
    number_of,
)
from shoal.transport import Endpoint, Membership
from shoal.transport.datagrams.sessions import RoundTrips
from shoal.transport.network.sockets import is_wildcard, outward_host

log = logging.getLogger(__name__)

_LOOK_UP_S = 30.0  # a whole look-up or store, with patience 1
_NUM_WITNESSES = 2
_SCHEMAS = (Schema("presence", Any, OwnSubkey),)  # nobody can be there first with something else
_HEARD_SEEDS = 4  # peers that were only heard of do not displace those that were seen: they may be invented
_MAX_HEARD = 16  # look-ups of larger batches leave no hearsay behind: there would be too much of it
_MAX_BAD = 3  # slots of one answer that are wrong before the rest is left unread
_MAX_BACKGROUND = 64  # pings and the like under way at once; more are left out


class DHT:
    """A peer of the swarm's DHT; open it with `async with` on the loop that it should live on.

    Names are hashed into keys; every value expires. `join` are addresses of any peers that are there; without
    them a swarm begins here. Without `listen` it is a client, which asks and stores nothing for others. An
    `endpoint` that is given is open already, and stays open; without one, the DHT has its own.
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
    ) -> None:
        self.settings = settings or DHTSettings()
        self.identity = _identity_of(membership, identity, endpoint)
        self.peer_id = self.identity.peer_id
        self._number = number_of(self.peer_id.digest)
        self._is_client_by_choice = self.settings.is_client or (listen is None and endpoint is None)
        self.is_client = self._is_client_by_choice
        self._listen = None if self.is_client else _address(listen)
        self._is_own_endpoint = endpoint is None
        self.endpoint = endpoint or Endpoint(
            membership=membership, is_insecure=is_insecure, peer_id=self.peer_id
        )
        network = self.endpoint.network
        self.table = RoutingTable(self.peer_id, self.settings, network.random)
        self.storage = Storage(self.peer_id, self.settings)
        self.cache = Cache(self.settings)
        self.book = ContactBook(has_names=network.is_simulated)
        self.holdings = Holdings(
            self.table,
            self.book,
            self.storage,
            self.cache,
            Pushed(self.settings),
            Ownership(),
            Schemas((*_SCHEMAS, *schemas)),
            Rates(self.settings),
        )
        self.asking = Asking(self.endpoint, self.table, self.book, self.settings, self._on_seen)
        self.joining = Joining(self, [_address(address) for address in join], peers_file)
        self.keeper = Keeper(self)
        self.upkeep = Upkeep(self)
        self.last_hops: list[int] = []
        """Of the latest look-up: how many answers followed from each other, for each name."""
        self._spreading = Spreading(self)
        self._answering: Answering | None = None
        self._round_trips = RoundTrips()
        self._standing = StandingScope("dht")
        self._num_background = 0
        self._doubted: dict[Contact, None] = {}  # those being pinged
        self._closing = contextlib.AsyncExitStack()
        self._scope: Scope | None = None

    async def __aenter__(self) -> Self:
        self.is_client = self._is_client_by_choice
        async with contextlib.AsyncExitStack() as closing:
            if self._is_own_endpoint:
                await closing.enter_async_context(self.endpoint)
            if not self.is_client:
                self._answering = Answering(
                    self.endpoint, self.peer_id, self.holdings, self.settings, self._on_seen
                )
                if self._is_own_endpoint and self._listen is not None:
                    await self.endpoint.listen(self._listen)
                if not self.endpoint.addresses:
                    raise UsageError(
                        "The DHT's endpoint does not listen.",
                        cause="others could not call this peer.",
                        next_step="call endpoint.listen() first, or set is_client in DHTSettings.",
                    )
                self.asking.port = self.endpoint.addresses[0].port
            self._standing = StandingScope("dht")
            self._scope = await self._standing.open()
            closing.push_async_callback(self._close)
            await self.joining.join()
            self._scope.start_soon(self.upkeep.run(), name="dht upkeep")
            self._scope.start_soon(self.keeper.run(), name="dht keeper")
            self._closing = closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    async def _close(self) -> None:
        self._scope = None
        await self._standing.close()
        if self._answering is not None:
            self._answering.close()
            self._answering = None
        self.joining.remember()

    # --- who this is ---

    @property
    def peer(self) -> Peer:
        """Itself, as others call it; UsageError for a client."""
        if not self.endpoint.addresses:
            raise UsageError("A client has no address.", next_step="give `listen` to be called by others.")
        address = self.endpoint.addresses[0]
        if is_wildcard(address.host):  # others see it by one of this machine's addresses
            address = Address(self.joining.seen_as or outward_host(address.host), address.port)
        return Peer(address, self.peer_id)

    @property
    def counts(self) -> Counts:
        """Requests sent so far."""
        return self.asking.counts

    @property
    def num_served(self) -> int:
        """Requests of others answered so far."""
        return self._answering.num_served if self._answering is not None else 0

    def in_s(self, seconds: float) -> float:
        """The wall time so long from now: what expirations are given as."""
        return self.wall_s() + seconds

    def wall_s(self) -> float:
        """The calendar that records expire by."""
        return self.endpoint.network.clock.wall_s()

    def now_s(self) -> float:
        """The loop's time, by which waits are measured."""
        return self.endpoint.datagrams.loop.time()

    def become_client(self) -> None:
        """Ask only, from now on: nobody is told to call this peer."""
        self.is_client = True
        self.asking.port = 0

    def become_server(self) -> None:
        """Be called by others again."""
        self.is_client = False
        self.asking.port = self.endpoint.addresses[0].port

    def add_schema(self, schema: Schema) -> None:
        """Refuse, from now on, what does not fit this schema under its prefix."""
        self.holdings.schemas.add(schema)

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
        slots = slots_of(entries, self.identity)
        return await self._spreading.spread(slots, self._deadline(deadline))

    # --- reading ---

    async def get(self, name: Any, *, latest: bool = False, deadline: Deadline | None = None) -> Value | None:
        """The first live value met, from this peer's own memory where it has one; None when there is none.

        `latest` asks all replicas, and merges what they have.
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
        wall_s = self.wall_s()
        known = {key: self.holdings.live_slots(key, wall_s, is_use=True) for key in keys}
        kind = Kind.LATEST if latest else Kind.VALUE
        tracks = {
            key: Track(key, kind, self.settings.beam) for key, slots in known.items() if latest or not slots
        }
        await self.search(list(tracks.values()), self._deadline(deadline))
        missed = [track for track in tracks.values() if track.is_done and not track.replicas]
        if missed:
            await ask_those_set_aside(self, missed)
        if must_end:
            check_ended(list(tracks.values()), is_client=self.is_client)
        wall_s = self.wall_s()
        for key, track in tracks.items():
            if track.replicas:
                replicas = [slots for _, slots in track.replicas]
                known[key] = merge([known[key], *replicas], wall_s)
                self._spreading.cache_found(track, known[key])
        self.last_hops = [tracks[key].hops if key in tracks else 0 for key in keys]
        return [value_of(known[key], wall_s) for key in keys]

    async def get_coordinates(
        self, names: Sequence[Any], *, deadline: Deadline | None = None, remembers_absence: bool = True
    ) -> list[tuple[int, ...] | None]:
        """The numbers among the live subkeys of each name, ascending; None where there is nothing.

        That there was nothing is told to the peers nearest to the name, who say so to the next that asks
        until something is stored there.
        """
        keys = [key_of(name).digest for name in names]
        wall_s = self.wall_s()
        known = {key: coordinates_of(self.holdings.live_slots(key, wall_s, is_use=True)) for key in keys}
        tracks = {key: Track(key, Kind.COORDINATES, self.settings.beam) for key in keys if not known[key]}
        await self.search(list(tracks.values()), self._deadline(deadline))
        self.last_hops = [tracks[key].hops if key in tracks else 0 for key in keys]
        if remembers_absence:
            self._spreading.mark_absent([track for track in tracks.values() if not track.coordinates])
        return [tuple(known[key] or tracks[key].coordinates) or None for key in keys]

    # --- peers ---

    async def find_nearest(
        self, key: Key | PeerId, limit: int | None = None, *, deadline: Deadline | None = None
    ) -> list[Contact]:
        """The peers nearest to a key that answer, nearest first, without this one."""
        limit = limit or self.settings.bucket_size
        track = Track(key.digest, Kind.PEERS, limit)
        await self.search([track], self._deadline(deadline))
        self.last_hops = [track.hops]
        return track.answered()[:limit]

    async def find_peer(self, peer_id: PeerId, *, deadline: Deadline | None = None) -> Peer | None:
        """Where a peer listens; None when nobody near its id knows it."""
        if peer_id == self.peer_id:
            return None if self.is_client else self.peer
        nearest = await self.find_nearest(peer_id, self.settings.num_replicas, deadline=deadline)
        return next((contact.peer for contact in nearest if contact.id == peer_id), None)

    async def ping(self, peer: Peer | Address | str, *, deadline: Deadline | None = None) -> Answered:
        """Ask a peer who it is; how long that took, and how far its clock is off."""
        return await self.asking.call_ping(_address(peer) if isinstance(peer, str) else peer, deadline)

    async def about(self, peer: Peer, *, deadline: Deadline | None = None) -> About:
        """Ask a peer how much it holds and knows."""
        return await self.asking.call_about(peer, deadline)

    async def rejoin(self) -> int:
        """Ask the addresses that this peer has joined by, and those last known; how many answered."""
        num_answered = await self.joining.rejoin()
        self.keeper.store_all_again()
        return num_answered

    # --- for the parts beside this ---

    async def search(
        self,
        tracks: Sequence[Track],
        deadline: Deadline,
        *,
        seeds: Sequence[Contact] = (),
    ) -> None:
        """Run look-ups together, beginning with the nearest peers that this one knows of."""
        if self._scope is None:
            raise UsageError("The DHT is not open.", next_step="use it inside 'async with'.")
        if not tracks:
            return
        now_s = self.now_s()
        for track in tracks:
            if len(tracks) <= self.settings.parallel:
                track.first_parallel = self.settings.parallel
            num_seeds = max(track.width + self.settings.num_replicas, self.settings.beam)
            track.begin(self.table.nearest(track.number, num_seeds, now_s=now_s))
            heard = self.table.nearest(track.number, _HEARD_SEEDS, now_s=now_s, has_hearsay=True)
            for contact in (*heard, *seeds):
                track.add(contact, 1)
            self.table.on_looked_up(track.number, now_s)
        await Search(self, tracks, self.settings.parallel).run(deadline)
        if len(tracks) <= _MAX_HEARD:
            for track in tracks:
                for _, contact in track.near:
                    self.table.on_heard_of(contact)

    async def call_find(self, contact: Contact, wants: list[Want]) -> Found:
        """Ask a peer for keys."""
        return await self.asking.call_find(contact, wants)

    def believed(self, key: bytes, slots: list[Slot]) -> list[Slot]:
        """Of what another peer tells, what lives, but not for too long, and is rightly signed and typed."""
        wall_s = self.wall_s()
        latest_s = wall_s + self.settings.max_lifetime_s + self.settings.max_clock_gap_s
        believed: list[Slot] = []
        num_bad = 0
        for slot in slots[: self.settings.max_slots_a_key]:
            if wall_s < slot.expires_at_s <= latest_s:
                if self.holdings.check(key, slot) is None:
                    believed.append(slot)
                else:
                    num_bad += 1
            if num_bad >= _MAX_BAD:
                break
        return believed

    def is_set_aside(self, contact: Contact) -> bool:
        """Whether a peer has failed of late, or is this one."""
        return contact.number == self._number or self.table.is_set_aside(contact, self.now_s())

    def read_contacts(self, packed: Sequence[bytes], teller: Address) -> list[Contact | None]:
        """Peers that another peer tells of; None for those not to be asked."""
        found: list[Contact | None] = []
        for one in packed[:MAX_INDEX]:
            contact = self.book.read(one, teller)
            found.append(None if contact is None or self.is_set_aside(contact) else contact)
        return found

    def witnesses(self) -> list[Contact]:
        """A few peers from anywhere."""
        contacts = self.table.contacts()
        return self.endpoint.network.random.sample(contacts, min(len(contacts), _NUM_WITNESSES))

    def slow_s(self) -> float:
        """How long answers take when all is well, at most."""
        return self._round_trips.timeout_s * self.settings.patience

    def start_soon(self, work: Any, name: str) -> bool:
        """Do something in the background; False when too much is being done there already."""
        if self._scope is None or self._num_background >= _MAX_BACKGROUND:
            work.close()
            return False
        self._num_background += 1
        self._scope.start_soon(self._in_background(work), name=name)
        return True

    async def _in_background(self, work: Any) -> None:
        try:
            with contextlib.suppress(ShoalError):  # of a peer, which the table knows of
                await work
        finally:
            self._num_background -= 1

    def _on_seen(self, contact: Contact, round_trip_s: float | None) -> None:
        """A peer has answered, or has asked from where it listens."""
        if round_trip_s is not None:
            self._round_trips.observe(round_trip_s)
        is_new = contact not in self.table
        doubtful = self.table.on_seen(contact, self.now_s(), round_trip_s)
        if doubtful is not None:
            self.doubt(doubtful)
        elif is_new and contact in self.table:
            self.upkeep.on_new_peer(contact)

    def doubt(self, contact: Contact) -> None:
        """Have it seen, in the background, whether a peer is still there."""
        if contact in self._doubted or self.is_set_aside(contact):
            return
        if self.start_soon(self._check(contact), "dht ping"):
            self._doubted[contact] = None

    async def _check(self, contact: Contact) -> None:
        try:
            await self.see(contact)
        finally:
            self._doubted.pop(contact, None)

    async def see(self, contact: Contact) -> None:
        """Ping a peer; the table is told when it is not there any more."""
        try:
            await self.asking.call_ping(contact.peer)
        except PeerBusy:
            pass  # it is there
        except ShoalError:
            self.table.on_failed(contact, self.now_s())

    def _deadline(self, given: Deadline | None) -> Deadline:
        return given or Deadline.after(_LOOK_UP_S * self.settings.patience)


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


def _address(given: Address | str | None) -> Any:
    return Address.parse(given) if isinstance(given, str) else given
