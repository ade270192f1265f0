"""Records that stay where they belong, at the peers nearest to their keys, while peers come and go.

Every record should be held by the `num_replicas` peers nearest to its key. When others have come to be these,
one of the holders sends it to all of them: the nearest, or after a while the next, who would have been sent
it by then. Nobody relies on what another should have. The same is done now and then anyway, for what was
missed (Kademlia, section 2.5: republishing). A `Keeper` stores a program's own records again before they
expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

from shoal.core import Deadline, DeadlineExceeded, PeerBusy, ShoalError, UsageError, fanout
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import Entry, Slot, Stored, Verdict
from shoal.dht.search import Lookup, look_up
from shoal.dht.store import unsigned_slots
from shoal.dht.wire import MAX_STORE_BYTES, Contact, Item, LookupKind, in_groups, number_of, size_of

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, object]
_NEIGHBOURS = 4  # times the replicas: neighbours among which those of any record held here are found
_GRACE_S = 15.0  # a neighbour that failed may come back: it counts as gone after this
_TURN_S = 10.0  # after which the next nearest holder does what the one before it did not
_APART_S = 20.0  # between two times that a record is sent because of a change
_REPUBLISH_TURN = 0.25  # of `republish_s`, likewise
_KEYS_A_TURN = 500  # of the loop
_KEYS_WATCHED = 200  # at once: their holders are about those of all others here


class _Transfer(NamedTuple):
    """A record that is to be sent to where it belongs now."""

    due_s: float
    """On the loop's clock."""
    since_s: float
    """On the wall clock: who was sent it later need not send it."""


def new_holders(number: int, before: Sequence[int], now: Sequence[int], num_replicas: int) -> list[int]:
    """The ids that a key's records belong to, if some of them are new to it; nothing otherwise.

    Those to which they belonged before come first, the nearest of them before all others.
    """
    held_by = sorted(before, key=number.__xor__)[:num_replicas]
    belongs_to = sorted(now, key=number.__xor__)[:num_replicas]
    newcomers = [peer for peer in belongs_to if peer not in held_by]
    return [peer for peer in belongs_to if peer in held_by] + newcomers if newcomers else []


