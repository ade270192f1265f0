"""Buckets: the ranges into which a routing table divides the space of ids (Kademlia, section 2.4).

Who is in a bucket is the table's to know; here are the ranges, and those who wait for a place in each.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from random import Random

from shoal.dht.wire import ID_BITS, Contact


class Bucket:
    """All ids that begin with the same `depth` bits: from `low` up to, but not including, `high`."""

    __slots__ = ("_waiting", "checked_s", "depth", "looked_up_s", "low")

    def __init__(self, low: int, depth: int, looked_up_s: float = -math.inf) -> None:
        self.low = low
        self.depth = depth
        self.looked_up_s = looked_up_s
        """When somebody was last looked for in it."""
        self.checked_s = -math.inf
        """When one of its contacts was last named to be pinged."""
        self._waiting: dict[int, Contact] | None = None  # most buckets never need one

    @property
    def high(self) -> int:
        """Where the next bucket begins."""
        return self.low + (1 << (ID_BITS - self.depth))

    @property
    def num_waiting(self) -> int:
        """How many replacements there are."""
        return len(self._waiting) if self._waiting else 0

    def waiting(self) -> list[Contact]:
        """The replacements, newest first: peers that were seen when there was no place for them."""
        return list(reversed(self._waiting.values())) if self._waiting else []

    def waiting_as(self, number: int) -> Contact | None:
        """The replacement with this id."""
        return self._waiting.get(number) if self._waiting else None

    def wait(self, contact: Contact) -> None:
        """Put it before all other replacements."""
        if self._waiting is None:
            self._waiting = {}
        self._waiting.pop(contact.number, None)
        self._waiting[contact.number] = contact

    def leave(self, number: int) -> None:
        """The id waits no longer, if it did."""
        if self._waiting:
            self._waiting.pop(number, None)

    def random_number(self, random: Random) -> int:
        """Any id of this bucket."""
        return self.low | random.getrandbits(ID_BITS - self.depth)


class Buckets:
    """Divides the whole space; at first there is one bucket, and splitting makes more."""

    __slots__ = ("_buckets", "_depth_modulo", "_lows", "_own")

    def __init__(self, own: int, depth_modulo: int) -> None:
        self._own = own
        self._depth_modulo = depth_modulo
        self._lows = [0]
        self._buckets = [Bucket(0, 0)]

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def of(self, number: int) -> Bucket:
        """The bucket that an id belongs to."""
        return self._buckets[bisect_right(self._lows, number) - 1]

    def may_split(self, bucket: Bucket) -> bool:
        """Around the own id without end; elsewhere down to the next multiple of the modulo."""
        if bucket.depth % self._depth_modulo:
            return True
        return bucket.low <= self._own < bucket.high and bucket.depth < ID_BITS

    def split(self, bucket: Bucket) -> None:
        """Make two of it; the id in the middle is the first of the upper one."""
        index = bisect_right(self._lows, bucket.low)
        bucket.depth += 1
        upper = Bucket(bucket.high, bucket.depth, bucket.looked_up_s)
        for contact in reversed(bucket.waiting()):
            if contact.number >= upper.low:
                bucket.leave(contact.number)
                upper.wait(contact)
        self._lows.insert(index, upper.low)
        self._buckets.insert(index, upper)
