"""The iterative look-up of many keys at once (Maymounkov & Mazières 2002, section 2.3).

Each key keeps a list of the nearest peers that it has heard of and asks them, nearest first, for its value
and for peers that are nearer still. Keys that go to the same peer share its requests. A peer that is slow is
not waited for: the next is asked beside it. What to do with what is found is left to `node`.
"""

from __future__ import annotations

import asyncio
import bisect
import enum
import itertools
from collections.abc import Sequence
from typing import Protocol

from shoal.core import Address, Deadline, Scope, ShoalError
from shoal.dht.contacts import Contact
from shoal.dht.coordinates import BEFORE_ALL, PAGE_BYTES, unpack_page
from shoal.dht.messages import ANYWHERE, MAX_CONTACTS, MAX_WANTS, Finding, Found, Kind, State, Want, reach_of
from shoal.dht.records import Slot
from shoal.dht.under_way import UnderWay

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


class Node(Protocol):
    """What a search needs of the peer that it runs on."""

    async def call_find(self, contact: Contact, wants: list[Want]) -> Found:
        """Ask a peer."""

    def believed(self, key: bytes, slots: list[Slot]) -> list[Slot]:
        """Those that live, and are rightly signed and typed."""

    def read_contacts(self, packed: Sequence[bytes], teller: Address) -> list[Contact | None]:
        """Peers that another peer tells of; None for those not to be asked."""

    def is_set_aside(self, contact: Contact) -> bool:
        """Whether a peer has failed of late, or is this one."""

    def witnesses(self) -> list[Contact]:
        """A few peers from anywhere."""

    def doubt(self, contact: Contact) -> None:
        """Have it seen whether a peer that has not answered in good time is still there."""

    def slow_s(self) -> float:
        """How long answers take when all is well, at most."""


class _Request:
    """One request on its way."""

    __slots__ = ("contact", "tracks")

    def __init__(self, contact: Contact, tracks: list[Track]) -> None:
        self.contact = contact
        self.tracks = tracks


class Search:
    """Several keys looked up together."""

    def __init__(self, node: Node, tracks: Sequence[Track], parallel: int) -> None:
        self._node = node
        self._tracks = tracks
        self._parallel = parallel
        self._waiting: dict[Contact, list[Track]] = {}  # in the order in which they were first wanted
        self._under_way: UnderWay[_Request] = UnderWay(node.slow_s, self._on_slow)
        self._parked: dict[Contact, list[Track]] = {}  # who would ask a peer that is slow to answer another
        self._num_open = len(tracks)
        self._ended = asyncio.Event()
        self._scope = Scope("look-up")

    async def run(self, deadline: Deadline) -> None:
        """Look until every key is done or the time is over."""
        try:
            async with self._scope:
                for track in self._tracks:
                    self._advance(track)
                self._dispatch()
                if not self._ended.is_set():
                    try:
                        async with asyncio.timeout(deadline.timeout_s):
                            await self._ended.wait()
                    except TimeoutError:
                        pass
                self._stop()
                self._scope.cancel()
        finally:
            self._stop()

    def _stop(self) -> None:
        """Send nothing any more; whoever has not answered yet is to be looked after by others."""
        self._ended.set()
        self._under_way.close()
        for contact in self._parked:
            self._node.doubt(contact)
        self._parked.clear()

    def _advance(self, track: Track) -> None:
        """Have a key ask whom it wants to."""
        chosen = track.next_peers(self._parallel)
        if track.is_done and track.is_doubtful:
            chosen = track.reopen(self._node.witnesses())
        for contact in chosen:
            track.on_asked(contact)
            self._waiting.setdefault(contact, []).append(track)
        if track.is_done:
            self._end()

    def _end(self) -> None:
        self._num_open -= 1
        if self._num_open <= 0:
            self._ended.set()

    def _dispatch(self) -> None:
        """Send what may be sent, longest waiting first."""
        while self._waiting and self._under_way.has_room and not self._ended.is_set():
            contact = next(iter(self._waiting))
            tracks = [track for track in self._waiting.pop(contact) if not track.is_done]
            if not tracks:
                continue
            if self._node.is_set_aside(contact):
                self._fail(contact, tracks)
                continue
            if contact in self._parked:
                self._parked[contact] += tracks
                self._go_on_without(contact, tracks)
                continue
            if any(track.is_alone for track in tracks) and len(tracks) > 1:
                alone = next(track for track in tracks if track.is_alone)
                tracks.remove(alone)
                self._waiting[contact] = tracks
                tracks = [alone]
            elif len(tracks) > MAX_WANTS:
                self._waiting[contact] = tracks[MAX_WANTS:]
                tracks = tracks[:MAX_WANTS]
            request = _Request(contact, tracks)
            self._under_way.begin(request)
            self._scope.start(self._ask(request), name="find")

    async def _ask(self, request: _Request) -> None:
        contact, tracks = request.contact, request.tracks
        try:
            found = await self._node.call_find(contact, [track.want(contact) for track in tracks])
        except ShoalError:
            self._under_way.end(request)
            self._fail(contact, tracks)
            self._fail(contact, self._parked.pop(contact, ()))
        else:
            self._under_way.end(request)
            self._take_in(contact, tracks, found)
            for track in self._parked.pop(contact, ()):
                self._waiting.setdefault(contact, []).append(track)
        self._dispatch()

    def _fail(self, contact: Contact, tracks: Sequence[Track]) -> None:
        for track in tracks:
            if not track.is_done:
                track.on_failed(contact)
                self._advance(track)

    def _go_on_without(self, contact: Contact, tracks: Sequence[Track]) -> None:
        for track in tracks:
            if not track.is_done:
                track.on_slow(contact)
                self._advance(track)

    def _take_in(self, contact: Contact, tracks: list[Track], found: Found) -> None:
        contacts = self._node.read_contacts(found.contacts, contact.peer.address)
        for track, finding in zip(tracks, found.findings, strict=True):
            if track.is_done:
                continue
            told = finding.near[:MAX_CONTACTS]
            near = [other for index in told if (other := _at(contacts, index)) is not None]
            track.on_answered(contact, finding, near)
            if finding.slots and track.wants_value:
                believed = self._node.believed(track.key, finding.slots)
                if believed:
                    track.on_value(contact, believed)
            self._settle(track)

    def _settle(self, track: Track) -> None:
        if track.is_done:
            self._end()
        else:
            self._advance(track)

    def _on_slow(self, request: _Request) -> None:
        self._parked.setdefault(request.contact, [])
        self._go_on_without(request.contact, request.tracks)
        self._dispatch()


def _distance(entry: tuple[int, Contact]) -> int:
    return entry[0]


def _at(contacts: Sequence[Contact | None], index: int) -> Contact | None:
    return contacts[index] if index < len(contacts) else None
