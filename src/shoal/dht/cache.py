"""What a peer remembers of others' records: found values, and keys under which nothing was found.

Anything here may be forgotten at any time, and what expires soonest is first. It follows the same rules as
storage. Fetching again what is due is for those who call it; times are on the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.dht.records import Slot, Verdict, judge
from shoal.dht.settings import DHTSettings
from shoal.dht.shelf import Shelf, refusal


class Cache:
    """Whole records, bounded in keys and bytes, and markers of absence, as many as keys. `len` is of keys.

    A dictionary counts as expiring with the first of its subkeys, since it has a gap from then on; for want
    of room it goes as a whole.
    """

    __slots__ = ("_absent", "_settings", "_shelf")

    def __init__(self, settings: DHTSettings) -> None:
        self._settings = settings
        self._shelf = Shelf()
        self._absent: dict[bytes, float] = {}
        """When markers end, the one that was set last at the end."""

    def store(self, key: bytes, slots: Iterable[Slot], now_s: float) -> list[Verdict]:
        """Remember slots of one key that were found together, each by its own verdict.

        FULL: they were forgotten at once, being larger than the cache or the soonest to expire. What is
        stored ends the key's marker of absence.
        """
        self._shelf.expire(now_s)
        verdicts = [self._store(key, slot, now_s) for slot in slots]
        if Verdict.STORED not in verdicts:
            return verdicts
        self.forget_absence(key)
        self._make_room()
        if key in self._shelf.held:
            return verdicts
        return [Verdict.FULL if verdict is Verdict.STORED else verdict for verdict in verdicts]

    def get(self, key: bytes, now_s: float, *, is_use: bool = False) -> list[Slot]:
        """The live slots of a key. A use makes it due for refresh before it expires."""
        shelf = self._shelf
        shelf.expire(now_s)
        held = shelf.held.get(key)
        if held is None:
            return []
        if is_use:
            held.is_used = True
        return shelf.slots(key)

    def due_for_refresh(self, now_s: float, before_s: float) -> list[bytes]:
        """Keys that expire within `before_s` and were used since something new was cached for them.

        The soonest is first, and each is told once.
        """
        shelf = self._shelf
        shelf.expire(now_s)
        due = []
        for key in shelf.expiring(now_s + before_s):
            held = shelf.held[key]
            if held.is_used and not held.is_told:
                held.is_told = True
                due.append(key)
        return due

    def forget(self, key: bytes) -> None:
        """Drop what is cached under a key, its marker of absence too."""
        if key in self._shelf.held:
            self._shelf.drop(key)
        self.forget_absence(key)

    def expire(self, now_s: float) -> None:
        """Drop records that are over; `store` and `get` do it as well."""
        self._shelf.expire(now_s)

    def mark_absent(self, key: bytes, until_s: float) -> None:
        """Remember that nothing was found, unless something is cached."""
        if key in self._shelf.held:
            return
        self._absent.pop(key, None)
        if len(self._absent) >= self._settings.max_cached:
            del self._absent[next(iter(self._absent))]
        self._absent[key] = until_s

    def is_absent(self, key: bytes, now_s: float) -> bool:
        """Whether a live marker says that nothing was found."""
        until_s = self._absent.get(key)
        if until_s is None:
            return False
        if until_s > now_s:
            return True
        del self._absent[key]
        return False

    def forget_absence(self, key: bytes) -> None:
        """End a marker: something was stored there."""
        self._absent.pop(key, None)

    @property
    def num_slots(self) -> int:
        """Over all keys."""
        return self._shelf.num_slots

    @property
    def num_absent(self) -> int:
        """Markers, some perhaps over."""
        return len(self._absent)

    @property
    def size_bytes(self) -> int:
        """About the memory that the records take, without markers."""
        return self._shelf.size_bytes

    def __len__(self) -> int:
        return len(self._shelf.held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shelf.held

    def _store(self, key: bytes, slot: Slot, now_s: float) -> Verdict:
        refused = refusal(slot, now_s, self._settings)
        if refused is not None:
            return refused
        replaced = self._shelf.displaced(key, slot)
        verdict = judge(replaced, slot)
        if verdict is Verdict.STORED:
            held = self._shelf.put(key, slot, now_s, replaced)
            held.is_used = held.is_told = False
        return verdict

    def _make_room(self) -> None:
        shelf, settings = self._shelf, self._settings
        while len(shelf.held) > settings.max_cached or shelf.size_bytes > settings.max_cached_bytes:
            soonest = shelf.soonest()
            assert soonest is not None
            shelf.drop(soonest)
