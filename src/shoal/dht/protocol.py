"""How peers of the DHT talk: what this one asks others (`call_*`) and what it answers them (`rpc_*`).

Answers and silences teach the routing table who is there. Handlers are plain functions: they run in the
loop's turn in which the request came. Whoever asks too often is told so; what is to be stored goes through
`LocalRecords.store`, which checks owner, signature and schema first (`Validator.check`).

Answers travel as bytes inside the payload, so that they are decoded once, into the type that they should
have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from shoal._version import __version__
from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerId,
    PeerRefused,
    ProtocolError,
    Scope,
    ShoalError,
    StandingScope,
)
from shoal.core.ids import ID_BYTES, is_loopback
from shoal.core.rates import RateLimiter
from shoal.dht import wire
from shoal.dht.records import Slot, Validator, Verdict
from shoal.dht.routing_table import RoutingTable
from shoal.dht.settings import DHTSettings
from shoal.dht.storage import LocalRecords
from shoal.dht.wire import Contact
from shoal.transport import Endpoint, Head, Reply
from shoal.transport.datagrams.sessions import RoundTrips

_MAX_SLOTS_BYTES = 6_500  # of an answer, so that one of several keys stays within a few datagrams
_MAX_PAYLOAD_BYTES = 256 << 10  # of an answer; a larger one travels as a buffer
_MAX_BUFFER_BYTES = 32 << 20  # no peer keeps more under one key
_LOOK_UP_S = 30.0  # a whole look-up or store, with patience 1
_FIRST_WAIT_S = 0.05  # for a peer that is busy
_MAX_BACKGROUND = 64  # pings and the like under way at once; more are left out
_NUM_WITNESSES = 2
_LAST_VERDICT = max(Verdict)
_encoder = msgspec.msgpack.Encoder()
_decoders = {method: msgspec.msgpack.Decoder(answer) for method, (_, answer) in wire.MESSAGES.items()}


class Answered(msgspec.Struct, frozen=True):
    """A peer has answered a ping."""

    peer: Peer
    round_trip_s: float
    clock_gap_s: float
    """How far its wall clock is ahead of this peer's, give or take half the round trip."""
    seen_as: str


class Counts(msgspec.Struct):
    """Requests that this peer has sent."""

    num_finds: int = 0
    num_stores: int = 0
    num_pings: int = 0
    num_failed: int = 0


