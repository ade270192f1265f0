"""What a peer brings to others: entries to be stored, copies for caches on the way, markers of absence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, UsageError
from shoal.core.identity import Identity
from shoal.dht.records import PLAIN, Entry, Slot, Stored, encode_subkey, encode_value, key_of
from shoal.dht.storing import Storing
from shoal.dht.tracks import Track
from shoal.dht.validation import sign_many
from shoal.dht.wire import MAX_STORE_BYTES, MAX_WANTS, Contact, Item, size_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_MARKED_AT = 3  # peers that are told of an absence


def slots_of(entries: Sequence[Entry], identity: Identity) -> list[tuple[bytes, Slot]]:
    """Entries as they travel, each with its key; those that are to be owned are signed together."""
    for entry in entries:
        if not isinstance(entry, Entry):
            raise UsageError(f"{entry!r:.100} is no Entry.", next_step="Entry(name, value, dht.in_s(60)).")
    made = [(key_of(entry.name).digest, _slot_of(entry)) for entry in entries]
    owned = [index for index, entry in enumerate(entries) if entry.is_owned]
    for index, slot in zip(owned, sign_many(identity, [made[index] for index in owned]), strict=True):
        made[index] = made[index][0], slot
    return made


def _slot_of(entry: Entry) -> Slot:
    if not isinstance(entry.expires_at_s, (int, float)) or math.isnan(entry.expires_at_s):
        raise UsageError(
            f"A record cannot expire at {entry.expires_at_s!r}.", next_step="give a time: dht.in_s(60)."
        )
    subkey = PLAIN if entry.subkey is None else encode_subkey(entry.subkey)
    return Slot(subkey, encode_value(entry.value), float(entry.expires_at_s))


class Spreading:
    """Stores, caches and markers of one peer."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht

    async def spread(self, slots: Sequence[tuple[bytes, Slot]], deadline: Deadline) -> list[Stored]:
        """Have the peers nearest to each key keep its slots; what became of each, in order."""
        outcomes = await Storing(self._dht).run(slots, deadline)
        self._correct_cache(slots, outcomes)
        return outcomes

    def _correct_cache(self, slots: Sequence[tuple[bytes, Slot]], outcomes: Sequence[Stored]) -> None:
        """A peer reads what it has written: its own copy of a key follows, or is looked for again."""
        cache, wall_s = self._dht.cache, self._dht.wall_s()
        for (key, slot), stored in zip(slots, outcomes, strict=True):
            if key in cache:
                if stored:
                    cache.store(key, [slot], wall_s)
                else:
                    cache.forget(key)

    # --- what look-ups leave behind ---

    def cache_found(self, track: Track, slots: Sequence[Slot]) -> None:
        """Keep what was found here, and where the next one to look for it passes by."""
        dht = self._dht
        wall_s = dht.wall_s()
        dht.cache.store(track.key, slots, wall_s)
        for contact in track.passed_by()[: dht.settings.cache_nearest]:
            if sum(map(size_of, slots)) <= MAX_STORE_BYTES:
                items = [Item(track.key, list(slots))]
                dht.start_soon(dht.asking.call_store(contact, items, is_cache=True), "dht caching")

    def mark_absent(self, tracks: Sequence[Track]) -> None:
        """Tell the peers nearest to keys under which there is nothing, unless they know."""
        by_peer: dict[Contact, list[bytes]] = {}
        for track in tracks:
            if track.is_done and not track.has_marker:
                for _, contact in track.near[:_MARKED_AT]:
                    by_peer.setdefault(contact, []).append(track.key)
        for contact, keys in by_peer.items():
            for start in range(0, len(keys), MAX_WANTS):
                some = keys[start : start + MAX_WANTS]
                self._dht.start_soon(self._dht.asking.call_mark_absent(contact, some), "dht absence")
