"""The iterative look-up of many keys at once (Maymounkov & Mazières 2002, section 2.3).

A `Lookup` is one key's list of the nearest peers that it has heard of. `Search` asks them, nearest first, for
its value and for peers that are nearer still. Keys that go to the same peer share its requests.

How it ends while peers come and go: when the value was found, or nobody is left to ask and no answer is
waited for (`Lookup.waits_for_nobody`). A peer that is slow is not waited for: the next is asked beside it,
and its answer counts if it comes; one that fails is gone from the list. Where some were silent and nothing
was found, others are asked too (`Lookup.is_doubtful`), and where a record is looked for at last those near
the key that failed of late (`ask_failed_of_late`, half a second more). The asking ends at its deadline at the
latest (`Requests.run`), which does not shorten that half second.

`look_up` and `find_records` are what others call; what a look-up leaves in caches on its way is at the end.
"""

from __future__ import annotations

import abc
import asyncio
import bisect
import contextlib
import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.core import Deadline, DeadlineExceeded, PeerUnreachable, Scope, ShoalError, UsageError, fanout
from shoal.dht import wire
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import Slot, merge
from shoal.dht.wire import Contact, LookupKind

T = TypeVar("T")
U = TypeVar("U")

MAX_IN_FLIGHT = 48
"""Requests of one look-up or store at once; what waits meanwhile is sent together."""
_MIN_SLOW_S, _MAX_SLOW_S = 0.1, 1.0
_MAX_NEAR = 128  # peers that a key remembers, besides those asked: more than a few liars can name
_ALL_ABSENT = 3  # nearest peers that must all know of a key's absence: some may lie, or be the last to know
_MARKED_AT = 3  # peers that are told of an absence
_HEARSAY_SEEDS = 4  # peers that were only heard of do not displace those that were seen: they may be invented
_MAX_HEARSAY = 16  # look-ups of larger batches leave no hearsay behind: there would be too much of it
_SECOND_CHANCE_S = 0.5


async def look_up(
    protocol: DHTProtocol, lookups: Sequence[Lookup], deadline: Deadline, *, seeds: Sequence[Contact] = ()
) -> None:
    """Run look-ups together, beginning with `seeds` and the nearest peers in the routing table."""
    if protocol.scope is None:
        raise UsageError("The DHT is not open.", next_step="use it inside 'async with'.")
    if not lookups:
        return
    settings, table, now_s = protocol.settings, protocol.table, protocol.now_s()
    for lookup in lookups:
        if len(lookups) <= settings.parallel:
            lookup.first_parallel = settings.parallel
        num_seeds = max(lookup.num_nearest + settings.num_replicas, settings.beam)
        lookup.begin(table.nearest(lookup.number, num_seeds, now_s=now_s))
        heard = table.nearest(lookup.number, _HEARSAY_SEEDS, now_s=now_s, has_hearsay=True)
        for contact in (*heard, *seeds):
            lookup.add(contact, 1)
        table.on_looked_up(lookup.number, now_s)
    await Search(protocol, settings.parallel).run(lookups, deadline)
    if len(lookups) <= _MAX_HEARSAY:
        for lookup in lookups:
            for _, contact in lookup.near:
                table.on_heard_of(contact)


async def find_records(
    protocol: DHTProtocol,
    keys: Sequence[bytes],
    deadline: Deadline,
    *,
    latest: bool = False,
    must_end: bool = False,
) -> tuple[dict[bytes, list[Slot]], dict[bytes, Lookup]]:
    """The live slots of keys, from this peer's own records or from the swarm, and the look-ups that it took.

    `latest` asks all replicas, and merges what they have. When it `must_end`, DeadlineExceeded and
    PeerUnreachable tell where nothing found does not mean that there is nothing.
    """
    wall_s = protocol.wall_s()
    found = {key: protocol.records.get(key, wall_s, is_use=True) for key in keys}
    kind = LookupKind.LATEST if latest else LookupKind.VALUE
    beam = protocol.settings.beam
    lookups = {key: Lookup(key, kind, beam) for key, slots in found.items() if latest or not slots}
    await look_up(protocol, list(lookups.values()), deadline)
    missed = [lookup for lookup in lookups.values() if lookup.is_done and not lookup.replicas]
    if missed:
        await ask_failed_of_late(protocol, missed)
    if must_end:
        check_ended(list(lookups.values()), is_client=protocol.is_client)
    wall_s = protocol.wall_s()
    for key, lookup in lookups.items():
        if lookup.replicas:
            found[key] = merge([found[key], *(slots for _, slots in lookup.replicas)], wall_s)
            cache_found(protocol, lookup, found[key])
    return found, lookups