class Replicator:
    """Keeps the records that one peer holds at all peers where they belong."""

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._storage = protocol.records.storage
        self._neighbours: dict[int, float] = {}
        """Neighbours' ids, and when they were last among the nearest."""
        self._settled: list[int] | None = None
        """The neighbours at the last look; None while there are no records."""
        self._met_at_s: dict[int, float] = {}
        """Wall times at which peers were met since the last look."""
        self._transfers: dict[bytes, _Transfer] = {}
        self._num_watched = 0

    # --- as neighbours come and go ---

    def on_met(self, contact: Contact) -> None:
        """Somebody is there who was not known before."""
        self._met_at_s.setdefault(contact.number, self._protocol.wall_s())

    def follow_neighbours(self) -> Work | None:
        """What there is to do because neighbours have changed."""
        protocol, own, settings = self._protocol, self._protocol.number, self._protocol.settings
        if len(self._storage) == 0:
            self._neighbours.clear()
            self._transfers.clear()
            self._settled = None
            return None
        now_s, wall_s = protocol.now_s(), protocol.wall_s()
        limit = max(settings.bucket_size, _NEIGHBOURS * settings.num_replicas)
        since_s = wall_s
        for contact in protocol.table.nearest(own, limit, now_s=now_s):
            if contact.number not in self._neighbours:
                since_s = min(since_s, self._met_at_s.get(contact.number, wall_s))
            self._neighbours[contact.number] = now_s
        self._met_at_s.clear()
        for number, seen_s in tuple(self._neighbours.items()):
            if seen_s + _GRACE_S <= now_s:
                del self._neighbours[number]
                since_s = min(since_s, wall_s + seen_s - now_s)
        before, self._settled = self._settled, sorted([own, *self._neighbours])
        if before is None or before == self._settled:
            is_due = any(transfer.due_s <= now_s for transfer in self._transfers.values())
            return self._send_due() if is_due else None
        return self._plan(before, self._settled, since_s)

    async def _plan(self, before: Sequence[int], now: Sequence[int], since_s: float) -> None:
        """See which records belong to others than before, and send those that are due."""
        own, num_replicas = self._protocol.number, self._protocol.settings.num_replicas
        now_s = self._protocol.now_s()
        async for key in _in_turns(self._storage.keys()):
            holders = new_holders(number_of(key), before, now, num_replicas)
            if own in holders:
                self._transfers[key] = _Transfer(now_s + _TURN_S * holders.index(own), since_s)
        await self._send_due()

    async def _send_due(self) -> None:
        """Send what is due and was not sent here by another meanwhile."""
        now_s, wall_s = self._protocol.now_s(), self._protocol.wall_s()
        due = []
        for key, transfer in tuple(self._transfers.items()):
            if transfer.due_s <= now_s:
                sent_at_s = self._storage.stored_at_s(key)
                if sent_at_s <= transfer.since_s and sent_at_s + _APART_S > wall_s:
                    self._transfers[key] = transfer._replace(due_s=now_s + sent_at_s + _APART_S - wall_s)
                    continue
                del self._transfers[key]
                if sent_at_s <= transfer.since_s:
                    due.append(key)
        await self._send(due)

    def other_holders(self) -> list[Contact]:
        """The peers that some of the records here belong to as well, of other records each time."""
        keys = self._storage.keys()
        start = self._num_watched % len(keys) if keys else 0
        self._num_watched = start + _KEYS_WATCHED
        watched = (keys + keys)[start : start + min(_KEYS_WATCHED, len(keys))]
        return list(dict.fromkeys(contact for key in watched for contact in self._nearest(key)))

    # --- now and then ---

    def republish(self) -> Work | None:
        """Send records again that nobody has sent here for long."""
        oldest_s = self._protocol.wall_s() - self._protocol.settings.republish_s
        keys = self._storage.keys()
        due = [key for key in keys if self._storage.stored_at_s(key) <= oldest_s]
        return self._republish(due) if due else None

    async def _republish(self, keys: Sequence[bytes]) -> None:
        protocol = self._protocol
        lookup = Lookup(protocol.peer_id.digest, LookupKind.PEERS, protocol.settings.bucket_size)
        await look_up(protocol, [lookup], protocol.look_up_deadline())
        wall_s, republish_s = protocol.wall_s(), protocol.settings.republish_s
        due = []
        async for key in _in_turns(keys):
            number = number_of(key)
            rank = sum(contact.number ^ number < protocol.number ^ number for contact in self._nearest(key))
            if wall_s - self._storage.stored_at_s(key) >= republish_s * (1 + _REPUBLISH_TURN * rank):
                due.append(key)
        await self._send(due)

    # --- sending ---

    async def _send(self, keys: Sequence[bytes]) -> None:
        """Have the peers that these records belong to keep them."""
        by_peer: dict[Contact, Records] = {}
        async for key in _in_turns(keys):
            wall_s = self._protocol.wall_s()
            if slots := self._storage.get(key, wall_s):
                self._storage.store(key, slots[0], wall_s)  # as if another had sent it
                for contact in self._nearest(key):
                    by_peer.setdefault(contact, []).append((key, slots))
        await send_records(self._protocol, by_peer)

    def _nearest(self, key: bytes) -> list[Contact]:
        """The other peers that a record belongs to, as far as this one knows."""
        protocol, number = self._protocol, number_of(key)
        num_replicas = protocol.settings.num_replicas
        nearest = protocol.table.nearest(number, num_replicas, now_s=protocol.now_s())
        if len(nearest) == num_replicas and nearest[-1].number ^ number > protocol.number ^ number:
            nearest.pop()
        return nearest


