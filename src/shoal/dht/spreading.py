"""Bringing records to the peers nearest to them: replicas, copies in caches, and markers of absence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, ShoalError, UsageError, fanout
from shoal.core.identity import Identity
from shoal.dht.answering import size_of
from shoal.dht.asking import MAX_STORE_BYTES
from shoal.dht.contacts import Contact, number_of
from shoal.dht.messages import Kind
from shoal.dht.names import key_of
from shoal.dht.ownership import sign_many
from shoal.dht.records import PLAIN, Entry, Item, Slot, Stored, Verdict
from shoal.dht.search import MAX_IN_FLIGHT, Track
from shoal.dht.subkeys import encode_subkey
from shoal.dht.values import encode_value

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_CONFIRMED = 3  # of the nearest peers must have answered that they know of none nearer
_KEY_BYTES = 26  # a key with what is around it
_MARKED_AT = 3  # peers that are told of an absence


def slots_of(entries: Sequence[Entry], identity: Identity) -> list[tuple[bytes, Slot]]:
    """Entries as they travel, each with its key; those that are to be owned are signed together."""
    made = [(key_of(entry.name).digest, _slot_of(entry)) for entry in entries]
    owned = [index for index, entry in enumerate(entries) if entry.is_owned]
    for index, slot in zip(owned, sign_many(identity, [made[index] for index in owned]), strict=True):
        made[index] = made[index][0], slot
    return made


def _slot_of(entry: Entry) -> Slot:
    if math.isnan(entry.expires_at_s):
        raise UsageError("A record cannot expire at NaN.", next_step="give a time: dht.in_s(60).")
    subkey = PLAIN if entry.subkey is None else encode_subkey(entry.subkey)
    return Slot(subkey, encode_value(entry.value), float(entry.expires_at_s))


class _Copies:
    """One slot on its way to its replicas."""

    __slots__ = ("candidates", "key", "num_wanted", "slot", "verdicts")

    def __init__(self, key: bytes, slot: Slot, num_wanted: int) -> None:
        self.key = key
        self.slot = slot
        self.num_wanted = num_wanted
        """Replicas that are still to be found."""
        self.candidates: list[Contact | None] = []
        """Whom to ask next, the next one last; None is this peer."""
        self.verdicts: list[Verdict] = []


class Spreading:
    """Stores for one peer."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht

    async def spread(self, slots: Sequence[tuple[bytes, Slot]], deadline: Deadline) -> list[Stored]:
        """Find the peers nearest to each key, and have as many as there should be replicas keep its slots."""
        dht = self._dht
        tracks = {key: Track(key, Kind.PEERS, _CONFIRMED) for key, _ in slots}
        await dht.search(list(tracks.values()), deadline)
        num_replicas = dht.settings.num_replicas
        copies = [_Copies(key, slot, num_replicas) for key, slot in slots]
        candidates = {key: self._candidates(track) for key, track in tracks.items()}
        for one in copies:
            one.candidates = list(candidates[one.key])
        while not deadline.is_past:
            by_peer = self._next_round(copies)
            if not by_peer:
                break
            await self._send_round(by_peer, deadline)
        return [_stored(one.verdicts) for one in copies]

    def _candidates(self, track: Track) -> list[Contact | None]:
        """The nearest peers, this one among them, nearest last."""
        near: list[tuple[int, Contact | None]] = list(track.near)
        if not self._dht.is_client:
            near.append((number_of(self._dht.peer_id.digest) ^ track.number, None))
            near.sort(key=lambda pair: pair[0])
        return [contact for _, contact in reversed(near)]

    def _next_round(self, copies: Sequence[_Copies]) -> dict[Contact, list[_Copies]]:
        """Who is to be sent what; what this peer itself is to keep is kept at once."""
        wall_s = self._dht.wall_s()
        by_peer: dict[Contact, list[_Copies]] = {}
        for one in copies:
            while one.num_wanted > 0 and one.candidates:
                contact = one.candidates.pop()
                if contact is None:
                    one.num_wanted -= 1
                    one.verdicts.append(self._dht.holdings.keep(one.key, one.slot, wall_s))
                elif not self._dht.is_set_aside(contact):
                    one.num_wanted -= 1
                    by_peer.setdefault(contact, []).append(one)
        return by_peer

    async def _send_round(self, by_peer: dict[Contact, list[_Copies]], deadline: Deadline) -> None:
        batches = [(contact, batch) for contact, all_of_it in by_peer.items() for batch in _cut(all_of_it)]
        calls = [self._dht.asking.call_store(contact, _items(batch)) for contact, batch in batches]
        outcomes = await fanout(calls, deadline, limit=MAX_IN_FLIGHT)
        for (_, batch), outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, ShoalError):
                for one in batch:
                    one.num_wanted += 1  # the next nearest takes its place
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                for one, verdict in zip(_in_order(batch), outcome, strict=True):
                    one.verdicts.append(verdict)

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
            if track.is_done and not track.num_absent:
                for _, contact in track.near[:_MARKED_AT]:
                    by_peer.setdefault(contact, []).append(track.key)
        for contact, keys in by_peer.items():
            self._dht.start_soon(self._dht.asking.call_mark_absent(contact, keys), "dht absence")


def _stored(verdicts: Sequence[Verdict]) -> Stored:
    num_stored = sum(verdict is Verdict.STORED for verdict in verdicts)
    if num_stored:
        return Stored(num_stored, Verdict.STORED)
    return Stored(0, verdicts[0] if verdicts else Verdict.NOT_ASKED)


def _cut(copies: Sequence[_Copies]) -> list[list[_Copies]]:
    """Batches that fit into a datagram each; what does not fit is alone."""
    batches: list[list[_Copies]] = []
    left_bytes = 0
    for one in copies:
        size_bytes = _KEY_BYTES + size_of(one.slot)
        if not batches or size_bytes > left_bytes:
            batches.append([])
            left_bytes = MAX_STORE_BYTES
        batches[-1].append(one)
        left_bytes -= size_bytes
    return batches


def _items(batch: Sequence[_Copies]) -> list[Item]:
    by_key: dict[bytes, list[Slot]] = {}
    for one in batch:
        by_key.setdefault(one.key, []).append(one.slot)
    return [Item(key, slots) for key, slots in by_key.items()]


def _in_order(batch: Sequence[_Copies]) -> list[_Copies]:
    """In the order in which `_items` lists them."""
    by_key: dict[bytes, list[_Copies]] = {}
    for one in batch:
        by_key.setdefault(one.key, []).append(one)
    return [one for same in by_key.values() for one in same]
