"""The iterative look-up of many keys at once (Maymounkov & Mazières 2002, section 2.3).

Each key keeps a list of the nearest peers that it has heard of (`tracks`) and asks them, nearest first, for
its value and for peers that are nearer still. Keys that go to the same peer share its requests. A peer that
is slow is not waited for: the next is asked beside it. What to do with what is found is left to `node`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from shoal.core import Address, Deadline, Scope, ShoalError
from shoal.dht.records import Slot
from shoal.dht.tracks import Track
from shoal.dht.under_way import UnderWay, until_set
from shoal.dht.wire import MAX_CONTACTS, MAX_WANTS, Contact, Found, Want


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
                await until_set(self._ended, deadline)
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


def _at(contacts: Sequence[Contact | None], index: int) -> Contact | None:
    return contacts[index] if index < len(contacts) else None
