"""Peers that did not answer: left alone for a while, longer after every failure, then tried or forgotten."""

from __future__ import annotations

import heapq

from shoal.dht.settings import DHTSettings
from shoal.dht.wire import Contact

MAX_SET_ASIDE = 4096
"""Those that failed longest ago are forgotten beyond this."""
MAX_COME_BACK = 8
"""To be pinged at once."""


class _Failure:
    __slots__ = ("contact", "is_tried", "until_s", "wait_s", "was_seen")

    def __init__(self, contact: Contact, wait_s: float, until_s: float, was_seen: bool) -> None:
        self.contact = contact
        self.was_seen = was_seen
        self.wait_s = wait_s
        self.until_s = until_s
        self.is_tried = False
        """Named by `come_back`: a failure is one more, though it is to be left alone meanwhile."""


class SetAside:
    """Keyed by id and address both: who fails at a wrong address is not set aside at the right one."""

    __slots__ = ("_failures", "_first_wait_s", "_longest_wait_s")

    def __init__(self, settings: DHTSettings) -> None:
        self._first_wait_s = min(settings.set_aside_s, settings.max_set_aside_s)
        self._longest_wait_s = settings.max_set_aside_s
        self._failures: dict[bytes, _Failure] = {}  # the latest failure last

    def __len__(self) -> int:
        return len(self._failures)

    def nearest(self, number: int, limit: int) -> list[Contact]:
        """Those nearest to a key."""
        contacts = [failure.contact for failure in self._failures.values()]
        return heapq.nsmallest(limit, contacts, key=lambda contact: contact.number ^ number)

    def has(self, contact: Contact, now_s: float) -> bool:
        """Whether it is to be left alone now."""
        failure = self._failures.get(contact.packed)
        return failure is not None and now_s < failure.until_s

    def add(self, contact: Contact, now_s: float, *, was_seen: bool = True) -> None:
        """It has failed, perhaps again; what fails while it is left alone began before, and adds nothing.

        One that was only heard of may not be there at all.
        """
        failure = self._failures.pop(contact.packed, None)
        if failure is None:
            failure = _Failure(contact, self._first_wait_s, now_s + self._first_wait_s, was_seen)
        elif failure.is_tried or now_s >= failure.until_s:
            wait_s = min(2 * failure.wait_s, self._longest_wait_s)
            failure = _Failure(contact, wait_s, now_s + wait_s, was_seen or failure.was_seen)
        if len(self._failures) >= MAX_SET_ASIDE:
            del self._failures[next(iter(self._failures))]
        self._failures[contact.packed] = failure

    def clear(self, contact: Contact) -> None:
        """It was heard: its failures are forgotten."""
        self._failures.pop(contact.packed, None)

    def come_back(self, now_s: float) -> list[Contact]:
        """Some whose time is over, to be pinged; each is left alone meanwhile, as long as the last time.

        One that has been silent through the longest wait is forgotten instead, so that peers which left for
        good are not pinged for ever, and so is one that was never seen: a liar could have anybody pinged.
        """
        due = [failure for failure in self._failures.values() if failure.until_s <= now_s]
        back: list[Contact] = []
        for failure in due:
            if failure.wait_s >= self._longest_wait_s or not failure.was_seen:
                del self._failures[failure.contact.packed]
            elif len(back) < MAX_COME_BACK:
                failure.until_s = now_s + failure.wait_s
                failure.is_tried = True
                back.append(failure.contact)
        return back
