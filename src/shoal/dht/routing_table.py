"""The routing table: which peers this one knows, many near its own id and few far away (Kademlia, section 2).

Only peers that were seen at their address have a place and are told to others; what is merely said of a peer
may seed this peer's own look-ups. Who does not answer loses its place and is backed off from, longer after
every failure, then tried again or forgotten. The table neither sends nor waits: it says whom to ping, and is
told what came of it. Times are the loop's, monotonic.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from random import Random

from shoal.core import Address, PeerId
from shoal.core.ids import is_loopback
from shoal.core.rates import FailureBackoff
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import ID_BITS, Contact, number_of

QUIET_S = 60.0
"""A contact that was heard within this keeps its place without being pinged."""
CHECK_S = 10.0
"""One contact of a bucket is named to be pinged at most this often: time for the answer to come."""
MAX_HEARSAY = 64
"""Contacts of a bucket that were only heard of."""
MAX_FAILED = 4096
"""Contacts that failed; those that did so longest ago are forgotten beyond this."""
MAX_RETRIES = 8
"""Contacts that failed and are named to be pinged again at once."""


class RoutingTable:
    """The contacts of one peer. One id and one address have one place; the own id has none."""

    def __init__(self, own: PeerId, settings: DHTSettings, random: Random) -> None:
        self._own = number_of(own.digest)
        self._size = settings.bucket_size
        self._max_of_a_host = max(1, settings.bucket_size // 2)
        self._random = random
        self.buckets = KBuckets(self._own, settings.depth_modulo)
        self._places = SortedContacts()
        self._seen_s = array("d")  # beside the places; -inf after promotion: it may be gone since
        self._at_address: dict[Address, Contact] = {}
        self._hearsay = SortedContacts()
        # Keyed by id and address both: who fails at a wrong address is not backed off from at the right one.
        self._failed: dict[bytes, tuple[Contact, bool]] = {}
        """Who failed, and whether it was ever seen; the latest failure last."""
        self._max_backoff_s = settings.max_backoff_s
        self._backoff = FailureBackoff(min(settings.backoff_s, self._max_backoff_s), self._max_backoff_s)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, contact: Contact) -> bool:
        return self._index(contact) >= 0

    # --- what calls teach it ---

    def on_seen(self, contact: Contact, now_s: float) -> Contact | None:
        """It has asked or answered, from an address that it receives at.

        Where there is no place for it, it becomes a replacement; the contact that was not heard for longest
        of those in its way, if that is long, is returned: to be pinged, and told of by `on_failed` if it is
        silent.
        """
        number = contact.number
        if number == self._own:
            return None
        self._forget_failure(contact.packed)
        index = self._places.index(number)
        if index >= 0 and self._places.contacts[index] == contact:
            self._seen_s[index] = now_s
            return None
        emptied = []
        if index >= 0:  # it has moved
            emptied.append(self._remove(index))
        before = self._at_address.get(contact.peer.address)
        if before is not None:  # who was there is somebody else now
            emptied.append(self._remove(self._places.index(before.number)))
        to_ping = self._admit(contact, now_s)
        for bucket in emptied:
            self._promote(bucket)
        return to_ping

    def on_failed(self, contact: Contact, now_s: float) -> None:
        """It has not answered: it loses its place to a replacement, and is backed off from."""
        if contact.number == self._own:
            return
        bucket = self.buckets.of(contact.number)
        is_replacement = bucket.replacements.get(contact.number) == contact
        index = self._index(contact)
        self._back_off(contact, now_s, was_seen=index >= 0 or is_replacement)
        heard = self._hearsay.index(contact.number)
        if heard >= 0 and self._hearsay.contacts[heard] == contact:
            self._hearsay.remove_at(heard)
        if is_replacement:
            del bucket.replacements[contact.number]
        if index >= 0:
            self._promote(self._remove(index))

    def on_heard_of(self, contact: Contact) -> None:
        """Somebody says that it is there: a few of those are kept, any of them for a newer one."""
        number = contact.number
        if number == self._own or contact.peer.address in self._at_address:
            return
        if self._places.index(number) >= 0 or self._hearsay.index(number) >= 0:
            return
        bucket = self.buckets.of(number)
        start, end = self._hearsay.span(bucket.low, bucket.high)
        if end - start >= MAX_HEARSAY:
            self._hearsay.remove_at(self._random.randrange(start, end))
        self._hearsay.insert(contact)

    def on_looked_up(self, number: int, now_s: float) -> None:
        """Somebody near this id was looked for: its bucket is fresh."""
        self.buckets.of(number).looked_up_s = now_s

    # --- what it knows ---

    def nearest(self, number: int, limit: int, *, now_s: float, has_hearsay: bool = False) -> list[Contact]:
        """The contacts with the least XOR to `number`, nearest first; with hearsay only for own look-ups."""
        found = self._places.nearest(number, limit)
        if has_hearsay and self._hearsay.numbers:
            heard = self._hearsay.nearest(number, limit)
            found += [contact for contact in heard if not self.is_backed_off(contact, now_s)]
            found.sort(key=lambda contact: contact.number ^ number)
            del found[limit:]
        return found

    def contacts(self) -> list[Contact]:
        """All that have a place, in the order of their ids."""
        return list(self._places.contacts)

    def stale_ranges(self, now_s: float, older_than_s: float) -> list[int]:
        """Any one id of each bucket in which nobody was looked for in so long."""
        return [
            bucket.low | self._random.getrandbits(ID_BITS - bucket.depth)
            for bucket in self.buckets
            if now_s - bucket.looked_up_s >= older_than_s
        ]

    # --- those that failed ---

    def is_backed_off(self, contact: Contact, now_s: float) -> bool:
        """Whether it has failed so lately that it should not be asked."""
        return self._backoff.is_paused(contact.packed, now_s)

    def failed_near(self, number: int, limit: int) -> list[Contact]:
        """Those nearest to a key that have failed of late."""
        contacts = [contact for contact, _ in self._failed.values()]
        return heapq.nsmallest(limit, contacts, key=lambda contact: contact.number ^ number)

    def due_for_retry(self, now_s: float) -> list[Contact]:
        """A few that failed and are to be pinged now; each counts as failed once more until it answers.

        One that has been silent through the longest wait is forgotten instead, so that peers which left for
        good are not pinged for ever, and so is one that was never seen: a liar could have anybody pinged.
        """
        due: list[Contact] = []
        for packed, (contact, was_seen) in tuple(self._failed.items()):
            if self._backoff.is_paused(packed, now_s):
                continue
            if not was_seen or self._backoff.pause_s(packed) >= self._max_backoff_s:
                self._forget_failure(packed)
            elif len(due) < MAX_RETRIES:
                self._backoff.failed(packed, now_s)
                due.append(contact)
        return due

    def _back_off(self, contact: Contact, now_s: float, *, was_seen: bool) -> None:
        known = self._failed.pop(contact.packed, None)
        if len(self._failed) >= MAX_FAILED:
            self._forget_failure(next(iter(self._failed)))
        self._failed[contact.packed] = contact, was_seen or (known is not None and known[1])
        self._backoff.failed(contact.packed, now_s)

    def _forget_failure(self, packed: bytes) -> None:
        if self._failed.pop(packed, None) is not None:
            self._backoff.answered(packed)

    # --- places ---

    def _index(self, contact: Contact) -> int:
        index = self._places.index(contact.number)
        return index if index >= 0 and self._places.contacts[index] == contact else -1

    def _admit(self, contact: Contact, now_s: float) -> Contact | None:
        bucket = self.buckets.of(contact.number)
        while rivals := self._rivals(bucket, contact):
            if not self.buckets.may_split(bucket):
                self._add_replacement(bucket, contact)
                return self._to_ping(bucket, rivals, now_s)
            self.buckets.split(bucket)
            bucket = self.buckets.of(contact.number)
        self._insert(bucket, contact, now_s)
        return None

    def _rivals(self, bucket: KBucket, contact: Contact) -> Sequence[int]:
        """Where those stand, of whose places it would have to have one: none while there is room for it."""
        start, end = self._places.span(bucket.low, bucket.high)
        if end - start >= self._size:
            return range(start, end)
        return [start + offset for offset in self._same_host(contact, self._places.contacts[start:end])]

    def _same_host(self, contact: Contact, others: list[Contact]) -> list[int]:
        """Where those of its host stand among the others, if there may be no more of them.

        One host may have half of a bucket's places, unless it is this machine.
        """
        if len(others) < self._max_of_a_host:
            return []
        host = contact.peer.address.host
        same = [index for index, other in enumerate(others) if other.peer.address.host == host]
        return same if len(same) >= self._max_of_a_host and not is_loopback(host) else []

    def _add_replacement(self, bucket: KBucket, contact: Contact) -> None:
        """Make it the newest replacement; another of its host, or the oldest, goes for want of room."""
        waiting = bucket.replacements
        if waiting.pop(contact.number, None) != contact:
            others = list(waiting.values())
            same = self._same_host(contact, others)
            if same or len(others) >= self._size:
                del waiting[others[same[0] if same else 0].number]
        waiting[contact.number] = contact

    def _to_ping(self, bucket: KBucket, rivals: Sequence[int], now_s: float) -> Contact | None:
        if now_s - bucket.checked_s < CHECK_S:
            return None
        quietest = min(rivals, key=self._seen_s.__getitem__)
        if now_s - self._seen_s[quietest] < QUIET_S:
            return None
        bucket.checked_s = now_s
        return self._places.contacts[quietest]

    def _insert(self, bucket: KBucket, contact: Contact, seen_s: float) -> None:
        bucket.replacements.pop(contact.number, None)
        if (heard := self._hearsay.index(contact.number)) >= 0:
            self._hearsay.remove_at(heard)
        index = self._places.insert(contact)
        self._seen_s.insert(index, seen_s)
        self._at_address[contact.peer.address] = contact

    def _remove(self, index: int) -> KBucket:
        """Take a contact out of its place; tells the bucket that has one to give now."""
        contact = self._places.remove_at(index)
        del self._seen_s[index]
        del self._at_address[contact.peer.address]
        return self.buckets.of(contact.number)

    def _promote(self, bucket: KBucket) -> None:
        """Give a place of the bucket, where there is one, to the newest replacement that may have it."""
        for contact in reversed(tuple(bucket.replacements.values())):
            if contact.peer.address in self._at_address:
                del bucket.replacements[contact.number]  # somebody else was seen there since
            elif not self._rivals(bucket, contact):
                self._insert(bucket, contact, -math.inf)
                return


class KBucket:
    """All ids that begin with the same `depth` bits: from `low` up to, but not including, `high`.

    Who is in it is the table's to know; here are the replacements, which wait for a place in it.
    """

    __slots__ = ("checked_s", "depth", "looked_up_s", "low", "replacements")

    def __init__(self, low: int, depth: int, looked_up_s: float = -math.inf) -> None:
        self.low = low
        self.depth = depth
        self.looked_up_s = looked_up_s
        """When somebody was last looked for in it."""
        self.checked_s = -math.inf
        """When one of its contacts was last named to be pinged."""
        self.replacements: dict[int, Contact] = {}
        """Peers that were seen when there was no place for them, by their ids, newest last."""

    @property
    def high(self) -> int:
        """Where the next bucket begins."""
        return self.low + (1 << (ID_BITS - self.depth))


class KBuckets:
    """Divides the space of ids into buckets; at first there is one, and splitting makes more."""

    __slots__ = ("_buckets", "_depth_modulo", "_lows", "_own")

    def __init__(self, own: int, depth_modulo: int) -> None:
        self._own = own
        self._depth_modulo = depth_modulo
        self._lows = [0]
        self._buckets = [KBucket(0, 0)]

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[KBucket]:
        return iter(self._buckets)

    def of(self, number: int) -> KBucket:
        """The bucket that an id belongs to."""
        return self._buckets[bisect_right(self._lows, number) - 1]

    def may_split(self, bucket: KBucket) -> bool:
        """Around the own id without end; elsewhere down to the next multiple of the modulo."""
        if bucket.depth % self._depth_modulo:
            return True
        return bucket.low <= self._own < bucket.high and bucket.depth < ID_BITS

    def split(self, bucket: KBucket) -> None:
        """Make two of it; the id in the middle is the first of the upper one."""
        index = bisect_right(self._lows, bucket.low)
        bucket.depth += 1
        upper = KBucket(bucket.high, bucket.depth, bucket.looked_up_s)
        for number in tuple(bucket.replacements):
            if number >= upper.low:
                upper.replacements[number] = bucket.replacements.pop(number)
        self._lows.insert(index, upper.low)
        self._buckets.insert(index, upper)


class SortedContacts:
    """Contacts in the order of their ids, at most one for each, in which those nearest to any id are found.

    A sorted list instead of a tree: contacts whose ids begin alike stand side by side, so that every range of
    the id space is a slice, and a few bisections find the nearest.
    """

    __slots__ = ("contacts", "numbers")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.contacts: list[Contact] = []
        """Beside their numbers."""

    def __len__(self) -> int:
        return len(self.numbers)

    def index(self, number: int) -> int:
        """Where the contact with this id stands; -1 when there is none."""
        index = bisect_left(self.numbers, number)
        return index if index < len(self.numbers) and self.numbers[index] == number else -1

    def span(self, low: int, high: int) -> tuple[int, int]:
        """The slice of the ids from `low` up to, but not including, `high`."""
        start = bisect_left(self.numbers, low)
        return start, bisect_left(self.numbers, high, start)

    def insert(self, contact: Contact) -> int:
        """Add one whose id is not here; tells where it stands now."""
        index = bisect_left(self.numbers, contact.number)
        self.numbers.insert(index, contact.number)
        self.contacts.insert(index, contact)
        return index

    def remove_at(self, index: int) -> Contact:
        """Take the contact at this index out, and return it."""
        del self.numbers[index]
        return self.contacts.pop(index)

    def nearest(self, number: int, limit: int) -> list[Contact]:
        """Those with the least XOR to `number`, nearest first.

        Everything in a slice agrees in the bits above the first one in which its two ends differ, so all that
        have this bit as `number` has it are nearer than all that have not.
        """
        numbers, contacts = self.numbers, self.contacts
        found: list[Contact] = []
        slices = [(0, len(numbers))]
        while slices and len(found) < limit:
            start, end = slices.pop()
            if end - start <= 2 * limit:
                distances = [number ^ other for other in numbers[start:end]]
                found += [contact for _, contact in sorted(zip(distances, contacts[start:end], strict=True))]
                continue
            last = numbers[end - 1]
            bit = (numbers[start] ^ last).bit_length() - 1
            middle = bisect_left(numbers, last >> bit << bit, start, end)
            if number >> bit & 1:
                slices += ((start, middle), (middle, end))
            else:
                slices += ((middle, end), (start, middle))
        return found[:limit]
