"""What a peer keeps for the swarm: live records, the nearest to its own id when there is no room for all.

Signatures, schemas and rates are for those who call it; times are on the wall clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from shoal.core import PeerId
from shoal.core.ids import ID_BYTES
from shoal.dht.records import PLAIN, Slot, Verdict, judge
from shoal.dht.settings import DHTSettings
from shoal.dht.shelf import KEY_BYTES, Shelf, refusal, size_of
from shoal.dht.wire import number_of

_MIN_STALE = 16


class Storage:
    """Records of one peer, bounded in slots and bytes. `len` is the number of slots."""

    __slots__ = ("_by_distance", "_own", "_settings", "_shelf")

    def __init__(self, own: PeerId, settings: DHTSettings) -> None:
        self._own = number_of(own.digest)
        self._settings = settings
        self._shelf = Shelf()
        self._by_distance: list[int] | None = None
        """A heap of distances, negative so that the farthest is first; those of keys that are gone stay for
        a while. None until there is no room for the first time."""

    def store(self, key: bytes, slot: Slot, now_s: float) -> Verdict:
        """Keep a slot whose signature is known to be good, if the rules and the room allow it."""
        shelf = self._shelf
        shelf.expire(now_s)
        refused = refusal(slot, now_s, self._settings)
        if refused is not None:
            return refused
        replaced = shelf.displaced(key, slot)
        verdict = judge(replaced, slot)
        if verdict is not Verdict.STORED:
            if replaced[0] == slot:
                shelf.held[key].stored_at_s = now_s
            return verdict
        if not self._make_room(key, slot, replaced):
            return Verdict.FULL
        is_new = key not in shelf.held
        shelf.put(key, slot, now_s, replaced)
        if is_new and self._by_distance is not None:
            self._index(key)
        return Verdict.STORED

    def get(self, key: bytes, now_s: float) -> list[Slot]:
        """The live slots of a key: one plain value, or all subkeys; empty when there is nothing."""
        self._shelf.expire(now_s)
        return self._shelf.slots(key)

    def coordinates(self, key: bytes, now_s: float) -> Sequence[int]:
        """The live subkeys of a key that are coordinates, in ascending order; to be read only."""
        self._shelf.expire(now_s)
        return self._shelf.coordinates(key)

    def expire(self, now_s: float) -> None:
        """Drop what is over; `store` and `get` do it as well."""
        self._shelf.expire(now_s)

    def keys(self) -> list[bytes]:
        """All keys in the order in which they came, some perhaps over."""
        return list(self._shelf.held)

    def all_items(self, now_s: float) -> Iterator[tuple[bytes, list[Slot]]]:
        """The keys that are here now with their live slots; the storage may change meanwhile."""
        for key in self.keys():
            slots = self.get(key, now_s)
            if slots:
                yield key, slots

    def stored_at_s(self, key: bytes) -> float | None:
        """When a slot was last accepted, or one that is here was sent again; None when nothing is here."""
        held = self._shelf.held.get(key)
        return None if held is None else held.stored_at_s

    @property
    def num_keys(self) -> int:
        """Keys with at least one slot."""
        return len(self._shelf.held)

    @property
    def size_bytes(self) -> int:
        """About the memory that the records take."""
        return self._shelf.size_bytes

    def __len__(self) -> int:
        return self._shelf.num_slots

    def __contains__(self, key: bytes) -> bool:
        return key in self._shelf.held

    def _make_room(self, key: bytes, slot: Slot, replaced: list[Slot]) -> bool:
        settings, shelf = self._settings, self._shelf
        held = shelf.held.get(key)
        num_kept = (held.num_slots if held else 0) - len(replaced)
        if slot.subkey != PLAIN and num_kept >= settings.max_slots_a_key:
            return False
        num_more = 1 - len(replaced)
        more_bytes = size_of(slot) - sum(map(size_of, replaced)) + (KEY_BYTES if held is None else 0)
        num_over = shelf.num_slots + num_more - settings.max_records
        over_bytes = shelf.size_bytes + more_bytes - settings.max_bytes
        if num_over <= 0 and over_bytes <= 0:
            return True
        return self._drop_farthest(number_of(key) ^ self._own, num_over, over_bytes)

    def _drop_farthest(self, nearer_than: int, num_slots: int, size_bytes: int) -> bool:
        """Drop as many of the farthest keys as must go, or none when that would not suffice."""
        heap, shelf = self._distances(), self._shelf
        victims: list[int] = []
        while num_slots > 0 or size_bytes > 0:
            if not heap or -heap[0] <= nearer_than:
                for distance in victims:
                    heapq.heappush(heap, -distance)
                return False
            distance = -heapq.heappop(heap)
            held = shelf.held.get(self._key_at(distance))
            if held is not None and (not victims or victims[-1] != distance):
                victims.append(distance)
                num_slots -= held.num_slots
                size_bytes -= held.size_bytes
        for distance in victims:
            shelf.drop(self._key_at(distance))
        return True

    def _distances(self) -> list[int]:
        if self._by_distance is None:
            self._by_distance = [-(number_of(key) ^ self._own) for key in self._shelf.held]
            heapq.heapify(self._by_distance)
        return self._by_distance

    def _index(self, key: bytes) -> None:
        assert self._by_distance is not None
        if len(self._by_distance) > 2 * self.num_keys + _MIN_STALE:
            self._by_distance = None
        else:
            heapq.heappush(self._by_distance, -(number_of(key) ^ self._own))

    def _key_at(self, distance: int) -> bytes:
        return (distance ^ self._own).to_bytes(ID_BYTES)