class AskState(enum.IntEnum):
    """How far a key has come with a peer."""

    ASKED = 1
    SLOW = 2
    ANSWERED = 3
    FAILED = 4


class Lookup:
    """One key's look-up: whom it has heard of, whom it has asked, and what they said. It does not send."""

    def __init__(self, key: bytes, kind: LookupKind, num_nearest: int) -> None:
        self.key = key
        self.kind = kind
        self.num_nearest = num_nearest
        """It ends when so many of the nearest peers have answered."""
        self.number = int.from_bytes(key)
        self.near: list[tuple[int, Contact]] = []
        """Distance and peer, nearest first; those that failed are gone."""
        self.replicas: list[tuple[Contact, list[Slot]]] = []
        """Peers that hold the value, and what each holds."""
        self.coordinates: list[int] = []
        self.is_alone = False
        """Whether its value is so large that no other key may share its requests."""
        self.is_done = False
        self.hops = 0
        """Answers that followed from each other until the value was found, or the nearest peer."""
        self.first_parallel = 1
        """Peers that are asked at once until one of them has answered."""
        self.has_marker = False
        """Whether it ended because those nearest to it know that there is nothing."""
        self.num_awaited = 0
        """Peers that were asked and have not answered, the slow ones not counted."""
        # the following are by the packed contact
        self._progress: dict[bytes, AskState] = {}
        self._depths: dict[bytes, int] = {}
        self._reaches: dict[bytes, int] = {}  # how near the peers were that each was last asked for
        self._absent: dict[bytes, None] = {}
        self._has_answer = False
        self._has_witnesses = False

    # --- whom to ask ---

    def begin(self, nearest: Sequence[Contact]) -> None:
        """Begin with these peers, nearest first."""
        number = self.number
        self.near = [(contact.number ^ number, contact) for contact in nearest]
        self._depths = dict.fromkeys([contact.packed for contact in nearest], 1)

    def add(self, contact: Contact, depth: int) -> None:
        """Take note of a peer that somebody has told of."""
        if contact.packed in self._depths:
            return
        distance = contact.number ^ self.number
        near = self.near
        if len(near) >= _MAX_NEAR:
            if distance >= near[-1][0]:
                return
            last = near[-1][1]
            if last.packed not in self._progress:
                del near[-1], self._depths[last.packed]
        self._depths[contact.packed] = depth
        bisect.insort(near, (distance, contact), key=lambda entry: entry[0])

    def next_peers(self, parallel: int) -> list[Contact]:
        """Whom to ask now: those of the `num_nearest` nearest that were not asked yet, a few at once.

        A slow peer takes no place among them. When all have been asked and have answered, those are asked
        again that were asked for too little.
        """
        if not self._has_answer:
            parallel = self.first_parallel
        chosen: list[Contact] = []
        num_counted = 0
        for _, contact in self.near:
            progress = self._progress.get(contact.packed)
            if progress is None and self.num_awaited + len(chosen) < parallel:
                chosen.append(contact)
            num_counted += progress is not AskState.SLOW
            if num_counted >= self.num_nearest:
                break
        return chosen or ([] if self.num_awaited else self._asked_for_too_little())

    def _asked_for_too_little(self) -> list[Contact]:
        """Those that were asked only for peers nearer than some that have turned out not to answer."""
        counted = self.answered()[: self.num_nearest]
        reach = wire.reach_of(counted[-1].number ^ self.number) if counted else 0
        return [contact for contact in counted if self._reaches.get(contact.packed, wire.ANYWHERE) < reach]

    # --- when it ends ---

    @property
    def waits_for_nobody(self) -> bool:
        """Whether, there being nobody left to ask, no answer is waited for either.

        A slow peer's is, where fewer than `num_nearest` have answered.
        """
        return self.num_awaited == 0 and (
            len(self.answered()) >= self.num_nearest or not self._has(AskState.SLOW)
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether it ends with nothing, and others should be asked: those near the key may lie, or be gone.

        They are asked once where enough of the nearest have answered, and else until enough have.
        """
        if self.replicas or self.coordinates or not self.has_silent:
            return False
        return not self._has_witnesses or len(self.answered()) < self.num_nearest

    def ask_witnesses(self, witnesses: Sequence[Contact]) -> list[Contact]:
        """Whom of these to ask before it ends after all: those that it has not asked."""
        self._has_witnesses = True
        chosen = [contact for contact in witnesses if contact.packed not in self._progress]
        for contact in chosen:
            self.add(contact, 1)
        return chosen

    @property
    def has_silent(self) -> bool:
        """Whether it was told of peers that do not answer: by somebody who does not know, or lies."""
        return self._has(AskState.SLOW) or self._has(AskState.FAILED)

    def _has(self, state: AskState) -> bool:
        return any(progress is state for progress in self._progress.values())

    # --- what to ask for, and what came of it ---

    def want(self, contact: Contact) -> wire.Want:
        """What to ask a peer for; all that it knows when it is asked again."""
        reach = wire.ANYWHERE
        if len(self.near) >= self.num_nearest and contact.packed not in self._reaches:
            reach = wire.reach_of(self.near[min(len(self.near), self.num_nearest + 2) - 1][0])
        self._reaches[contact.packed] = reach
        return wire.Want(self.key, self.kind, reach)

    def answered(self) -> list[Contact]:
        """Those that have answered, nearest first."""
        progress = self._progress
        return [contact for _, contact in self.near if progress.get(contact.packed) is AskState.ANSWERED]

    def is_slow(self, contact: Contact) -> bool:
        """Whether it was asked and has not answered in good time."""
        return self._progress.get(contact.packed) is AskState.SLOW

    def on_asked(self, contact: Contact) -> None:
        """A request is on its way."""
        self._progress[contact.packed] = AskState.ASKED
        self.num_awaited += 1

    def on_slow(self, contact: Contact) -> None:
        """It has not answered in good time, and is not counted on any more."""
        if self._progress.get(contact.packed) is AskState.ASKED:
            self._progress[contact.packed] = AskState.SLOW
            self.num_awaited -= 1

    def on_failed(self, contact: Contact) -> None:
        """It will not answer: it leaves the list of the nearest."""
        if self._progress.get(contact.packed) is AskState.ASKED:
            self.num_awaited -= 1
        self._progress[contact.packed] = AskState.FAILED
        entry = (contact.number ^ self.number, contact)
        if entry in self.near:
            self.near.remove(entry)

    def on_answered(self, contact: Contact, finding: wire.Finding, near: Sequence[Contact]) -> None:
        """It has answered; `near` are the peers that it tells of."""
        if self._progress.get(contact.packed) is AskState.ASKED:
            self.num_awaited -= 1
        self._progress[contact.packed] = AskState.ANSWERED
        self._has_answer = True
        depth = self._depths.get(contact.packed, 0)
        for other in near:
            self.add(other, depth + 1)
        if finding.state == wire.State.ABSENT and self.kind == LookupKind.COORDINATES:
            self._absent[contact.packed] = None
            if all(other.packed in self._absent for _, other in self.near[:_ALL_ABSENT]):
                self.has_marker = True
                self._finish(depth)
        elif finding.state == wire.State.TOO_LARGE:
            if not self.is_alone:
                self.is_alone = True
                del self._progress[contact.packed]
        elif finding.state == wire.State.HERE and self.kind == LookupKind.COORDINATES:
            try:
                self.coordinates = wire.unpack_coordinates(finding.coordinates)
            except ValueError:
                self.on_failed(contact)
            if self.coordinates:
                self._finish(depth)
        elif self.near and contact == self.near[0][1]:
            self.hops = depth

    def on_value(self, contact: Contact, slots: list[Slot]) -> None:
        """It holds these, and they have been checked."""
        self.replicas.append((contact, slots))
        if self.kind == LookupKind.VALUE:
            self._finish(self._depths.get(contact.packed, 0))

    def passed_by(self) -> list[Contact]:
        """Peers nearer than the first that had the value, that answered without one."""
        distance = self.replicas[0][0].number ^ self.number
        nearer = itertools.takewhile(lambda entry: entry[0] < distance, self.near)
        return [contact for _, contact in nearer if self._progress.get(contact.packed) is AskState.ANSWERED]

    def _finish(self, depth: int) -> None:
        self.hops = depth
        self.is_done = True


# --- requests to many peers ---


@dataclass(slots=True, eq=False)
class SentRequest(Generic[T]):
    """One request on its way, and the keys or records that share it."""

    contact: Contact
    parts: list[T]
    is_slow: bool = False


class Requests(abc.ABC, Generic[T, U]):
    """The requests of one look-up or store: what goes to one peer is sent together, a few at once.

    A request that takes longer than answers usually do takes no place any more, so that others can go on.
    """

    def __init__(self, protocol: DHTProtocol, name: str) -> None:
        self._protocol = protocol
        self._waiting: dict[Contact, list[T]] = {}  # in the order in which they were first wanted
        self._sent_at_s: dict[SentRequest[T], float] = {}  # in the order of sending
        self._slow: dict[Contact, list[T]] = {}
        """Peers that are slow to answer, and what would be sent to each if it were not."""
        self._num_open = 0
        self._ended = asyncio.Event()
        self._scope = Scope(name)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @abc.abstractmethod
    def advance(self, part: T) -> None:
        """Have one part say to whom it is to be sent next, or that it is done."""

    @abc.abstractmethod
    def take(self, contact: Contact, waiting: list[T]) -> list[T]:
        """Those of the waiting parts that are to be sent now; others may be put back."""

    @abc.abstractmethod
    async def call(self, request: SentRequest[T]) -> U:
        """Send a request, and return the answer."""

    @abc.abstractmethod
    def on_answer(self, request: SentRequest[T], answer: U) -> None:
        """Take in an answer, be it late or not."""

    @abc.abstractmethod
    def on_failed(self, request: SentRequest[T]) -> None:
        """Have the parts of a request go elsewhere: the peer does not answer."""

    @abc.abstractmethod
    def on_slow(self, request: SentRequest[T]) -> None:
        """Have the parts of a request go on elsewhere: the peer is slow, and may still answer."""

    async def run(self, parts: Sequence[T], deadline: Deadline) -> None:
        """Send until every part is done or the time is over."""
        self._num_open = len(parts)
        try:
            async with self._scope:
                for part in parts:
                    self.advance(part)
                self._dispatch()
                if self._num_open:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(deadline.timeout_s):
                            await self._ended.wait()
                self._stop()
                self._scope.cancel()
        finally:
            self._stop()

    def end_one(self) -> None:
        """One more part is done."""
        self._num_open -= 1
        if self._num_open <= 0:
            self._ended.set()

    def _stop(self) -> None:
        """Send nothing any more; whoever has not answered yet is pinged in the background."""
        self._ended.set()
        self._sent_at_s.clear()
        if self._timer is not None:
            self._timer.cancel()
        for contact in self._slow:
            self._protocol.check_soon(contact)
        self._slow.clear()

    def _dispatch(self) -> None:
        """Send what may be sent, longest waiting first."""
        while self._waiting and len(self._sent_at_s) < MAX_IN_FLIGHT and not self._ended.is_set():
            contact = next(iter(self._waiting))
            parts = self.take(contact, self._waiting.pop(contact))
            if parts:
                request = SentRequest(contact, parts)
                self._sent_at_s[request] = self._loop.time()
                self._watch()
                self._scope.start(self._send(request), name="dht request")

    async def _send(self, request: SentRequest[T]) -> None:
        try:
            answer = await self.call(request)
        except ShoalError:
            self._sent_at_s.pop(request, None)
            request.parts += self._slow.pop(request.contact, ())  # these would have been sent there too
            self.on_failed(request)
        else:
            self._sent_at_s.pop(request, None)
            self.on_answer(request, answer)
            if held_back := self._slow.pop(request.contact, ()):
                self._waiting.setdefault(request.contact, []).extend(held_back)
        self._dispatch()

    def _slow_s(self) -> float:
        return min(_MAX_SLOW_S, max(_MIN_SLOW_S, self._protocol.slow_s()))

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._slow_s() / 2, self._find_slow)

    def _find_slow(self) -> None:
        self._timer = None
        sent_before_s = self._loop.time() - self._slow_s()
        for request, sent_at_s in tuple(self._sent_at_s.items()):
            if sent_at_s > sent_before_s:
                break
            del self._sent_at_s[request]
            request.is_slow = True
            self._slow.setdefault(request.contact, [])
            self.on_slow(request)
            self._dispatch()
        if self._sent_at_s:
            self._watch()


class Search(Requests[Lookup, wire.Found]):
    """Several keys looked up together."""

    def __init__(self, protocol: DHTProtocol, parallel: int) -> None:
        super().__init__(protocol, "look-up")
        self._parallel = parallel

    def advance(self, part: Lookup) -> None:
        """Have a key ask whom it wants to; where there is nobody left to ask, it ends."""
        chosen = part.next_peers(self._parallel)
        if not chosen and part.waits_for_nobody:
            if part.is_doubtful:
                chosen = part.ask_witnesses(self._protocol.witnesses(part.number))
            if not chosen:
                part.is_done = True
                self.end_one()
        for contact in chosen:
            part.on_asked(contact)
            self._waiting.setdefault(contact, []).append(part)

    def take(self, contact: Contact, waiting: list[Lookup]) -> list[Lookup]:
        """As many keys as fit into a request, one alone whose value is large; none to a peer that is slow."""
        lookups = [lookup for lookup in waiting if not lookup.is_done]
        if self._protocol.is_backed_off(contact):
            self._go_on(lookups, Lookup.on_failed, contact)
            return []
        if contact in self._slow:
            self._slow[contact] += lookups
            self._go_on(lookups, Lookup.on_slow, contact)
            return []
        taken, rest = lookups[: wire.MAX_WANTS], lookups[wire.MAX_WANTS :]
        if (alone := next((lookup for lookup in lookups if lookup.is_alone), None)) is not None:
            taken, rest = [alone], [lookup for lookup in lookups if lookup is not alone]
        if rest:
            self._waiting[contact] = rest
        return taken

    async def call(self, request: SentRequest[Lookup]) -> wire.Found:
        """Ask a peer for keys."""
        wants = [lookup.want(request.contact) for lookup in request.parts]
        return await self._protocol.call_find(request.contact, wants)

    def on_answer(self, request: SentRequest[Lookup], answer: wire.Found) -> None:
        """Take in what a peer has and whom it tells of; what it is not believed was not said."""
        contact = request.contact
        contacts = self._protocol.read_contacts(answer.contacts, contact.peer.address)
        pairs = zip(request.parts, answer.findings, strict=True)
        for lookup, finding in [pair for pair in pairs if not pair[0].is_done]:
            lookup.on_answered(contact, finding, wire.named(contacts, finding.near))
            if finding.slots and not lookup.is_done and lookup.kind in (LookupKind.VALUE, LookupKind.LATEST):
                believed = self._protocol.believed(lookup.key, finding.slots)
                if believed:
                    lookup.on_value(contact, believed)
            if lookup.is_done:
                self.end_one()
            else:
                self.advance(lookup)

    def on_failed(self, request: SentRequest[Lookup]) -> None:
        """Leave the peer out."""
        self._go_on(request.parts, Lookup.on_failed, request.contact)

    def on_slow(self, request: SentRequest[Lookup]) -> None:
        """Ask others beside a peer that is slow."""
        self._go_on(request.parts, Lookup.on_slow, request.contact)

    def _go_on(
        self, lookups: Sequence[Lookup], note: Callable[[Lookup, Contact], None], contact: Contact
    ) -> None:
        """Have keys take note of a peer that fails or is slow, and ask others."""
        for lookup in lookups:
            if not lookup.is_done:
                note(lookup, contact)
                self.advance(lookup)


# --- before a key counts as missing ---


async def ask_failed_of_late(protocol: DHTProtocol, lookups: Sequence[Lookup]) -> None:
    """Ask those near keys that were not found that failed of late, and may be back.

    A machine that stood still for a moment takes the living for dead.
    """
    by_peer: dict[Contact, list[Lookup]] = {}
    for lookup in lookups:
        for contact in protocol.table.failed_near(lookup.number, protocol.settings.num_replicas):
            by_peer.setdefault(contact, []).append(lookup)

    async def ask(contact: Contact, some: Sequence[Lookup]) -> None:
        found = await protocol.call_find(contact, [wire.Want(lookup.key) for lookup in some])
        for lookup, finding in zip(some, found.findings, strict=True):
            if believed := protocol.believed(lookup.key, finding.slots):
                lookup.on_value(contact, believed)

    deadline = Deadline.after(_SECOND_CHANCE_S * protocol.settings.patience)
    await fanout(in_parts(by_peer, ask), deadline, limit=MAX_IN_FLIGHT)


def check_ended(lookups: Sequence[Lookup], *, is_client: bool) -> None:
    """Raise where nothing found does not mean that there is nothing."""
    unanswered = [lookup for lookup in lookups if not lookup.replicas and not lookup.answered()]
    if any(lookup.is_done and (lookup.has_silent or is_client) for lookup in unanswered):
        raise PeerUnreachable(
            "No peer of the DHT answers.",
            cause="this machine is offline, or the peers that it knew have left.",
            next_step="join by another address; shoal status --join HOST:PORT tells who is there.",
        )
    num_open = sum(not (lookup.is_done or lookup.replicas) for lookup in lookups)
    if num_open:
        raise DeadlineExceeded(
            f"{num_open} of {len(lookups)} look-ups had not ended before the deadline.",
            cause="too few of the peers near the keys answer, or the deadline is too early.",
            next_step="give more time, or raise `patience` in the DHT's settings.",
        )


# --- what look-ups leave behind ---


def cache_found(protocol: DHTProtocol, lookup: Lookup, slots: Sequence[Slot]) -> None:
    """Keep what was found here, and where the next one to look for it passes by."""
    protocol.records.cache.store(lookup.key, slots, protocol.wall_s())
    for contact in lookup.passed_by()[: protocol.settings.cache_nearest]:
        if sum(map(wire.size_of, slots)) <= wire.MAX_STORE_BYTES:
            items = [wire.Item(lookup.key, list(slots))]
            protocol.start_soon(protocol.call_store(contact, items, is_pushed=True), "dht caching")


def mark_absent(protocol: DHTProtocol, lookups: Sequence[Lookup]) -> None:
    """Tell the peers nearest to keys under which there is nothing, unless they know."""
    by_peer: dict[Contact, list[bytes]] = {}
    for lookup in lookups:
        if lookup.is_done and not lookup.has_marker:
            for _, contact in lookup.near[:_MARKED_AT]:
                by_peer.setdefault(contact, []).append(lookup.key)
    for work in in_parts(by_peer, protocol.call_mark_absent):
        protocol.start_soon(work, "dht absence")


def in_parts(by_peer: dict[Contact, list[T]], call: Callable[[Contact, list[T]], U]) -> list[U]:
    """Calls to peers, with as many keys in each as fit into a request."""
    return [
        call(contact, some[start : start + wire.MAX_WANTS])
        for contact, some in by_peer.items()
        for start in range(0, len(some), wire.MAX_WANTS)
    ]
