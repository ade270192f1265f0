"""Bringing slots to the peers nearest to their keys, several keys together.

The look-up before it asks only the nearest peer of each key, and more only where peers that it was told of do
not answer. Peers that are then sent a slot tell of others that are nearer than the farthest replica and that
the sender does not know, which are sent it too. A peer that is slow is not waited for: the next nearest takes
its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, Scope, ShoalError
from shoal.dht.records import Slot, Stored, Verdict
from shoal.dht.tracks import Track
from shoal.dht.under_way import UnderWay, until_set
from shoal.dht.wire import (
    MAX_CONTACTS,
    MAX_STORE_BYTES,
    REACH_SHIFT,
    Contact,
    Item,
    Kind,
    StoreAnswer,
    number_of,
    reach_of,
    size_of,
    tag_of,
)

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_ITEM_BYTES = 48  # a key with what is around it
_CONFIRMED = 1  # peers that must have answered before storing begins
_MAX_TRIED = 8  # times the number of replicas: peers that are asked to keep a slot, at most


class _Parcel:
    """Slots of one key that fit into a datagram, on their way to their replicas."""

    __slots__ = (
        "asking_item",
        "candidates",
        "is_done",
        "item",
        "num_open",
        "num_slow",
        "num_wanted",
        "number",
        "replicas",
        "tried",
        "verdicts",
    )

    def __init__(self, key: bytes, slots: list[Slot]) -> None:
        self.item = Item(key, slots)
        self.asking_item: Item | None = None
        """The same, with the question who else is near; None when the replicas have changed."""
        self.number = number_of(key)
        self.candidates: list[tuple[int, Contact | None]] = []
        """Distance of whom to send it to, nearest last; None is this peer."""
        self.replicas: dict[bytes, int] = {}
        """Distances of those that have it, or should soon, by their packed contacts."""
        self.tried: dict[bytes, None] = {}
        self.num_wanted = 0
        """Replicas that are still to be found."""
        self.num_open = 0
        """Peers that are expected to answer."""
        self.num_slow = 0
        """Peers that may still answer, and that others were asked in place of."""
        self.is_done = False
        self.verdicts: list[list[Verdict]] = [[] for _ in slots]

    def begin(self, near: Sequence[tuple[int, Contact | None]], num_replicas: int) -> None:
        """Set out for the nearest of these; nearest first."""
        self.candidates = list(reversed(near))
        self.num_wanted = num_replicas

    def choose(self) -> Contact | None:
        """Take the nearest candidate for a replica; None is this peer."""
        distance, contact = self.candidates.pop()
        packed = contact.packed if contact is not None else b""
        self.num_wanted -= 1
        self.replicas[packed] = distance
        self.tried[packed] = None
        self.asking_item = None
        return contact

    def on_gone(self, contact: Contact) -> None:
        """It does not keep it, or not soon: another is to take its place."""
        self.replicas.pop(contact.packed, None)
        self.num_wanted += 1
        self.asking_item = None

    def item_for(self, num_replicas: int) -> Item:
        """What to send; who knows of peers nearer than the farthest replica is to tell."""
        if self.asking_item is None:
            self.asking_item = self.item
            distances = sorted(self.replicas.values())
            if len(distances) >= num_replicas:
                known = b"".join(tag_of(packed) for packed in self.replicas if packed)
                reach = reach_of(distances[num_replicas - 1])
                self.asking_item = Item(self.item.key, self.item.slots, reach, known)
        return self.asking_item

    def add(self, contact: Contact, num_replicas: int) -> None:
        """Somebody tells of a peer, which is wanted if it is nearer than some of the replicas."""
        distance = contact.number ^ self.number
        if contact.packed in self.tried or any(contact == other for _, other in self.candidates):
            return
        if distance >> REACH_SHIFT < self.item_for(num_replicas).reach:
            self.candidates.append((distance, contact))
            self.candidates.sort(key=lambda pair: -pair[0])
            self.num_wanted += 1


class _Request:
    """Parcels on their way to one peer."""

    __slots__ = ("contact", "is_slow", "parcels")

    def __init__(self, contact: Contact, parcels: list[_Parcel]) -> None:
        self.contact = contact
        self.parcels = parcels
        self.is_slow = False


class Storing:
    """One batch of slots being stored."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._waiting: dict[Contact, list[_Parcel]] = {}
        self._under_way: UnderWay[_Request] = UnderWay(dht.slow_s, self._on_slow)
        self._slow: dict[_Request, None] = {}
        self._num_open = 0
        self._ended = asyncio.Event()
        self._scope = Scope("dht store")

    async def run(self, slots: Sequence[tuple[bytes, Slot]], deadline: Deadline) -> list[Stored]:
        """Store them all; what became of each, in order."""
        dht = self._dht
        by_key: dict[bytes, list[int]] = {}
        too_large = [len(slot.value) > dht.settings.max_value_bytes for _, slot in slots]
        for index, (key, _) in enumerate(slots):
            if not too_large[index]:
                by_key.setdefault(key, []).append(index)
        tracks = [Track(key, Kind.PEERS, _CONFIRMED) for key in by_key]
        await dht.search(tracks, deadline)
        doubtful = [index for index, track in enumerate(tracks) if track.has_silent]
        for index in doubtful:
            tracks[index] = Track(tracks[index].key, Kind.PEERS, dht.settings.beam)
        await dht.search([tracks[index] for index in doubtful], deadline)
        verdicts: list[list[Verdict]] = [[Verdict.TOO_LARGE] if is_so else [] for is_so in too_large]
        parcels = []
        for track, indexes in zip(tracks, by_key.values(), strict=True):
            near = self._near(track)
            for some in _cut(indexes, slots):
                parcel = _Parcel(track.key, [slots[index][1] for index in some])
                parcel.begin(near, dht.settings.num_replicas)
                for index, verdict in zip(some, parcel.verdicts, strict=True):
                    verdicts[index] = verdict
                parcels.append(parcel)
        await self._send_all(parcels, deadline)
        return [_stored(one) for one in verdicts]

    def _near(self, track: Track) -> list[tuple[int, Contact | None]]:
        """The nearest peers, this one among them."""
        near: list[tuple[int, Contact | None]] = [
            entry for entry in track.near if not track.is_slow(entry[1])
        ]
        if not self._dht.is_client:
            near.append((number_of(self._dht.peer_id.digest) ^ track.number, None))
            near.sort(key=lambda pair: pair[0])
        return near

    async def _send_all(self, parcels: Sequence[_Parcel], deadline: Deadline) -> None:
        self._num_open = len(parcels)
        try:
            async with self._scope:
                for parcel in parcels:
                    self._advance(parcel)
                self._dispatch()
                if self._num_open:
                    await until_set(self._ended, deadline)
                self._stop()
                self._scope.cancel()
        finally:
            self._stop()

    def _stop(self) -> None:
        """Send nothing any more; whoever has not answered yet is to be looked after by others."""
        self._ended.set()
        self._under_way.close()
        for request in self._slow:
            self._dht.doubt(request.contact)
        self._slow.clear()

    def _advance(self, parcel: _Parcel) -> None:
        """Send it to as many more peers as it wants; what this peer itself is to keep is kept at once."""
        dht = self._dht
        max_tried = _MAX_TRIED * dht.settings.num_replicas
        while parcel.num_wanted > 0 and parcel.candidates and len(parcel.tried) < max_tried:
            nearest = parcel.candidates[-1][1]
            if nearest is not None and dht.is_set_aside(nearest):
                parcel.candidates.pop()
                continue
            contact = parcel.choose()
            if contact is None:
                wall_s = dht.wall_s()
                for slot, verdicts in zip(parcel.item.slots, parcel.verdicts, strict=True):
                    verdicts.append(dht.holdings.keep(parcel.item.key, slot, wall_s))
            else:
                parcel.num_open += 1
                self._waiting.setdefault(contact, []).append(parcel)
        has_enough = len(parcel.verdicts[0]) >= dht.settings.num_replicas
        if not parcel.is_done and parcel.num_open == 0 and (has_enough or parcel.num_slow == 0):
            parcel.is_done = True
            self._num_open -= 1
            if self._num_open == 0:
                self._ended.set()

    def _dispatch(self) -> None:
        while self._waiting and self._under_way.has_room and not self._ended.is_set():
            contact = next(iter(self._waiting))
            parcels = self._waiting.pop(contact)
            num_fitting, left_bytes = 0, MAX_STORE_BYTES
            for parcel in parcels:
                left_bytes -= _size_of(parcel.item)
                if left_bytes < 0 and num_fitting:
                    break
                num_fitting += 1
            if num_fitting < len(parcels):
                self._waiting[contact] = parcels[num_fitting:]
            request = _Request(contact, parcels[:num_fitting])
            self._under_way.begin(request)
            self._scope.start(self._send(request), name="store")

    async def _send(self, request: _Request) -> None:
        num_replicas = self._dht.settings.num_replicas
        try:
            answer = await self._dht.asking.call_store(
                request.contact, [parcel.item_for(num_replicas) for parcel in request.parcels]
            )
        except ShoalError:
            self._fail(request)
        else:
            self._take_in(request, answer)
        self._under_way.end(request)
        self._slow.pop(request, None)
        self._dispatch()

    def _take_in(self, request: _Request, answer: StoreAnswer) -> None:
        codes = iter(answer.verdicts)
        nearer = self._dht.read_contacts(answer.contacts, request.contact.peer.address)
        for index, parcel in enumerate(request.parcels):
            for verdicts in parcel.verdicts:
                verdicts.append(Verdict(next(codes)))
            for at in answer.near[index][:MAX_CONTACTS] if index < len(answer.near) else b"":
                if at < len(nearer) and (contact := nearer[at]) is not None:
                    parcel.add(contact, self._dht.settings.num_replicas)
            if request.is_slow:
                parcel.num_slow -= 1
            else:
                parcel.num_open -= 1
            self._advance(parcel)

    def _on_slow(self, request: _Request) -> None:
        request.is_slow = True
        self._slow[request] = None
        for parcel in request.parcels:
            parcel.num_open -= 1
            parcel.num_slow += 1
            parcel.on_gone(request.contact)
            self._advance(parcel)
        self._dispatch()

    def _fail(self, request: _Request) -> None:
        for parcel in request.parcels:
            if request.is_slow:
                parcel.num_slow -= 1
            else:
                parcel.num_open -= 1
                parcel.on_gone(request.contact)
            self._advance(parcel)


def _size_of(item: Item) -> int:
    return _ITEM_BYTES + sum(map(size_of, item.slots))


def _cut(indexes: Sequence[int], slots: Sequence[tuple[bytes, Slot]]) -> list[list[int]]:
    """Slots of one key in parts that fit into a datagram each; what does not fit is alone."""
    parts: list[list[int]] = []
    left_bytes = 0
    for index in indexes:
        size_bytes = size_of(slots[index][1])
        if not parts or size_bytes > left_bytes:
            parts.append([])
            left_bytes = MAX_STORE_BYTES - _ITEM_BYTES
        parts[-1].append(index)
        left_bytes -= size_bytes
    return parts


def _stored(verdicts: Sequence[Verdict]) -> Stored:
    num_stored = sum(verdict is Verdict.STORED for verdict in verdicts)
    if num_stored:
        return Stored(num_stored, Verdict.STORED)
    return Stored(0, verdicts[0] if verdicts else Verdict.NOT_ASKED)
