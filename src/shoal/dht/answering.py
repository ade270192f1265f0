"""What this peer answers others (`rpc_*`): records that it holds, and peers that are nearer.

Handlers are plain functions: they run in the loop's turn in which the request came. Whoever asks too often is
told so; what is to be stored is checked here, signature and schema, before storage sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shoal._version import __version__
from shoal.core import Peer, PeerId, PeerRefused
from shoal.core.ids import ID_BYTES
from shoal.dht.cache import Cache
from shoal.dht.pushed import Pushed
from shoal.dht.rates import OWNED_COST, Rates, cost_of_find
from shoal.dht.records import Contents, Slot, Verdict, displaced, judge, place, slots_of
from shoal.dht.settings import DHTSettings
from shoal.dht.storage import Storage
from shoal.dht.table import RoutingTable
from shoal.dht.validation import Ownership, Schemas
from shoal.dht.wire import (
    ABOUT,
    FIND,
    MAX_CONTACTS,
    MAX_INDEX,
    MAX_WANTS,
    PING,
    REACH_SHIFT,
    STORE,
    TAG_BYTES,
    About,
    Contact,
    ContactBook,
    Find,
    Finding,
    Found,
    Item,
    Kind,
    Ping,
    Pong,
    State,
    Store,
    StoreAnswer,
    Want,
    coordinates_of,
    number_of,
    pack_page,
    size_of,
    tag_of,
)
from shoal.transport import Endpoint, Head, Reply

_MAX_ANSWER_BYTES = 6_500  # of slots, so that an answer of several keys stays within a few datagrams
_MAX_PAYLOAD_BYTES = 256 << 10  # of an answer; a larger one travels as a buffer
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything that a peer knows and keeps."""

    table: RoutingTable
    book: ContactBook
    storage: Storage
    cache: Cache
    """What this peer has looked for."""
    pushed: Pushed
    """What others say that they have found."""
    ownership: Ownership
    schemas: Schemas
    rates: Rates

    def coordinates(self, key: bytes, wall_s: float) -> Sequence[int]:
        """Numbers among the live subkeys of a key, ascending."""
        if self.cache.get(key, wall_s) or self.pushed.get(key, wall_s):
            return coordinates_of(self.live_slots(key, wall_s))
        return self.storage.coordinates(key, wall_s)

    def live_slots(self, key: bytes, wall_s: float, *, is_use: bool = False) -> list[Slot]:
        """What is stored under a key, and what is cached where storage would take it as well.

        `is_use` is a read of this peer's own: then what others have pushed here does not count.
        """
        stored = self.storage.get(key, wall_s)
        cached: Sequence[Slot] = self.cache.get(key, wall_s, is_use=is_use)
        if not is_use and not cached:
            cached = self.pushed.get(key, wall_s)
        if not cached or not stored:
            return stored or list(cached)
        contents: Contents | None = None
        for slot in (*stored, *cached):
            if judge(displaced(contents, slot), slot) is Verdict.STORED:
                contents = place(contents, slot)
        return slots_of(contents)

    def check(self, key: bytes, slot: Slot) -> Verdict | None:
        """Why a slot is not to be believed, whoever holds it."""
        return self.ownership.check(key, slot) or self.schemas.check(key, slot)

    def keep(self, key: bytes, slot: Slot, wall_s: float, *, is_cache: bool = False) -> Verdict:
        """Check a slot and keep it."""
        if len(key) != ID_BYTES:
            return Verdict.BAD_VALUE
        refused = self.check(key, slot)
        if refused is not None:
            return refused
        if is_cache:
            return self.pushed.store(key, slot, wall_s)
        verdict = self.storage.store(key, slot, wall_s)
        if verdict is Verdict.STORED:
            self.cache.forget_absence(key)
        return verdict


