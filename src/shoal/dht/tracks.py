"""One key's way through the swarm: whom it has heard of, whom it has asked, and what they said.

A track neither sends nor waits; `search` does that for many of them together.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Sequence

from shoal.dht.records import Slot
from shoal.dht.wire import (
    ANYWHERE,
    BEFORE_ALL,
    PAGE_BYTES,
    Contact,
    Finding,
    Kind,
    State,
    Want,
    reach_of,
    unpack_page,
)

_MAX_NEAR = 128  # peers that a key remembers: more than a few liars can name
_ALL_ABSENT = 3  # nearest peers that must all know of a key's absence: some may lie, or be the last to know
_MAX_PAGES = 256


class Step(enum.IntEnum):
    """How far a key has come with a peer."""

    ASKED = 1
    SLOW = 2
    ANSWERED = 3
    FAILED = 4


class Track:
    """One key's way through the swarm."""

    __slots__ = (
        "_absent",
        "_afters",
        "_depths",
        "_has_answer",
        "_has_witnesses",
        "_num_pages",
        "_pagers",
        "_reaches",
        "_steps",
        "after",
        "coordinates",
        "first_parallel",
        "has_marker",
        "has_more_at",
        "hops",
        "is_alone",
        "is_done",
        "key",
        "kind",
        "near",
        "num_asked",
        "number",
        "replicas",
        "width",
    )

    def __init__(self, key: bytes, kind: Kind, width: int) -> None:
        self.key = key
        self.kind = kind
        self.width = width
        """It ends when so many of the nearest peers have answered."""
        self.number = int.from_bytes(key)
        self.near: list[tuple[int, Contact]] = []
        """Distance and peer, nearest first; those that failed are gone."""
        self.replicas: list[tuple[Contact, list[Slot]]] = []
        """Who has what."""
        self.coordinates: list[int] = []
        self.after = BEFORE_ALL
        self.has_more_at: Contact | None = None
        self.is_alone = False
        """Whether its value is so large that no other key may share its requests."""
        self.is_done = False
        self.hops = 0
        """Answers that followed from each other until the value was found, or the nearest peer."""
        self.first_parallel = 1
        """Peers that are asked at once until one of them has answered."""
        self.has_marker = False
        """Whether it ended because those nearest to it know that there is nothing."""
        self.num_asked = 0
        """Peers that were asked and have not answered, the slow ones not counted."""
        self._steps: dict[bytes, Step] = {}  # by the packed contact
        self._depths: dict[bytes, int] = {}
        self._reaches: dict[bytes, int] = {}
        """How near the peers were that each was last asked for."""
        self._absent: dict[bytes, None] = {}
        self._num_pages = 0
        self._afters: dict[bytes, int] = {}
        """Where the page began that each was last asked for."""
        self._pagers: dict[bytes, None] = {}
        """Those that have coordinates, of which no page was taken."""
        self._has_answer = False
        self._has_witnesses = False

    def begin(self, nearest: Sequence[Contact]) -> None:
        """Begin with these peers, nearest first."""
        number = self.number
        self.near = [(contact.number ^ number, contact) for contact in nearest]
        self._depths = dict.fromkeys([contact.packed for contact in nearest], 1)

    def add(self, contact: Contact, depth: int) -> None:
        """Hear of a peer."""
        if contact.packed in self._depths:
            return
        distance = contact.number ^ self.number
        near = self.near
        if len(near) >= _MAX_NEAR:
            if distance >= near[-1][0]:
                return
            last = near[-1][1]
            if last.packed not in self._steps:
                del near[-1], self._depths[last.packed]
        self._depths[contact.packed] = depth
        bisect.insort(near, (distance, contact), key=_distance)

    @property
    def wants_value(self) -> bool:
        """Whether a value is of use to it now."""
        return not self.is_done and self.kind in (Kind.VALUE, Kind.LATEST)

    @property
    def has_silent(self) -> bool:
        """Whether it was told of peers that do not answer: by somebody who does not know, or lies."""
        return any(step in (Step.SLOW, Step.FAILED) for step in self._steps.values())

    def answered(self) -> list[Contact]:
        """Those that have answered, nearest first."""
        return [contact for _, contact in self.near if self._steps.get(contact.packed) is Step.ANSWERED]

    def is_slow(self, contact: Contact) -> bool:
        """Whether it was asked and has not answered in good time."""
        return self._steps.get(contact.packed) is Step.SLOW

    def next_peers(self, parallel: int) -> list[Contact]:
        """Whom to ask now; `is_done` when there is nobody left whose answer counts."""
        if self.is_done:
            return []
        if self.has_more_at is not None:
            step = self._steps.get(self.has_more_at.packed)
            if step is Step.ANSWERED:
                return [self.has_more_at] if self.num_asked == 0 else []
            if step is Step.ASKED:
                return []
            self._begin_anew()
        if not self._has_answer:
            parallel = self.first_parallel
        chosen: list[Contact] = []
        num_answered = num_open = 0
        for _, contact in self.near:
            step = self._steps.get(contact.packed)
            if step is Step.ANSWERED:
                num_answered += 1
            elif step is None and self.num_asked + len(chosen) < parallel:
                chosen.append(contact)
            if step is not Step.SLOW:
                num_open += 1
            if num_open >= self.width:
                break
        if not chosen and self.num_asked == 0:
            chosen = self._told_too_little()
            has_slow = any(step is Step.SLOW for step in self._steps.values())
            self.is_done = not chosen and (num_answered >= self.width or not has_slow)
        return chosen

    def _told_too_little(self) -> list[Contact]:
        """Those that were asked only for peers nearer than some that have turned out not to answer."""
        answered = [entry for entry in self.near if self._steps.get(entry[1].packed) is Step.ANSWERED]
        counted = answered[: self.width]
        if not counted:
            return []
        reach = reach_of(counted[-1][0])
        return [contact for _, contact in counted if self._reaches.get(contact.packed, ANYWHERE) < reach]

    @property
    def is_doubtful(self) -> bool:
        """Whether it ends with nothing though others have not been asked whether those near the key lie."""
        return self.has_silent and not (self._has_witnesses or self.replicas or self.coordinates)

    def reopen(self, witnesses: Sequence[Contact]) -> list[Contact]:
        """Whom of these to ask before it ends after all."""
        self._has_witnesses = True
        chosen = [contact for contact in witnesses if contact.packed not in self._steps]
        self.is_done = not chosen
        return chosen

    def want(self, contact: Contact) -> Want:
        """What to ask a peer for; all that it knows when it is asked again."""
        reach = ANYWHERE
        if len(self.near) >= self.width and contact.packed not in self._reaches:
            reach = reach_of(self.near[min(len(self.near), self.width + 2) - 1][0])
        self._reaches[contact.packed] = reach
        self._afters[contact.packed] = self.after
        return Want(self.key, self.kind, reach, self.after)

    def on_asked(self, contact: Contact) -> None:
        """A request is on its way."""
        self._steps[contact.packed] = Step.ASKED
        self.num_asked += 1

    def on_slow(self, contact: Contact) -> None:
        """It has not answered in good time."""
        if self._steps.get(contact.packed) is Step.ASKED:
            self._steps[contact.packed] = Step.SLOW
            self.num_asked -= 1

    def on_failed(self, contact: Contact) -> None:
        """It will not answer."""
        if self._steps.get(contact.packed) is Step.ASKED:
            self.num_asked -= 1
        self._steps[contact.packed] = Step.FAILED
        if self.has_more_at is contact:
            self._begin_anew()
        entry = (contact.number ^ self.number, contact)
        if entry in self.near:
            self.near.remove(entry)

    def on_answered(self, contact: Contact, finding: Finding, near: Sequence[Contact]) -> None:
        """It has answered; `near` are the peers that it tells of."""
        if self._steps.get(contact.packed) is Step.ASKED:
            self.num_asked -= 1
        self._steps[contact.packed] = Step.ANSWERED
        self._has_answer = True
        depth = self._depths.get(contact.packed, 0)
        for other in near:
            self.add(other, depth + 1)
        if finding.state == State.ABSENT and self.kind == Kind.COORDINATES:
            self._absent[contact.packed] = None
            if all(other.packed in self._absent for _, other in self.near[:_ALL_ABSENT]):
                self.has_marker = True
                self._finish(depth)
        elif finding.state == State.TOO_LARGE:
            if not self.is_alone:
                self.is_alone = True
                del self._steps[contact.packed]
        elif finding.state == State.HERE and self.kind == Kind.COORDINATES:
            self._on_page(contact, finding, depth)
        elif self.near and contact == self.near[0][1]:
            self.hops = depth

    def on_value(self, contact: Contact, slots: list[Slot]) -> None:
        """It holds these, and they have been checked."""
        self.replicas.append((contact, slots))
        if self.kind == Kind.VALUE:
            self._finish(self._depths.get(contact.packed, 0))

    def passed_by(self) -> list[Contact]:
        """Peers nearer than the first that had the value, that answered without one."""
        distance = self.replicas[0][0].number ^ self.number
        return [
            contact
            for nearer, contact in itertools.takewhile(lambda entry: entry[0] < distance, self.near)
            if self._steps.get(contact.packed) is Step.ANSWERED
        ]

    def _begin_anew(self) -> None:
        """Who had more pages does not go on: ask the others that have some from the first page on."""
        self.has_more_at = None
        self.coordinates.clear()
        self.after = BEFORE_ALL
        for packed in self._pagers:
            if self._steps.get(packed) is Step.ANSWERED:
                del self._steps[packed]
        self._pagers.clear()

    def _on_page(self, contact: Contact, finding: Finding, depth: int) -> None:
        """One peer's pages follow each other; what others tell meanwhile, or too late, is left."""
        is_of_another = self.has_more_at is not None and self.has_more_at != contact
        if is_of_another or self._afters.get(contact.packed) != self.after:
            self._pagers[contact.packed] = None
            return
        try:
            page = unpack_page(finding.coordinates[:PAGE_BYTES], self.after)
        except ValueError:
            self.on_failed(contact)
            return
        self.coordinates += page
        self._num_pages += 1
        if finding.has_more and page and self._num_pages < _MAX_PAGES:
            self.has_more_at = contact
            self.after = page[-1]
            self._pagers.pop(contact.packed, None)
        elif self.coordinates:
            self._finish(depth)

    def _finish(self, depth: int) -> None:
        self.hops = depth
        self.is_done = True


def _distance(entry: tuple[int, Contact]) -> int:
    return entry[0]