async def _in_turns(keys: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Keys, with a pause now and then in which the loop does other things."""
    for turn, key in enumerate(keys, 1):
        yield key
        if turn % _KEYS_A_TURN == 0:
            await asyncio.sleep(0)


# --- many records to many peers ---

Records = list[tuple[bytes, list[Slot]]]
"""Keys, and the slots under each."""
_BULK_FROM_BYTES = 256 << 10  # from here on a stream is worth opening
_BULK_BYTES = 48 << 10
_KEY_BYTES = 26  # on the wire
_PEERS_AT_ONCE = 4
_BUSY_S = 1.0
_MAX_WAITS = 10


async def send_records(protocol: DHTProtocol, by_peer: Mapping[Contact, Records]) -> None:
    """Have each peer keep its records; those that do not answer, or stay busy, are left out."""
    work = [_send_to(protocol, contact, records) for contact, records in by_peer.items()]
    await fanout(work, Deadline.never(), limit=_PEERS_AT_ONCE)  # every call has its own deadline


async def _send_to(protocol: DHTProtocol, contact: Contact, records: Records) -> None:
    waits = iter(range(_MAX_WAITS))
    for items in requests_of(records):
        while True:
            try:
                await protocol.call_store(contact, items)
                break
            except PeerBusy:
                if next(waits, None) is None:
                    return
                await asyncio.sleep(_BUSY_S)
            except ShoalError:
                return  # the table has been told


def requests_of(records: Records) -> Iterator[list[Item]]:
    """Records cut into requests: small ones that fit into datagrams, or fewer large ones when it is much."""
    sized = [
        (key, slot, size_of(slot) + (0 if at else _KEY_BYTES))
        for key, slots in records
        for at, slot in enumerate(slots)
    ]
    is_much = sum(size_bytes for _, _, size_bytes in sized) >= _BULK_FROM_BYTES
    max_bytes = _BULK_BYTES if is_much else MAX_STORE_BYTES
    # a key whose slots go on in the next request is there once more
    for group in in_groups(sized, lambda one: one[2], max_bytes - _KEY_BYTES):
        by_key = itertools.groupby(group, key=lambda one: one[0])
        yield [Item(key, [slot for _, slot, _ in some]) for key, some in by_key]


# --- a program's own records ---

MakeEntries = Callable[[float], Sequence[Entry]]
"""From the expiration that they should have to the entries themselves, called for every storing."""
MAX_BATCH = 4096
"""Entries that are stored at once."""
_FIRST_RETRY_S = 2.0
_SLACK = 0.05  # of a lifetime: what is due so soon goes along with what is due now
_PASSING = (Verdict.NOT_ASKED, Verdict.FULL)
"""Refusals that may end by themselves."""


class Kept:
    """Entries that are kept alive until `stop`; afterwards they expire."""

    def __init__(self, make: MakeEntries, lifetime_s: float) -> None:
        self.make = make
        self.lifetime_s = lifetime_s
        self.due_s = -math.inf
        """On the loop's clock: when to store them next."""
        self.num_failures = 0
        """Times in a row that somebody should have taken them and nobody did."""
        self.is_stopped = False
        self.last_stored: list[Stored] = []
        """What became of them last time, in the order of the entries; nothing before the first time."""
        self._was_stored = asyncio.Event()

    def stop(self) -> None:
        """Store them no more, and let them expire."""
        self.is_stopped = True
        self._was_stored.set()

    async def stored(self, deadline: Deadline | None = None) -> list[Stored]:
        """Wait until they were tried to be stored once; what became of that."""
        try:
            async with asyncio.timeout((deadline or Deadline.never()).timeout_s):
                await self._was_stored.wait()
        except TimeoutError:
            raise DeadlineExceeded("Records to be kept were not stored before the deadline.") from None
        return self.last_stored

    def on_stored(self, stored: list[Stored]) -> None:
        """Take note of what became of them."""
        self.last_stored = stored
        self._was_stored.set()


class Keeper:
    """Keeps a program's records alive: stored again, half of their lifetime before they would expire."""

    def __init__(
        self, protocol: DHTProtocol, store_many: Callable[[Sequence[Entry]], Awaitable[list[Stored]]]
    ) -> None:
        self._protocol = protocol
        self._store_many = store_many
        self._kept: list[Kept] = []
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, make: MakeEntries, lifetime_s: float) -> Kept:
        """Store what `make` gives, now and again whenever half of `lifetime_s` has passed.

        Call it on the DHT's loop. A storing that fails is tried again soon.
        """
        max_lifetime_s = self._protocol.settings.max_lifetime_s
        if not 0 < lifetime_s <= max_lifetime_s:
            raise UsageError(
                f"Records cannot be kept with a lifetime of {lifetime_s} s.",
                cause=f"peers take records that live for up to {max_lifetime_s:g} s.",
                next_step="give a shorter one: it only says how long they outlive this peer.",
            )
        kept = Kept(make, lifetime_s)
        self._kept.append(kept)
        self._wake.set()
        return kept

    def store_all_again(self) -> None:
        """For a peer that was away: all are due now."""
        for kept in self._kept:
            kept.due_s = -math.inf
        self._wake.set()

    async def run(self) -> None:
        """Store what is due, until cancelled."""
        loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()  # of this loop: a DHT may be opened again on another
        while True:
            self._wake.clear()
            self._kept = [kept for kept in self._kept if not kept.is_stopped]
            now_s = loop.time()
            if any(kept.due_s <= now_s for kept in self._kept):
                await self._store(
                    [kept for kept in self._kept if kept.due_s <= now_s + _SLACK * kept.lifetime_s]
                )
                continue
            next_s = min((kept.due_s for kept in self._kept), default=math.inf)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if next_s == math.inf else next_s):
                    await self._wake.wait()

    async def _store(self, due: Sequence[Kept]) -> None:
        """Store all together, or where that fails each by itself: the others should live."""
        made = [(kept, entries) for kept in due if (entries := self._made(kept)) is not None]
        together = [entry for _, entries in made for entry in entries]
        stored: list[Stored] = []
        try:
            for start in range(0, len(together), MAX_BATCH):
                stored += await self._store_many(together[start : start + MAX_BATCH])
        except Exception:
            if len(made) > 1:
                for kept, _ in made:
                    await self._store([kept])
                return
            log.exception("%d records that are to be kept could not be stored.", len(together))
            stored += [Stored(0, Verdict.NOT_ASKED)] * (len(together) - len(stored))
        outcomes = iter(stored)
        for kept, entries in made:
            self._judge(kept, entries, list(itertools.islice(outcomes, len(entries))))

    def _made(self, kept: Kept) -> Sequence[Entry] | None:
        """What the program's own code makes; None for what cannot be stored."""
        kept.due_s = asyncio.get_running_loop().time() + kept.lifetime_s / 2
        entries: Sequence[Entry] = ()
        try:
            entries = kept.make(self._protocol.wall_s() + kept.lifetime_s)
        except Exception:
            log.exception("Records that are to be kept could not be made.")
        try:
            unsigned_slots(entries)
        except Exception:
            if kept.num_failures == 0:
                log.exception("Records that are to be kept cannot be stored.")
            self._judge(kept, entries, [Stored(0, Verdict.BAD_VALUE)] * len(entries))
            return None
        return entries

    def _judge(self, kept: Kept, entries: Sequence[Entry], outcomes: list[Stored]) -> None:
        """Try again soon what nobody took; say so once."""
        refused = [
            (entry, stored.verdict)
            for entry, stored in zip(entries, outcomes, strict=True)
            if not stored and stored.verdict is not Verdict.NOT_NEWER
        ]
        kept.on_stored(outcomes)
        if not refused:
            if kept.num_failures:
                log.info("Records that are to be kept are stored again: %s", _names(entries))
            kept.num_failures = 0
            return
        if kept.num_failures == 0:
            what = f"{len(refused)} of {len(entries)} records that are to be kept were not stored"
            log.warning("%s (%s): %s", what, refused[0][1].name, _names([entry for entry, _ in refused]))
        kept.num_failures += 1
        if any(verdict in _PASSING for _, verdict in refused):
            retry_s = min(_FIRST_RETRY_S * 2.0 ** min(kept.num_failures - 1, 16), kept.lifetime_s / 8)
            kept.due_s = min(kept.due_s, asyncio.get_running_loop().time() + retry_s)


def _names(entries: Sequence[Entry]) -> str:
    names = list(dict.fromkeys(repr(entry.name) for entry in entries))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