class Answering:
    """The DHT's methods at one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        peer_id: PeerId,
        holdings: Holdings,
        settings: DHTSettings,
        on_seen: Callable[[Contact, float | None], None],
    ) -> None:
        self._endpoint = endpoint
        self._peer_id = peer_id
        self._holdings = holdings
        self._settings = settings
        self._on_seen = on_seen
        self.num_served = 0
        """Requests so far."""
        self._began_s = endpoint.network.clock.now_s()
        endpoint.handle(PING, self.rpc_ping, payload_type=Ping)
        endpoint.handle(FIND, self.rpc_find, payload_type=Find)
        endpoint.handle(STORE, self.rpc_store, payload_type=Store)
        endpoint.handle(ABOUT, self.rpc_about, payload_type=None)

    def close(self) -> None:
        """Answer no more; another DHT may take its place at the endpoint."""
        for method in (PING, FIND, STORE, ABOUT):
            self._endpoint.routes.remove(method)

    def rpc_ping(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell who and when this is."""
        self._meet(head.peer, head.payload.port)
        wall_s = self._endpoint.network.clock.wall_s()
        return _reply(Pong(self._peer_id.digest, str(head.peer.address), wall_s))

    def rpc_find(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell of records, and of peers that are nearer to their keys."""
        wants: list[Want] = head.payload.wants
        if len(wants) > MAX_WANTS or any(len(want.key) != ID_BYTES for want in wants):
            raise PeerRefused(f"a find takes at most {MAX_WANTS} keys of {ID_BYTES} bytes.")
        self._meet(head.peer, head.payload.port, cost_of_find(len(wants)))
        return _reply(self._find(wants, head.peer.id))

    def rpc_store(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Keep slots, or say of each why not."""
        store: Store = head.payload
        cost = len(store.absent) + sum(map(_cost_of, store.items))
        self._holdings.rates.take_records(head.peer, cost, self._endpoint.datagrams.loop.time())
        self._meet(head.peer, store.port)
        wall_s = self._endpoint.network.clock.wall_s()
        keep = self._holdings.keep
        verdicts = bytes(
            keep(item.key, slot, wall_s, is_cache=store.is_cache)
            for item in store.items
            for slot in item.slots
        )
        until_s = wall_s + min(store.absent_s, self._settings.absent_s)
        for key in store.absent[:MAX_WANTS]:
            if len(key) == ID_BYTES and not self._holdings.storage.get(key, wall_s):
                self._holdings.cache.mark_absent(key, until_s)
        contacts: dict[bytes, int] = {}
        near = [self._unknown(item, head.peer.id, contacts) if item.reach else b"" for item in store.items]
        return _reply(StoreAnswer(verdicts, list(contacts), near if contacts else []))

    def rpc_about(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell how this peer is."""
        self._meet(head.peer, 0)
        holdings, clock = self._holdings, self._endpoint.network.clock
        return _reply(
            About(
                software=__version__,
                uptime_s=clock.now_s() - self._began_s,
                num_records=len(holdings.storage),
                record_bytes=holdings.storage.size_bytes,
                num_cached=len(holdings.cache),
                num_contacts=len(holdings.table),
                is_client=False,  # a client is not asked
                wall_s=clock.wall_s(),
            )
        )

    # --- inside ---

    def _meet(self, peer: Peer, port: int, cost: float = 1) -> None:
        """Take note of who asks; PeerBusy when it asks too often.

        It listens at the address that its packets come from, and has proven that it receives there; whoever
        names another port is believed only once it has answered a call there.
        """
        self.num_served += 1
        self._holdings.rates.take_messages(peer, cost, self._endpoint.datagrams.loop.time())
        if port and peer.id is not None and peer.id != self._peer_id and port == peer.address.port:
            self._on_seen(self._holdings.book.of(peer), None)

    def _find(self, wants: list[Want], asker: PeerId | None) -> Found:
        holdings = self._holdings
        wall_s = self._endpoint.network.clock.wall_s()
        asker_number = _number(asker)
        contacts: dict[bytes, int] = {}
        findings = []
        left_bytes = _MAX_ANSWER_BYTES
        for want in wants:
            key, kind = want.key, want.kind
            if kind == Kind.COORDINATES:
                finding = self._find_coordinates(want, asker_number, wall_s, contacts)
                if len(finding.coordinates) > left_bytes and len(wants) > 1:
                    finding = Finding(State.TOO_LARGE, finding.near)
                left_bytes -= len(finding.coordinates)
                findings.append(finding)
                continue
            slots = holdings.live_slots(key, wall_s) if kind != Kind.PEERS else []
            size_bytes = sum(map(size_of, slots))
            if slots and kind == Kind.VALUE and (size_bytes <= left_bytes or len(wants) == 1):
                findings.append(Finding(State.HERE, b"", slots))
                left_bytes -= size_bytes
                continue
            near = _indexes(self._near(key, want.reach, asker_number), contacts)
            if not slots:
                is_absent = kind != Kind.PEERS and holdings.cache.is_absent(key, wall_s)
                findings.append(Finding(State.ABSENT if is_absent else State.NOTHING, near))
            elif size_bytes > left_bytes and len(wants) > 1:
                findings.append(Finding(State.TOO_LARGE, near))
            else:
                findings.append(Finding(State.HERE, near, slots))
                left_bytes -= size_bytes
        return Found(list(contacts), findings)

    def _find_coordinates(
        self, want: Want, asker_number: int, wall_s: float, contacts: dict[bytes, int]
    ) -> Finding:
        near = _indexes(self._near(want.key, want.reach, asker_number), contacts)
        coordinates = self._holdings.coordinates(want.key, wall_s)
        if not coordinates:
            is_absent = self._holdings.cache.is_absent(want.key, wall_s)
            return Finding(State.ABSENT if is_absent else State.NOTHING, near)
        page, has_more = pack_page(coordinates, want.after)
        return Finding(State.HERE, near, [], page, has_more)

    def _near(self, key: bytes, reach: int, asker_number: int) -> list[Contact]:
        """Peers nearer to a key than the asker's reach, nearest first."""
        number = number_of(key)
        nearest = self._holdings.table.nearest(
            number, MAX_CONTACTS, now_s=self._endpoint.datagrams.loop.time()
        )
        return [
            contact
            for contact in nearest
            if (contact.number ^ number) >> REACH_SHIFT < reach and contact.number != asker_number
        ]

    def _unknown(self, item: Item, asker: PeerId | None, contacts: dict[bytes, int]) -> bytes:
        """Peers that an item should be brought to and is not."""
        if len(item.key) != ID_BYTES:
            return b""
        known = {item.known[at : at + TAG_BYTES] for at in range(0, len(item.known), TAG_BYTES)}
        near = self._near(item.key, item.reach, _number(asker))
        return _indexes([contact for contact in near if tag_of(contact.packed) not in known], contacts)


def _cost_of(item: Item) -> int:
    """What storing an item is counted as: signatures are what takes time."""
    return (len(item.slots) or 1) + OWNED_COST * sum(bool(slot.owner) for slot in item.slots)


def _number(peer_id: PeerId | None) -> int:
    return number_of(peer_id.digest) if peer_id is not None else -1


def _indexes(near: Sequence[Contact], contacts: dict[bytes, int]) -> bytes:
    """Contacts as indexes into those of the whole answer; what an index cannot name is left out."""
    indexes = (contacts.setdefault(contact.packed, len(contacts)) for contact in near)
    return bytes(index for index in indexes if index < MAX_INDEX)


def _reply(answer: object) -> Reply:
    encoded = _encoder.encode(answer)
    return Reply(encoded) if len(encoded) <= _MAX_PAYLOAD_BYTES else Reply(None, [encoded])
