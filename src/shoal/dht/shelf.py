"""Slots by key and by expiration: what storage and cache are made of.

It keeps count of slots and bytes and drops what is over. What may come in is decided by `conflicts`, and what
must go for want of room by its users.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shoal.dht.records import MAX_SUBKEY_BYTES, Contents, Slot, Verdict, displaced, place, slots_of
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import coordinates_of

_SLOT_BYTES = 320  # a slot's own memory and its share of the containers around it, as measured
KEY_BYTES = 120
"""About what a key takes besides its slots."""
_MIN_STALE = 16


def size_of(slot: Slot) -> int:
    """About what it takes to keep, besides its key."""
    return _SLOT_BYTES + len(slot.subkey) + len(slot.value) + len(slot.owner) + len(slot.signature)


def refusal(slot: Slot, now_s: float, settings: DHTSettings) -> Verdict | None:
    """Why nobody would keep it, whatever else there is; None when somebody might.

    Its writer's clock may be ahead by as much as clocks may differ.
    """
    lifetime_s = slot.expires_at_s - now_s
    if not lifetime_s > 0:  # NaN is over too
        return Verdict.EXPIRED
    if lifetime_s > settings.max_lifetime_s + settings.max_clock_gap_s:
        return Verdict.TOO_LONG
    if len(slot.subkey) > MAX_SUBKEY_BYTES:
        return Verdict.TOO_LARGE
    around_bytes = len(slot.subkey) + len(slot.owner) + len(slot.signature)
    if len(slot.value) > settings.max_value_bytes or around_bytes > settings.max_value_bytes:
        return Verdict.TOO_LARGE
    return None


class Held:
    """What is under one key."""

    __slots__ = ("contents", "coordinates", "is_told", "is_used", "stored_at_s")

    def __init__(self, contents: Contents, stored_at_s: float) -> None:
        self.contents = contents
        self.stored_at_s = stored_at_s
        self.coordinates: list[int] | None = None
        """Those of `contents`, once they were asked for."""
        self.is_used = False
        """In a cache: read since something new came."""
        self.is_told = False
        """In a cache: told to be due for refresh."""

    @property
    def num_slots(self) -> int:
        """One for a plain value."""
        return len(self.contents) if isinstance(self.contents, dict) else 1

    @property
    def size_bytes(self) -> int:
        """Its share of the shelf's."""
        return KEY_BYTES + sum(map(size_of, slots_of(self.contents)))


class Shelf:
    """Not bounded by itself; every slot on it was live when `expire` was called last."""

    __slots__ = ("_by_expiration", "held", "num_slots", "size_bytes")

    def __init__(self) -> None:
        self.held: dict[bytes, Held] = {}
        """In the order in which keys came. To be read only."""
        self.num_slots = 0
        self.size_bytes = 0
        self._by_expiration: list[tuple[float, bytes, bytes]] = []
        """A heap of expiration, key and subkey; those of slots that were replaced or dropped stay for a
        while."""

    @property
    def num_index_entries(self) -> int:
        """At most about twice as many as slots."""
        return len(self._by_expiration)

    def displaced(self, key: bytes, slot: Slot) -> list[Slot]:
        """The slots whose place it would take."""
        held = self.held.get(key)
        return [] if held is None else displaced(held.contents, slot)

    def put(self, key: bytes, slot: Slot, now_s: float, replaced: Sequence[Slot]) -> Held:
        """Place a slot that was judged fit to take the place of `replaced`."""
        held = self.held.get(key)
        if held is None:
            held = self.held[key] = Held(slot, now_s)
            self.size_bytes += KEY_BYTES
        else:
            if len(replaced) != 1 or replaced[0].subkey != slot.subkey:
                held.coordinates = None
            held.contents = place(held.contents, slot)
            held.stored_at_s = now_s
        self._uncount(replaced)
        self.num_slots += 1
        self.size_bytes += size_of(slot)
        if len(self._by_expiration) > 2 * self.num_slots + _MIN_STALE:
            self._index_anew()
        else:
            heapq.heappush(self._by_expiration, (slot.expires_at_s, key, slot.subkey))
        return held

    def slots(self, key: bytes) -> list[Slot]:
        """What is under a key."""
        held = self.held.get(key)
        return [] if held is None else slots_of(held.contents)

    def coordinates(self, key: bytes) -> Sequence[int]:
        """Subkeys under a key that are coordinates, in ascending order; remembered while they stay so."""
        held = self.held.get(key)
        if held is None:
            return ()
        if held.coordinates is None:
            held.coordinates = coordinates_of(slots_of(held.contents))
        return held.coordinates

    def drop(self, key: bytes) -> None:
        """Forget all that is under a key."""
        self._uncount(slots_of(self.held.pop(key).contents))
        self.size_bytes -= KEY_BYTES

    def expire(self, now_s: float) -> None:
        """Drop every slot whose time is over."""
        heap = self._by_expiration
        while heap and heap[0][0] <= now_s:
            entry = heapq.heappop(heap)
            if self._is_current(entry):
                self._remove(entry[1], entry[2])

    def soonest(self) -> bytes | None:
        """The key of the slot that expires next."""
        heap = self._by_expiration
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def expiring(self, until_s: float) -> list[bytes]:
        """Keys of which a slot expires by then, the soonest first."""
        heap = self._by_expiration
        found, places = [], [0]
        for at in places:  # down from the root of the heap, while entries are soon enough
            if at < len(heap) and heap[at][0] <= until_s:
                places += (2 * at + 1, 2 * at + 2)
                if self._is_current(heap[at]):
                    found.append(heap[at])
        return list(dict.fromkeys(key for _, key, _ in sorted(found)))

    def _is_current(self, entry: tuple[float, bytes, bytes]) -> bool:
        expires_at_s, key, subkey = entry
        held = self.held.get(key)
        if held is None:
            return False
        contents = held.contents
        slot = contents.get(subkey) if isinstance(contents, dict) else contents
        return slot is not None and slot.subkey == subkey and slot.expires_at_s == expires_at_s

    def _remove(self, key: bytes, subkey: bytes) -> None:
        held = self.held[key]
        contents = held.contents
        if not isinstance(contents, dict) or len(contents) == 1:
            self.drop(key)
        else:
            held.coordinates = None
            self._uncount((contents.pop(subkey),))

    def _uncount(self, slots: Sequence[Slot]) -> None:
        self.num_slots -= len(slots)
        for slot in slots:
            self.size_bytes -= size_of(slot)

    def _index_anew(self) -> None:
        self._by_expiration = [
            (slot.expires_at_s, key, slot.subkey)
            for key, held in self.held.items()
            for slot in slots_of(held.contents)
        ]
        heapq.heapify(self._by_expiration)
