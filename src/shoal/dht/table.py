"""The routing table: which peers this one knows, many near its own id and few far away (Kademlia, section 2).

Only peers that were seen at their address have a place and are told to others; what is merely said of a peer
may seed this peer's own look-ups. The table neither sends nor waits: it says whom to ping, and is told what
came of it. Times are the loop's, monotonic.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from shoal.core import Address, PeerId
from shoal.dht.buckets import Bucket, Buckets
from shoal.dht.set_aside import SetAside
from shoal.dht.settings import DHTSettings
from shoal.dht.sorted_contacts import SortedContacts
from shoal.dht.wire import Contact, number_of
from shoal.transport.trust.membership import is_loopback

QUIET_S = 60.0
"""A contact that was heard within this keeps its place without being pinged."""
CHECK_S = 10.0
"""One contact of a bucket is named to be pinged at most this often: time for the answer to come."""
MAX_HEARSAY = 64
"""Contacts of a bucket that were only heard of."""
_SMOOTHING = 1 / 8  # of round trips, as TCP does it (RFC 6298)


class BucketView(NamedTuple):
    """One bucket, for people to look at: ids from `low` up to, but not including, `high`."""

    depth: int
    low: int
    high: int
    num_contacts: int
    num_replacements: int
    last_seen_s: float | None
    """When any of its contacts was last heard; None for none of them yet."""


class RoutingTable:
    """The contacts of one peer. One id and one address have one place; the own id has none."""

    __slots__ = (
        "_at_address",
        "_buckets",
        "_hearsay",
        "_max_of_a_host",
        "_own",
        "_places",
        "_random",
        "_round_trips_s",
        "_seen_s",
        "_set_aside",
        "_size",
    )

    def __init__(self, own: PeerId, settings: DHTSettings, random: Random) -> None:
        self._own = number_of(own.digest)
        self._size = settings.bucket_size
        self._max_of_a_host = max(1, settings.bucket_size // 2)
        self._random = random
        self._buckets = Buckets(self._own, settings.depth_modulo)
        self._places = SortedContacts()
        # beside the places, in arrays since there may be thousands of tables in a process
        self._seen_s = array("d")  # -inf after waiting: nobody knows whether it is still there
        self._round_trips_s = array("d")  # nan before the first
        self._at_address: dict[Address, Contact] = {}
        self._hearsay = SortedContacts()
        self._set_aside = SetAside(settings)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, contact: Contact) -> bool:
        return self._index(contact) >= 0

    def on_seen(self, contact: Contact, now_s: float, round_trip_s: float | None = None) -> Contact | None:
        """It has asked or answered, from an address that it receives at.

        Where there is no place for it, it waits for one; the contact that was not heard for longest of those
        in its way, if that is long, is returned: to be pinged, and told of by `on_failed` if it is silent.
        """
        number = contact.number
        if number == self._own:
            return None
        self._set_aside.clear(contact)
        index = self._places.index(number)
        if index >= 0 and self._places.contacts[index] == contact:
            self._seen_s[index] = now_s
            if round_trip_s is not None:
                known_s = self._round_trips_s[index]
                is_first = math.isnan(known_s)
                self._round_trips_s[index] = (
                    round_trip_s if is_first else known_s + _SMOOTHING * (round_trip_s - known_s)
                )
            return None
        emptied = []
        if index >= 0:  # it has moved
            emptied.append(self._remove(index))
        before = self._at_address.get(contact.peer.address)
        if before is not None:  # who was there is somebody else now
            emptied.append(self._remove(self._places.index(before.number)))
        to_ping = self._admit(contact, now_s, round_trip_s)
        for bucket in emptied:
            self._promote(bucket)
        return to_ping

    def on_failed(self, contact: Contact, now_s: float) -> None:
        """It has not answered: out of the table, set aside, and a replacement takes its place."""
        if contact.number == self._own:
            return
        bucket = self._buckets.of(contact.number)
        was_seen = self._index(contact) >= 0 or bucket.waiting_as(contact.number) == contact
        self._set_aside.add(contact, now_s, was_seen=was_seen)
        index = self._hearsay.index(contact.number)
        if index >= 0 and self._hearsay.contacts[index] == contact:
            self._hearsay.remove_at(index)
        if bucket.waiting_as(contact.number) == contact:
            bucket.leave(contact.number)
        index = self._index(contact)
        if index >= 0:
            self._promote(self._remove(index))

    def on_heard_of(self, contact: Contact) -> None:
        """Somebody says that it is there: a few of those are kept, any of them for a newer one."""
        number = contact.number
        if number == self._own or contact.peer.address in self._at_address:
            return
        if self._places.index(number) >= 0 or self._hearsay.index(number) >= 0:
            return
        bucket = self._buckets.of(number)
        start, end = self._hearsay.span(bucket.low, bucket.high)
        if end - start >= MAX_HEARSAY:
            self._hearsay.remove_at(self._random.randrange(start, end))
        self._hearsay.insert(contact)

    def on_looked_up(self, number: int, now_s: float) -> None:
        """Somebody near this id was looked for: its bucket is fresh."""
        self._buckets.of(number).looked_up_s = now_s

    def is_set_aside(self, contact: Contact, now_s: float) -> bool:
        """Whether it has failed so lately that it should not be asked."""
        return self._set_aside.has(contact, now_s)

    def set_aside_near(self, number: int, limit: int) -> list[Contact]:
        """Those nearest to a key that have failed of late."""
        return self._set_aside.nearest(number, limit)

    def come_back(self, now_s: float) -> list[Contact]:
        """A few that were set aside and should be pinged again now."""
        return self._set_aside.come_back(now_s)

    def nearest(self, number: int, limit: int, *, now_s: float, has_hearsay: bool = False) -> list[Contact]:
        """The contacts with the least XOR to `number`, nearest first; with hearsay only for own look-ups."""
        found = self._places.nearest(number, limit)
        if has_hearsay and self._hearsay.numbers:
            found += [
                contact
                for contact in self._hearsay.nearest(number, limit)
                if not self._set_aside.has(contact, now_s)
            ]
            found.sort(key=lambda contact: contact.number ^ number)
            del found[limit:]
        return found

    def contacts(self) -> list[Contact]:
        """All that have a place, in the order of their ids."""
        return list(self._places.contacts)

    def round_trip_s(self, contact: Contact) -> float | None:
        """How long it takes to answer, smoothed; None when that is not known."""
        index = self._index(contact)
        if index < 0 or math.isnan(self._round_trips_s[index]):
            return None
        return self._round_trips_s[index]

    def stale_ranges(self, now_s: float, older_than_s: float) -> list[int]:
        """Any one id of each bucket in which nobody was looked for in so long."""
        return [
            bucket.random_number(self._random)
            for bucket in self._buckets
            if now_s - bucket.looked_up_s >= older_than_s
        ]

    def view(self) -> list[BucketView]:
        """The buckets as they are now, in the order of their ids."""
        views = []
        for bucket in self._buckets:
            start, end = self._places.span(bucket.low, bucket.high)
            last_seen_s = max(self._seen_s[start:end], default=-math.inf)
            views.append(
                BucketView(
                    bucket.depth,
                    bucket.low,
                    bucket.high,
                    end - start,
                    bucket.num_waiting,
                    last_seen_s if math.isfinite(last_seen_s) else None,
                )
            )
        return views

    def _index(self, contact: Contact) -> int:
        index = self._places.index(contact.number)
        return index if index >= 0 and self._places.contacts[index] == contact else -1

    def _admit(self, contact: Contact, now_s: float, round_trip_s: float | None) -> Contact | None:
        bucket = self._buckets.of(contact.number)
        while rivals := self._rivals(bucket, contact):
            if not self._buckets.may_split(bucket):
                self._wait(bucket, contact)
                return self._to_ping(bucket, rivals, now_s)
            self._buckets.split(bucket)
            bucket = self._buckets.of(contact.number)
        self._insert(bucket, contact, now_s, round_trip_s)
        return None

    def _rivals(self, bucket: Bucket, contact: Contact) -> Sequence[int]:
        """Where those stand, of whose places it would have to have one: none while there is room for it."""
        start, end = self._places.span(bucket.low, bucket.high)
        if end - start >= self._size:
            return range(start, end)
        return [start + offset for offset in self._crowd(contact, self._places.contacts[start:end])]

    def _crowd(self, contact: Contact, others: list[Contact]) -> list[int]:
        """Where those of its host stand among the others, if there may be no more of them.

        One host may have half of a bucket's places, unless it is this machine.
        """
        if len(others) < self._max_of_a_host:
            return []
        host = contact.peer.address.host
        same = [index for index, other in enumerate(others) if other.peer.address.host == host]
        return same if len(same) >= self._max_of_a_host and not is_loopback(host) else []

    def _wait(self, bucket: Bucket, contact: Contact) -> None:
        if bucket.waiting_as(contact.number) != contact:
            bucket.leave(contact.number)
            waiting = bucket.waiting()
            if crowd := self._crowd(contact, waiting):
                bucket.leave(waiting[crowd[-1]].number)
            elif len(waiting) >= self._size:
                bucket.leave(waiting[-1].number)
        bucket.wait(contact)

    def _to_ping(self, bucket: Bucket, rivals: Sequence[int], now_s: float) -> Contact | None:
        if now_s - bucket.checked_s < CHECK_S:
            return None
        quietest = min(rivals, key=self._seen_s.__getitem__)
        if now_s - self._seen_s[quietest] < QUIET_S:
            return None
        bucket.checked_s = now_s
        return self._places.contacts[quietest]

    def _insert(self, bucket: Bucket, contact: Contact, seen_s: float, round_trip_s: float | None) -> None:
        bucket.leave(contact.number)
        index = self._hearsay.index(contact.number)
        if index >= 0:
            self._hearsay.remove_at(index)
        index = self._places.insert(contact)
        self._seen_s.insert(index, seen_s)
        self._round_trips_s.insert(index, math.nan if round_trip_s is None else round_trip_s)
        self._at_address[contact.peer.address] = contact

    def _remove(self, index: int) -> Bucket:
        """Take a contact out of its place; tells the bucket that has one to give now."""
        contact = self._places.remove_at(index)
        del self._seen_s[index]
        del self._round_trips_s[index]
        del self._at_address[contact.peer.address]
        return self._buckets.of(contact.number)

    def _promote(self, bucket: Bucket) -> None:
        """Give a place of the bucket, where there is one, to the newest replacement that may have it."""
        for contact in bucket.waiting():
            if contact.peer.address in self._at_address:
                bucket.leave(contact.number)  # somebody else was seen there since
            elif not self._rivals(bucket, contact):
                self._insert(bucket, contact, -math.inf, None)
                return