class DHTProtocol:
    """The other peers of the swarm as this one sees them: calls, answers, and who is there.

    Everything that looks up, stores or joins does it through this object, which owns the routing table, the
    records that this peer holds, and the tasks that run in the background.
    """

    def __init__(
        self, endpoint: Endpoint, peer_id: PeerId, settings: DHTSettings, validator: Validator
    ) -> None:
        self.endpoint = endpoint
        self.peer_id = peer_id
        self.number = wire.number_of(peer_id.digest)
        """The own id, as distances are reckoned with."""
        self.settings = settings
        self.validator = validator
        self.random = endpoint.network.random
        self.table = RoutingTable(peer_id, settings, self.random)
        self.book = wire.ContactBook(has_names=endpoint.network.is_simulated)
        self.records = LocalRecords(peer_id, settings, validator)
        self.limits = RequestLimits(settings)
        self.counts = Counts()
        self.num_served = 0
        """Requests of others that have come so far, those included that were refused."""
        self.is_client = settings.is_client
        """Whether nobody is told to call this peer, which then stores nothing for others."""
        self.on_new_peer: Callable[[Contact], None] = lambda _: None
        """Called with each peer that takes a place in the routing table."""
        self.scope: Scope | None = None
        """Of the tasks that belong to this peer; None while the DHT is not open."""
        self._standing = StandingScope("dht")
        self._num_background = 0
        self._checked: dict[Contact, None] = {}  # those being pinged
        self._round_trips = RoundTrips()
        self._is_serving = False
        self._began_s = 0.0

    async def open(self) -> None:
        """Have a scope for tasks."""
        self._standing = StandingScope("dht")
        self.scope = await self._standing.open()

    async def close(self) -> None:
        """End all tasks, and answer no more: another DHT may take its place at the endpoint."""
        self.scope = None
        await self._standing.close()
        if self._is_serving:
            self._is_serving = False
            for method in wire.MESSAGES:
                self.endpoint.routes.remove(method)

    def serve(self) -> None:
        """Answer others from now on."""
        self._is_serving = True
        self._began_s = self.endpoint.network.clock.now_s()
        for method, (asked, _) in wire.MESSAGES.items():
            handler = getattr(self, method.replace("dht.", "rpc_"))
            self.endpoint.handle(method, handler, payload_type=asked)

    @property
    def port(self) -> int:
        """Where this peer listens, as it tells others; 0 for a client."""
        addresses = self.endpoint.addresses
        return addresses[0].port if addresses and not self.is_client else 0

    def wall_s(self) -> float:
        """The calendar that records expire by."""
        return self.endpoint.network.clock.wall_s()

    def now_s(self) -> float:
        """The loop's time, by which waits are measured."""
        return self.endpoint.datagrams.loop.time()

    # --- asking ---

    async def call_find(self, contact: Contact, wants: list[wire.Want]) -> wire.Found:
        """Look for keys at a peer."""
        self.counts.num_finds += 1
        found: wire.Found = await self._call(contact, wire.FIND, wire.Find(self.port, wants))
        if len(found.findings) != len(wants):
            raise self._nonsense(contact, "it answered for another number of keys than it was asked for.")
        return found

    async def call_store(
        self, contact: Contact, items: list[wire.Item], *, is_pushed: bool = False
    ) -> wire.StoreAnswer:
        """Have a peer keep slots; there is a verdict on each."""
        self.counts.num_stores += 1
        answer: wire.StoreAnswer = await self._call(
            contact, wire.STORE, wire.Store(self.port, items, is_pushed)
        )
        if len(answer.verdicts) != sum(len(item.slots) for item in items):
            raise self._nonsense(contact, "it answered for another number of records than it was sent.")
        if max(answer.verdicts, default=0) > _LAST_VERDICT:
            raise self._nonsense(contact, "it answered with a verdict that there is not.")
        return answer

    async def call_mark_absent(self, contact: Contact, keys: list[bytes]) -> None:
        """Tell a peer that there is nothing under these keys, anywhere."""
        self.counts.num_stores += 1
        await self._call(
            contact, wire.STORE, wire.Store(self.port, [], absent=keys, absent_s=self.settings.absent_s)
        )

    async def call_ping(self, peer: Peer | Address, deadline: Deadline | None = None) -> Answered:
        """Ask a peer, of which perhaps only the address is known, who it is."""
        self.counts.num_pings += 1
        target = await wire.resolved(self.endpoint.network, peer if isinstance(peer, Peer) else Peer(peer))
        clock = self.endpoint.network.clock
        began_s = clock.now_s()
        pong: wire.Pong = await self._send(
            target, wire.PING, wire.Ping(self.port), deadline or self.call_deadline()
        )
        took_s = clock.now_s() - began_s
        if len(pong.peer_id) != ID_BYTES:
            raise self._nonsense(target, "it told no peer id.")
        claimed = PeerId(pong.peer_id)
        if claimed != (target.id or self.endpoint.datagrams.id_of(target)):
            raise self._nonsense(target, "it answered in the name of another peer.")
        gap_s = pong.wall_s + took_s / 2 - clock.wall_s()
        answered = Answered(Peer(target.address, claimed), took_s, gap_s, pong.seen_as)
        if claimed != self.peer_id and not target.address.is_relayed:
            self._on_seen(self.book.of(answered.peer), took_s)
        return answered

    async def call_about(self, peer: Peer, deadline: Deadline | None = None) -> wire.About:
        """Ask a peer how it is."""
        about: wire.About = await self._send(peer, wire.ABOUT, None, deadline or self.call_deadline())
        return about

    async def _call(self, contact: Contact, method: str, payload: object) -> Any:
        """Ask, again for a while when the peer is too busy, and tell the table what came of it."""
        clock, deadline = self.endpoint.network.clock, self.call_deadline()
        began_s, wait_s = clock.now_s(), _FIRST_WAIT_S
        while True:
            try:
                answer = await self._send(contact.peer, method, payload, deadline)
                break
            except PeerBusy:  # alive, and asked too often
                if deadline.remaining_s < 2 * wait_s:
                    raise
            except (PeerError, DeadlineExceeded, ProtocolError):
                self.counts.num_failed += 1
                self.table.on_failed(contact, self.now_s())
                raise
            await asyncio.sleep(wait_s * self.random.uniform(0.75, 1.25))
            wait_s *= 2
        self._on_seen(contact, clock.now_s() - began_s)
        return answer

    async def _send(self, peer: Peer, method: str, payload: object, deadline: Deadline) -> Any:
        """Send a request, and read the answer; ProtocolError for one that is not as it should be."""
        into = _allocate if method == wire.FIND else None  # only records may be large
        reply = await self.endpoint.datagrams.call(peer, method, payload, deadline=deadline, into=into)
        try:
            return _decoders[method].decode(reply.buffers[0] if reply.buffers else reply.payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise self._nonsense(peer, f"its answer to {method} is not as it should be: {error}.") from None

    def call_deadline(self, num_calls: float = 1.0) -> Deadline:
        """The deadline of so many calls one after another."""
        return Deadline.after(num_calls * self.settings.call_s * self.settings.patience)

    def look_up_deadline(self, given: Deadline | None = None) -> Deadline:
        """The deadline of a whole look-up or store, unless one is given."""
        return given or Deadline.after(_LOOK_UP_S * self.settings.patience)

    def _nonsense(self, peer: Peer | Contact, cause: str) -> ShoalError:
        who = peer.peer if isinstance(peer, Contact) else peer
        if isinstance(peer, Contact):
            self.table.on_failed(peer, self.now_s())
        return ProtocolError(
            f"{who} does not follow the DHT's protocol.",
            cause=cause,
            next_step="run the same Shoal version everywhere; `shoal status` tells which peers have another.",
        )

    # --- answering ---

    def rpc_ping(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell who and when this is."""
        self._admit(head.peer, head.payload.port)
        return _reply(wire.Pong(self.peer_id.digest, str(head.peer.address), self.wall_s()))

    def rpc_find(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell of records, and of peers that are nearer to their keys."""
        wants: list[wire.Want] = head.payload.wants
        if len(wants) > wire.MAX_WANTS or any(len(want.key) != ID_BYTES for want in wants):
            raise PeerRefused(f"a find takes at most {wire.MAX_WANTS} keys of {ID_BYTES} bytes.")
        self._admit(head.peer, head.payload.port, cost_of_find(len(wants)))
        wall_s, asker = self.wall_s(), _number_of(head.peer)
        contacts: dict[bytes, int] = {}
        findings = []
        left_bytes = _MAX_SLOTS_BYTES
        for want in wants:
            finding, size_bytes = self._finding(want, asker, wall_s, contacts)
            if size_bytes > left_bytes and len(wants) > 1:
                near = finding.near or _indexes(self._near(want.key, want.reach, asker), contacts)
                finding, size_bytes = wire.Finding(wire.State.TOO_LARGE, near), 0
            left_bytes -= size_bytes
            findings.append(finding)
        return _reply(wire.Found(list(contacts), findings))

    def _finding(
        self, want: wire.Want, asker: int, wall_s: float, contacts: dict[bytes, int]
    ) -> tuple[wire.Finding, int]:
        """What there is of a key, and how many bytes of an answer's room that takes."""
        key, kind = want.key, want.kind
        slots: list[Slot] = []
        coordinates = b""
        if kind == wire.LookupKind.COORDINATES:
            coordinates = self.records.coordinates(key, wall_s)
        elif kind != wire.LookupKind.PEERS:
            slots = self.records.get(key, wall_s)
            if slots and kind == wire.LookupKind.VALUE:
                return wire.Finding(wire.State.HERE, b"", slots), sum(map(wire.size_of, slots))
        near = _indexes(self._near(key, want.reach, asker), contacts)
        if slots or coordinates:
            size_bytes = len(coordinates) + sum(map(wire.size_of, slots))
            return wire.Finding(wire.State.HERE, near, slots, coordinates), size_bytes
        is_absent = kind != wire.LookupKind.PEERS and self.records.cache.is_absent(key, wall_s)
        return wire.Finding(wire.State.ABSENT if is_absent else wire.State.NOTHING, near), 0

    def rpc_store(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Keep slots, or say of each why not."""
        store: wire.Store = head.payload
        cost = len(store.absent) + sum(map(_cost_of, store.items))
        self.limits.take_records(head.peer, cost, self.now_s())
        self._admit(head.peer, store.port)
        wall_s, records = self.wall_s(), self.records
        verdicts = bytes(
            records.store(item.key, slot, wall_s, is_pushed=store.is_pushed)
            for item in store.items
            for slot in item.slots
        )
        until_s = wall_s + min(store.absent_s, self.settings.absent_s)
        for key in store.absent[: wire.MAX_WANTS]:
            if len(key) == ID_BYTES and not records.storage.get(key, wall_s):
                records.cache.mark_absent(key, until_s)
        contacts: dict[bytes, int] = {}
        near = [
            self._nearer_than_sent(item, head.peer, contacts) if item.reach else b"" for item in store.items
        ]
        return _reply(wire.StoreAnswer(verdicts, list(contacts), near if contacts else []))

    def rpc_about(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell how this peer is."""
        self._admit(head.peer, 0)
        storage = self.records.storage
        return _reply(
            wire.About(
                software=__version__,
                uptime_s=self.endpoint.network.clock.now_s() - self._began_s,
                num_records=len(storage),
                record_bytes=storage.size_bytes,
                num_cached=len(self.records.cache),
                num_contacts=len(self.table),
                is_client=False,  # a client is not asked
                wall_s=self.wall_s(),
            )
        )

    def _admit(self, peer: Peer, port: int, cost: float = 1) -> None:
        """Take note of who asks; PeerBusy when it asks too often.

        It listens at the address that its packets come from, and has proven that it receives there; whoever
        names another port is believed only once it has answered a call there.
        """
        self.num_served += 1
        self.limits.take_messages(peer, cost, self.now_s())
        address = peer.address
        is_there = port == address.port != 0 and not address.is_relayed
        if is_there and peer.id is not None and peer.id != self.peer_id:
            self._on_seen(self.book.of(peer), None)

    def _near(self, key: bytes, reach: int, asker: int) -> list[Contact]:
        """Peers nearer to a key than the asker's reach, nearest first."""
        number = wire.number_of(key)
        return [
            contact
            for contact in self.table.nearest(number, wire.MAX_CONTACTS, now_s=self.now_s())
            if (contact.number ^ number) >> wire.REACH_SHIFT < reach and contact.number != asker
        ]

    def _nearer_than_sent(self, item: wire.Item, asker: Peer, contacts: dict[bytes, int]) -> bytes:
        """Peers that an item should be brought to and is not."""
        if len(item.key) != ID_BYTES:
            return b""
        known = {item.known[at : at + wire.TAG_BYTES] for at in range(0, len(item.known), wire.TAG_BYTES)}
        near = self._near(item.key, item.reach, _number_of(asker))
        return _indexes([contact for contact in near if wire.tag_of(contact.packed) not in known], contacts)

    # --- who is there ---

    def _on_seen(self, contact: Contact, round_trip_s: float | None) -> None:
        """A peer has answered, or has asked from where it listens."""
        if round_trip_s is not None:
            self._round_trips.observe(round_trip_s)
        is_new = contact not in self.table
        in_the_way = self.table.on_seen(contact, self.now_s())
        if in_the_way is not None:
            self.check_soon(in_the_way)
        elif is_new and contact in self.table:
            self.on_new_peer(contact)

    def is_backed_off(self, contact: Contact) -> bool:
        """Whether a peer has failed of late, or is this one."""
        return contact.number == self.number or self.table.is_backed_off(contact, self.now_s())

    def read_contacts(self, packed: Sequence[bytes], teller: Address) -> list[Contact | None]:
        """Peers that another peer tells of; None for those not to be asked."""
        found: list[Contact | None] = []
        for one in packed[: wire.MAX_INDEX]:
            contact = self.book.read(one, teller)
            found.append(None if contact is None or self.is_backed_off(contact) else contact)
        return found

    def believed(self, key: bytes, slots: Sequence[Slot]) -> list[Slot]:
        """Of what another peer tells of a key, what is live, rightly signed and rightly typed."""
        return self.validator.believed(key, slots, self.wall_s())

    def witnesses(self, number: int) -> list[Contact]:
        """A few peers from anywhere, and those that are now the nearest to a key in the table."""
        contacts = self.table.contacts()
        anywhere = self.random.sample(contacts, min(len(contacts), _NUM_WITNESSES))
        nearest = self.table.nearest(number, self.settings.num_replicas, now_s=self.now_s())
        return list(dict.fromkeys((*anywhere, *nearest)))

    def slow_s(self) -> float:
        """How long answers take when all is well, at most."""
        return self._round_trips.timeout_s * self.settings.patience

    def check_soon(self, contact: Contact) -> None:
        """Ping a peer in the background, to see whether it is still there."""
        if contact in self._checked or self.is_backed_off(contact):
            return
        if self.start_soon(self.check(contact), "dht ping"):
            self._checked[contact] = None

    async def check(self, contact: Contact) -> None:
        """Ping a peer; the table is told when it is not there any more."""
        try:
            await self.call_ping(contact.peer)
        except PeerBusy:
            pass  # it is there
        except ShoalError:
            self.table.on_failed(contact, self.now_s())
        finally:
            self._checked.pop(contact, None)

    def start_soon(self, work: Coroutine[Any, Any, object], name: str) -> bool:
        """Do something in the background; False when too much is being done there already."""
        if self.scope is None or self._num_background >= _MAX_BACKGROUND:
            work.close()
            return False
        self._num_background += 1
        self.scope.start_soon(self._in_background(work), name=name)
        return True

    async def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            with contextlib.suppress(ShoalError):  # of a peer, which the table knows of
                await work
        finally:
            self._num_background -= 1


def _allocate(head: Head) -> list[bytearray]:
    """Memory for an answer that does not fit into datagrams."""
    if not head.sizes:
        return []
    if head.total_bytes > _MAX_BUFFER_BYTES:
        raise ProtocolError(
            f"{head.peer} answers with {head.total_bytes:,} bytes.", cause="no record is so large."
        )
    return [bytearray(size_bytes) for size_bytes in head.sizes]


def _number_of(peer: Peer) -> int:
    return wire.number_of(peer.id.digest) if peer.id is not None else -1


def _indexes(near: Sequence[Contact], contacts: dict[bytes, int]) -> bytes:
    """Contacts as indexes into those of the whole answer; what an index cannot name is left out."""
    indexes = (contacts.setdefault(contact.packed, len(contacts)) for contact in near)
    return bytes(index for index in indexes if index < wire.MAX_INDEX)


def _reply(answer: object) -> Reply:
    encoded = _encoder.encode(answer)
    return Reply(encoded) if len(encoded) <= _MAX_PAYLOAD_BYTES else Reply(None, [encoded])


# --- how much one address may ask of this peer ---

BURST_S = 4.0
"""So many seconds' worth of messages or records may come at once."""
_OWNED_COST = 10  # what a slot whose signature must be verified is counted as beside itself


def cost_of_find(num_wants: int) -> float:
    """What looking for so many keys is counted as: they share one message."""
    return 1 + max(0, num_wants - 1) / 4


def _cost_of(item: wire.Item) -> int:
    """What storing an item is counted as: signatures are what takes time."""
    return (len(item.slots) or 1) + _OWNED_COST * sum(bool(slot.owner) for slot in item.slots)


class RequestLimits:
    """Limits what one address asks: messages and records, each so many a second; times are the loop's.

    An address is a host, so that a machine gains nothing by more ports; on this machine it is host and port,
    since many peers live there.
    """

    def __init__(self, settings: DHTSettings) -> None:
        rates = (settings.max_messages_a_s, settings.max_records_a_s)
        self._messages, self._records = (RateLimiter(rate, BURST_S * rate) for rate in rates)
        self._settings = settings

    def take_messages(self, peer: Peer, num: float, now_s: float) -> None:
        """PeerBusy when this peer's address has asked too often."""
        if wait_s := self._messages.take(_asker_of(peer.address), num, now_s):
            raise _too_much(f"{peer} asks", self._settings.max_messages_a_s, "times", wait_s)

    def take_records(self, peer: Peer, num: float, now_s: float) -> None:
        """PeerBusy when this peer's address has stored too much."""
        if wait_s := self._records.take(_asker_of(peer.address), num, now_s):
            raise _too_much(f"{peer} stores", self._settings.max_records_a_s, "records", wait_s)


def _asker_of(address: Address) -> Address | str:
    return address if is_loopback(address.host) else address.host


def _too_much(who: str, limit_a_s: float, what: str, wait_s: float) -> PeerBusy:
    setting = "max_messages_a_s" if what == "times" else "max_records_a_s"
    return PeerBusy(
        f"{who} more than {limit_a_s:g} {what} a second, with others at its host.",
        next_step=f"wait for {wait_s:.2g} s, or raise {setting} in the DHT's settings of the peer asked.",
    )
