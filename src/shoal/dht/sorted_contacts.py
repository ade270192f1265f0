"""Contacts in the order of their ids, in which those nearest to any id are found quickly.

A sorted list instead of a tree: contacts whose ids begin alike stand side by side, so that every range of the
id space is a slice, and a few bisections find the nearest.
"""

from __future__ import annotations

from bisect import bisect_left

from shoal.dht.wire import Contact


class SortedContacts:
    """At most one contact for each id."""

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
        """Take one out."""
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
