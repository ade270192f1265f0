"""Bringing slots to the peers nearest to their keys, several keys together.

The look-up before it asks only the nearest peer of each key, and more only where peers that it was told of do
not answer. Peers that are then sent a slot tell of others that are nearer than the farthest replica and that
the sender does not know, which are sent it too. A peer that is slow is not waited for: the next nearest takes
its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core import Deadline, UsageError
from shoal.core.identity import Identity
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import (
    PLAIN,
    Entry,
    Slot,
    Stored,
    Verdict,
    encode_subkey,
    encode_value,
    key_of,
    sign_many,
)
from shoal.dht.search import Lookup, Requests, SentRequest, look_up
from shoal.dht.wire import (
    ITEM_BYTES,
    MAX_STORE_BYTES,
    REACH_SHIFT,
    Contact,
    Item,
    LookupKind,
    StoreAnswer,
    in_groups,
    named,
    number_of,
    reach_of,
    size_of,
    tag_of,
)

_CONFIRMED = 1  # peers that must have answered before storing begins
_MAX_TRIED = 8  # times the number of replicas: peers that are asked to keep a slot, at most


def signed_slots(entries: Sequence[Entry], identity: Identity) -> list[tuple[bytes, Slot]]:
    """Entries as they travel, each with its key; those that are to be owned are signed together."""
    made = unsigned_slots(entries)
    owned = [index for index, entry in enumerate(entries) if entry.is_owned]
    for index, slot in zip(owned, sign_many(identity, [made[index] for index in owned]), strict=True):
        made[index] = made[index][0], slot
    return made


def unsigned_slots(entries: Sequence[Entry]) -> list[tuple[bytes, Slot]]:
    """The keys of entries and what they say, encoded; UsageError for what cannot be stored."""
    slots = []
    for entry in entries:
        if not isinstance(entry, Entry):
            raise UsageError(f"{entry!r:.100} is no Entry.", next_step="Entry(name, value, dht.in_s(60)).")
        if not isinstance(entry.expires_at_s, (int, float)) or math.isnan(entry.expires_at_s):
            raise UsageError(
                f"A record cannot expire at {entry.expires_at_s!r}.", next_step="give a time: dht.in_s(60)."
            )
        subkey = PLAIN if entry.subkey is None else encode_subkey(entry.subkey)
        slot = Slot(subkey, encode_value(entry.value), float(entry.expires_at_s))
        slots.append((key_of(entry.name).digest, slot))
    return slots


async def store_slots(
    protocol: DHTProtocol, slots: Sequence[tuple[bytes, Slot]], deadline: Deadline
) -> list[Stored]:
    """Have the peers nearest to each key keep its slots; what became of each, in order."""
    settings = protocol.settings
    by_key: dict[bytes, list[int]] = {}
    verdicts: list[list[Verdict]] = []
    for index, (key, slot) in enumerate(slots):
        is_too_large = len(slot.value) > settings.max_value_bytes
        verdicts.append([Verdict.TOO_LARGE] if is_too_large else [])
        if not is_too_large:
            by_key.setdefault(key, []).append(index)
    lookups = [Lookup(key, LookupKind.PEERS, _CONFIRMED) for key in by_key]
    await look_up(protocol, lookups, deadline)
    doubtful = [index for index, lookup in enumerate(lookups) if lookup.has_silent]
    for index in doubtful:
        lookups[index] = Lookup(lookups[index].key, LookupKind.PEERS, settings.beam)
    await look_up(protocol, [lookups[index] for index in doubtful], deadline)
    pending = []
    for lookup, indexes in zip(lookups, by_key.values(), strict=True):
        near = _near(protocol, lookup)
        for some in in_groups(indexes, lambda index: size_of(slots[index][1]), MAX_STORE_BYTES - ITEM_BYTES):
            part = PendingStore(lookup.key, [slots[index][1] for index in some], near, settings.num_replicas)
            for index, verdict in zip(some, part.verdicts, strict=True):
                verdicts[index] = verdict
            pending.append(part)
    await Storing(protocol).run(pending, deadline)
    outcomes = [_stored(one) for one in verdicts]
    _correct_cache(protocol, slots, outcomes)
    return outcomes


def _near(protocol: DHTProtocol, lookup: Lookup) -> list[tuple[int, Contact | None]]:
    """The nearest peers, and this one, which is None, among them."""
    near: list[tuple[int, Contact | None]] = [entry for entry in lookup.near if not lookup.is_slow(entry[1])]
    if not protocol.is_client:
        near.append((protocol.number ^ lookup.number, None))
        near.sort(key=lambda pair: pair[0])
    return near


def _stored(verdicts: Sequence[Verdict]) -> Stored:
    num_stored = sum(verdict is Verdict.STORED for verdict in verdicts)
    if num_stored:
        return Stored(num_stored, Verdict.STORED)
    return Stored(0, verdicts[0] if verdicts else Verdict.NOT_ASKED)


def _correct_cache(
    protocol: DHTProtocol, slots: Sequence[tuple[bytes, Slot]], outcomes: Sequence[Stored]
) -> None:
    """A peer reads what it has written: its own copy of a key follows, or is looked for again."""
    cache, wall_s = protocol.records.cache, protocol.wall_s()
    for (key, slot), stored in zip(slots, outcomes, strict=True):
        if key in cache:
            if stored:
                cache.store(key, [slot], wall_s)
            else:
                cache.forget(key)


class PendingStore:
    """Slots of one key that fit into a datagram, until as many replicas as wanted hold them."""

    def __init__(
        self, key: bytes, slots: list[Slot], near: Sequence[tuple[int, Contact | None]], num_replicas: int
    ) -> None:
        self.item = Item(key, slots)
        self.size_bytes = ITEM_BYTES + sum(map(size_of, slots))
        self._asking_item: Item | None = None
        """The same, with the question who else is near; None when the replicas have changed."""
        self.number = number_of(key)
        self.candidates = list(reversed(near))
        """Distance of whom to send it to, nearest last; None is this peer."""
        self.replicas: dict[bytes, int] = {}
        """Distances of those that have it, or should soon, by their packed contacts."""
        self.tried: dict[bytes, None] = {}
        self.num_wanted = self.num_replicas = num_replicas
        """Replicas that are still to be found, and that there are to be."""
        self.num_open = 0
        """Peers that are expected to answer."""
        self.num_slow = 0
        """Peers that may still answer, and that others were asked in place of."""
        self.is_done = False
        self.verdicts: list[list[Verdict]] = [[] for _ in slots]

    def choose(self) -> Contact | None:
        """Take the nearest candidate for a replica; None is this peer."""
        distance, contact = self.candidates.pop()
        packed = contact.packed if contact is not None else b""
        self.num_wanted -= 1
        self.replicas[packed] = distance
        self.tried[packed] = None
        self._asking_item = None
        return contact

    def on_gone(self, contact: Contact) -> None:
        """It does not keep it, or not soon: another is to take its place."""
        self.replicas.pop(contact.packed, None)
        self.num_wanted += 1
        self._asking_item = None

    def asking_item(self) -> Item:
        """What to send; who knows of peers nearer than the farthest replica is to tell."""
        if self._asking_item is None:
            self._asking_item = self.item
            distances = sorted(self.replicas.values())
            if len(distances) >= self.num_replicas:
                known = b"".join(tag_of(packed) for packed in self.replicas if packed)
                reach = reach_of(distances[self.num_replicas - 1])
                self._asking_item = Item(self.item.key, self.item.slots, reach, known)
        return self._asking_item

    def add(self, contact: Contact) -> None:
        """Somebody tells of a peer, which is wanted if it is nearer than some of the replicas."""
        distance = contact.number ^ self.number
        if contact.packed in self.tried or any(contact == other for _, other in self.candidates):
            return
        if distance >> REACH_SHIFT < self.asking_item().reach:
            self.candidates.append((distance, contact))
            self.candidates.sort(key=lambda pair: -pair[0])
            self.num_wanted += 1


class Storing(Requests[PendingStore, StoreAnswer]):
    """One batch of slots being stored."""

    def __init__(self, protocol: DHTProtocol) -> None:
        super().__init__(protocol, "dht store")

    def advance(self, part: PendingStore) -> None:
        """Send it to as many more peers as it wants; what this peer itself is to keep is kept at once."""
        protocol = self._protocol
        max_tried = _MAX_TRIED * part.num_replicas
        while part.num_wanted > 0 and part.candidates and len(part.tried) < max_tried:
            nearest = part.candidates[-1][1]
            if nearest is not None and protocol.is_backed_off(nearest):
                part.candidates.pop()
                continue
            contact = part.choose()
            if contact is None:
                wall_s = protocol.wall_s()
                for slot, verdicts in zip(part.item.slots, part.verdicts, strict=True):
                    verdicts.append(protocol.records.store(part.item.key, slot, wall_s))
            else:
                part.num_open += 1
                self._waiting.setdefault(contact, []).append(part)
        has_enough = len(part.verdicts[0]) >= part.num_replicas
        if not part.is_done and part.num_open == 0 and (has_enough or part.num_slow == 0):
            part.is_done = True
            self.end_one()

    def take(self, contact: Contact, waiting: list[PendingStore]) -> list[PendingStore]:
        """As many as fit into a datagram."""
        taken = next(in_groups(waiting, lambda part: part.size_bytes, MAX_STORE_BYTES))
        if len(taken) < len(waiting):
            self._waiting[contact] = waiting[len(taken) :]
        return taken

    async def call(self, request: SentRequest[PendingStore]) -> StoreAnswer:
        """Send slots to one peer."""
        items = [part.asking_item() for part in request.parts]
        return await self._protocol.call_store(request.contact, items)

    def on_answer(self, request: SentRequest[PendingStore], answer: StoreAnswer) -> None:
        """Take in the verdicts, and the peers that should have the slots as well."""
        codes = iter(answer.verdicts)
        nearer = self._protocol.read_contacts(answer.contacts, request.contact.peer.address)
        for index, part in enumerate(request.parts):
            for verdicts in part.verdicts:
                verdicts.append(Verdict(next(codes)))
            for contact in named(nearer, answer.near[index]) if index < len(answer.near) else ():
                part.add(contact)
            self._end(part, request)
        self._slow.pop(request.contact, None)

    def on_failed(self, request: SentRequest[PendingStore]) -> None:
        """Find other peers to hold the slots, unless that was begun when this one was slow."""
        for part in request.parts:
            if not request.is_slow:
                part.on_gone(request.contact)
            self._end(part, request)
        self._slow.pop(request.contact, None)

    def on_slow(self, request: SentRequest[PendingStore]) -> None:
        """Find other peers to hold the slots."""
        for part in request.parts:
            part.num_open -= 1
            part.num_slow += 1
            part.on_gone(request.contact)
            self.advance(part)

    def _end(self, part: PendingStore, request: SentRequest[PendingStore]) -> None:
        """The peer is not waited for any more."""
        if request.is_slow:
            part.num_slow -= 1
        else:
            part.num_open -= 1
        self.advance(part)
