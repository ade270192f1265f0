"""What a peer holds: records stored for the swarm, records that it has looked for, and copies left with it.

`LocalRecords` is the door: what others store comes in through it once a `Validator` has found nothing
wrong, and look-ups read it first. Behind it are a storage and two caches that follow the same rules
(`records.judge`) and differ in what goes when there is no room: of the `Storage` the keys farthest from
this peer's id, of a `Cache` what expires soonest. Times are on the wall clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from shoal.core import PeerId
from shoal.core.ids import ID_BYTES
from shoal.dht.records import (
    MAX_SUBKEY_BYTES,
    PLAIN,
    Contents,
    Slot,
    Validator,
    Verdict,
    displaced,
    judge,
    place,
    slots_of,
)
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import coordinates_of, number_of, pack_coordinates

PUSHED_S = 300.0
"""How long a copy that another peer has left is kept at most."""
KEY_BYTES = 120
"""About what a key takes in memory besides its slots."""
_SLOT_BYTES = 320  # a slot's own memory and its share of the containers around it, as measured
_MIN_STALE = 16  # entries of an index that are out of date before it is made anew


class LocalRecords:
    """All records that one peer holds, of whichever kind."""

    def __init__(self, own: PeerId, settings: DHTSettings, validator: Validator) -> None:
        self.storage = Storage(own, settings)
        self.cache = Cache(settings)
        """What this peer has looked for."""
        self.pushed = Cache(settings, PUSHED_S)
        """What others say that they have found: used to answer, never to read.

        It was checked as all that is stored, but this peer did not look for it itself. So it is forgotten
        soon, whatever its expiration, for nobody to speak through this peer for long; and it is apart, for
        what strangers send to displace nothing that was looked for.
        """
        self._validator = validator

    def get(self, key: bytes, wall_s: float, *, is_use: bool = False) -> list[Slot]:
        """What is stored under a key, and what is cached where storage would take it as well.

        `is_use` is a read of this peer's own: then what others have pushed here does not count.
        """
        stored = self.storage.get(key, wall_s)
        cached = self.cache.get(key, wall_s, is_use=is_use)
        if self.pushed and not is_use and not cached:
            cached = self.pushed.get(key, wall_s)
        if not cached or not stored:
            return stored or cached
        contents: Contents | None = None
        for slot in (*stored, *cached):
            if judge(displaced(contents, slot), slot) is Verdict.STORED:
                contents = place(contents, slot)
        return slots_of(contents)

    def coordinates(self, key: bytes, wall_s: float) -> bytes:
        """The numbers among the live subkeys of a key, packed; nothing where there are none."""
        if self.cache.get(key, wall_s) or self.pushed.get(key, wall_s):
            return pack_coordinates(coordinates_of(self.get(key, wall_s)))
        return self.storage.coordinates(key, wall_s)

    def store(self, key: bytes, slot: Slot, wall_s: float, *, is_pushed: bool = False) -> Verdict:
        """Check a slot and keep it; `is_pushed` for a copy of what somebody has found elsewhere."""
        if len(key) != ID_BYTES:
            return Verdict.BAD_VALUE
        refused = self._validator.check(key, slot)
        if refused is not None:
            return refused
        if is_pushed:
            return self.pushed.store(key, [slot], wall_s)[0]
        verdict = self.storage.store(key, slot, wall_s)
        if verdict is Verdict.STORED:
            self.cache.forget_absence(key)
        return verdict


# --- slots by key and by expiration: what storage and caches are made of ---


def memory_bytes(slot: Slot) -> int:
    """About what a slot takes in memory, besides its key."""
    return _SLOT_BYTES + len(slot.subkey) + len(slot.value) + len(slot.owner) + len(slot.signature)


class HeldRecord:
    """What is held under one key."""

    __slots__ = ("contents", "coordinates", "is_named", "is_used", "stored_at_s", "until_s")

    def __init__(self, contents: Contents, stored_at_s: float, until_s: float) -> None:
        self.contents = contents
        self.stored_at_s = stored_at_s
        self.until_s = until_s
        """When it is dropped, whatever the expiration of its slots."""
        self.coordinates: bytes | None = None
        """Those of `contents`, packed, once they were asked for."""
        self.is_used = False
        """In a cache: read since something new came."""
        self.is_named = False
        """In a cache: named as due for refresh."""

    @property
    def num_slots(self) -> int:
        """How many slots there are; one for a plain value."""
        return len(self.contents) if isinstance(self.contents, dict) else 1

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return KEY_BYTES + sum(map(memory_bytes, slots_of(self.contents)))


class ExpiringSlots:
    """Slots under keys, counted, that are dropped when they expire; not bounded by itself.

    Where `max_kept_s` is given, keys are dropped so long after they came at the latest.
    """

    __slots__ = ("_by_expiration", "_max_kept_s", "_settings", "held", "num_slots", "size_bytes")

    def __init__(self, settings: DHTSettings, max_kept_s: float = math.inf) -> None:
        self._settings = settings
        self._max_kept_s = max_kept_s
        self.held: dict[bytes, HeldRecord] = {}
        """In the order in which keys came. To be read only."""
        self.num_slots = 0
        self.size_bytes = 0
        """About the memory that the records take."""
        self._by_expiration: list[tuple[float, bytes, bytes]] = []
        """A heap of expiration, key and subkey; those of slots that were replaced or dropped stay for a
        while."""

    def __contains__(self, key: bytes) -> bool:
        return key in self.held

    def get(self, key: bytes, now_s: float, *, is_use: bool = False) -> list[Slot]:
        """The live slots of a key: one plain value, or all subkeys; empty when there is nothing.

        A use makes what is cached due for refresh before it expires.
        """
        self.expire(now_s)
        held = self.held.get(key)
        if held is None:
            return []
        held.is_used |= is_use
        return slots_of(held.contents)

    def coordinates(self, key: bytes, now_s: float) -> bytes:
        """The live subkeys of a key that are coordinates, packed, which is done once while they stay so."""
        self.expire(now_s)
        held = self.held.get(key)
        if held is None:
            return b""
        if held.coordinates is None:
            held.coordinates = pack_coordinates(coordinates_of(slots_of(held.contents)))
        return held.coordinates

    def judge(self, key: bytes, slot: Slot, now_s: float) -> tuple[Verdict, list[Slot]]:
        """Whether the rules let a slot in, and the slots whose place it would take; room is not looked at.

        Its writer's clock may be ahead by as much as clocks may differ.
        """
        settings, lifetime_s = self._settings, slot.expires_at_s - now_s
        if not lifetime_s > 0:  # NaN is over too
            return Verdict.EXPIRED, []
        if lifetime_s > settings.max_lifetime_s + settings.max_clock_gap_s:
            return Verdict.TOO_LONG, []
        around_bytes = len(slot.subkey) + len(slot.owner) + len(slot.signature)
        largest_bytes = max(len(slot.value), around_bytes)
        if largest_bytes > settings.max_value_bytes or len(slot.subkey) > MAX_SUBKEY_BYTES:
            return Verdict.TOO_LARGE, []
        held = self.held.get(key)
        replaced = displaced(held.contents if held is not None else None, slot)
        return judge(replaced, slot), replaced

    def put(self, key: bytes, slot: Slot, now_s: float, replaced: Sequence[Slot]) -> HeldRecord:
        """Place a slot that was judged fit to take the place of `replaced`."""
        held = self.held.get(key)
        if held is None:
            held = self.held[key] = HeldRecord(slot, now_s, now_s + self._max_kept_s)
            self.size_bytes += KEY_BYTES
        else:
            if len(replaced) != 1 or replaced[0].subkey != slot.subkey:
                held.coordinates = None
            held.contents = place(held.contents, slot)
            held.stored_at_s = now_s
        self._uncount(replaced)
        self.num_slots += 1
        self.size_bytes += memory_bytes(slot)
        if len(self._by_expiration) > 2 * self.num_slots + _MIN_STALE:
            self._by_expiration = [
                (min(each.expires_at_s, held.until_s), key, each.subkey)
                for key, held in self.held.items()
                for each in slots_of(held.contents)
            ]
            heapq.heapify(self._by_expiration)
        else:
            ends_at_s = min(slot.expires_at_s, held.until_s)
            heapq.heappush(self._by_expiration, (ends_at_s, key, slot.subkey))
        return held

    def drop(self, key: bytes) -> None:
        """Forget all that is under a key."""
        self._uncount(slots_of(self.held.pop(key).contents))
        self.size_bytes -= KEY_BYTES

    def expire(self, now_s: float) -> None:
        """Drop every slot whose time is over; all that read or store do it first."""
        heap = self._by_expiration
        while heap and heap[0][0] <= now_s:
            entry = heapq.heappop(heap)
            if self._is_current(entry):
                _, key, subkey = entry
                held = self.held[key]
                if not isinstance(held.contents, dict) or len(held.contents) == 1:
                    self.drop(key)
                else:
                    held.coordinates = None
                    self._uncount((held.contents.pop(subkey),))

    def soonest(self) -> bytes | None:
        """The key of the slot that expires next."""
        heap = self._by_expiration
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _is_current(self, entry: tuple[float, bytes, bytes]) -> bool:
        """Whether an entry of the index is of a slot that is still held."""
        ends_at_s, key, subkey = entry
        held = self.held.get(key)
        if held is None:
            return False
        contents = held.contents
        slot = contents.get(subkey) if isinstance(contents, dict) else contents
        if slot is None or slot.subkey != subkey:
            return False
        return min(slot.expires_at_s, held.until_s) == ends_at_s

    def _uncount(self, slots: Sequence[Slot]) -> None:
        self.num_slots -= len(slots)
        self.size_bytes -= sum(map(memory_bytes, slots))


class Storage(ExpiringSlots):
    """Records kept for the swarm, bounded in slots and bytes. `len` is the number of slots.

    Signatures, schemas and rates are for those who call it.
    """

    __slots__ = ("_by_distance", "_own")

    def __init__(self, own: PeerId, settings: DHTSettings) -> None:
        super().__init__(settings)
        self._own = number_of(own.digest)
        self._by_distance: list[int] | None = None
        """A heap of distances, negative so that the farthest is first; those of keys that are gone stay for
        a while. None until there is no room for the first time."""

    def __len__(self) -> int:
        return self.num_slots

    def store(self, key: bytes, slot: Slot, now_s: float) -> Verdict:
        """Keep a slot whose signature is known to be good, if the rules and the room allow it.

        The same slot once more is stored: its first answer was lost, or another replica has republished it.
        """
        self.expire(now_s)
        verdict, replaced = self.judge(key, slot, now_s)
        if replaced and replaced[0] == slot:
            self.held[key].stored_at_s = now_s
            return Verdict.STORED
        if verdict is not Verdict.STORED:
            return verdict
        if not self._make_room(key, slot, replaced):
            return Verdict.FULL
        is_new = key not in self.held
        self.put(key, slot, now_s, replaced)
        if is_new and self._by_distance is not None:
            if len(self._by_distance) > 2 * len(self.held) + _MIN_STALE:
                self._by_distance = None
            else:
                heapq.heappush(self._by_distance, -(number_of(key) ^ self._own))
        return Verdict.STORED

    def keys(self) -> list[bytes]:
        """All keys in the order in which they came, some perhaps over."""
        return list(self.held)

    def stored_at_s(self, key: bytes) -> float:
        """When a slot was last accepted, or sent again as it is here; long ago when nothing is here."""
        held = self.held.get(key)
        return -math.inf if held is None else held.stored_at_s

    def _make_room(self, key: bytes, slot: Slot, replaced: list[Slot]) -> bool:
        settings = self._settings
        held = self.held.get(key)
        num_kept = (held.num_slots if held else 0) - len(replaced)
        if slot.subkey != PLAIN and num_kept >= settings.max_slots_a_key:
            return False
        key_bytes = KEY_BYTES if held is None else 0
        more_bytes = key_bytes + memory_bytes(slot) - sum(map(memory_bytes, replaced))
        num_over = self.num_slots + 1 - len(replaced) - settings.max_records
        over_bytes = self.size_bytes + more_bytes - settings.max_bytes
        if num_over <= 0 and over_bytes <= 0:
            return True
        return self._drop_farthest(number_of(key) ^ self._own, num_over, over_bytes)

    def _drop_farthest(self, nearer_than: int, num_slots: int, size_bytes: int) -> bool:
        """Drop as many of the farthest keys as must go, or none when that would not suffice."""
        if self._by_distance is None:
            self._by_distance = [-(number_of(key) ^ self._own) for key in self.held]
            heapq.heapify(self._by_distance)
        heap = self._by_distance
        victims: list[int] = []
        while num_slots > 0 or size_bytes > 0:
            if not heap or -heap[0] <= nearer_than:
                for distance in victims:
                    heapq.heappush(heap, -distance)
                return False
            distance = -heapq.heappop(heap)
            held = self.held.get(self._key_at(distance))
            if held is not None and (not victims or victims[-1] != distance):
                victims.append(distance)
                num_slots -= held.num_slots
                size_bytes -= held.size_bytes
        for distance in victims:
            self.drop(self._key_at(distance))
        return True

    def _key_at(self, distance: int) -> bytes:
        return (distance ^ self._own).to_bytes(ID_BYTES)


class Cache(ExpiringSlots):
    """Records of others, bounded in keys and bytes, and markers of absence. `len` is the number of keys.

    Anything here may be forgotten at any time. A dictionary counts as expiring with the first of its subkeys,
    since it has a gap from then on; for want of room it goes as a whole. Fetching again what is due is for
    those who call it.
    """

    __slots__ = ("absent",)

    def __init__(self, settings: DHTSettings, max_kept_s: float = math.inf) -> None:
        super().__init__(settings, max_kept_s)
        self.absent: dict[bytes, float] = {}
        """When markers end, the one that was set last at the end."""

    def __len__(self) -> int:
        return len(self.held)

    def store(self, key: bytes, slots: Iterable[Slot], now_s: float) -> list[Verdict]:
        """Remember slots of one key that were found together, each by its own verdict.

        FULL: they were forgotten at once, being larger than the cache or the soonest to expire. What is
        stored ends the key's marker of absence.
        """
        self.expire(now_s)
        verdicts = [self._store(key, slot, now_s) for slot in slots]
        if Verdict.STORED not in verdicts:
            return verdicts
        self.forget_absence(key)
        settings = self._settings
        while len(self.held) > settings.max_cached or self.size_bytes > settings.max_cached_bytes:
            soonest = self.soonest()
            assert soonest is not None
            self.drop(soonest)
        if key in self.held:
            return verdicts
        return [Verdict.FULL if verdict is Verdict.STORED else verdict for verdict in verdicts]

    def _store(self, key: bytes, slot: Slot, now_s: float) -> Verdict:
        verdict, replaced = self.judge(key, slot, now_s)
        if verdict is Verdict.STORED:
            held = self.put(key, slot, now_s, replaced)
            held.is_used = held.is_named = False
        return verdict

    def due_for_refresh(self, now_s: float, before_s: float) -> list[bytes]:
        """Keys that expire within `before_s` and were used since something new was cached for them.

        The soonest is first, and each is named once.
        """
        self.expire(now_s)
        soon = (entry for entry in self._by_expiration if entry[0] <= now_s + before_s)
        due: dict[bytes, None] = {}
        for entry in sorted(filter(self._is_current, soon)):
            held = self.held[entry[1]]
            if held.is_used and not held.is_named:
                held.is_named = True
                due[entry[1]] = None
        return list(due)

    def forget(self, key: bytes) -> None:
        """Drop what is cached under a key, its marker of absence too."""
        if key in self.held:
            self.drop(key)
        self.forget_absence(key)

    def mark_absent(self, key: bytes, until_s: float) -> None:
        """Remember that nothing was found, unless something is cached."""
        if key in self.held:
            return
        self.absent.pop(key, None)
        if len(self.absent) >= self._settings.max_cached:
            del self.absent[next(iter(self.absent))]
        self.absent[key] = until_s

    def is_absent(self, key: bytes, now_s: float) -> bool:
        """Whether a live marker says that nothing was found."""
        until_s = self.absent.get(key)
        if until_s is None:
            return False
        if until_s > now_s:
            return True
        del self.absent[key]
        return False

    def forget_absence(self, key: bytes) -> None:
        """End a marker: something was stored there."""
        self.absent.pop(key, None)
