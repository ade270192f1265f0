"""What the members of a simulated group share: who is there, what is under way, and when it is over.

When what is sent over a profile's links arrives, and when a ring has reduced, are times alone, no bytes
(`Links`, `Ring`): both executors of a simulated world ask here, so that they agree.

An operation that several take part in is a `Gathering`: each member arrives with what it brings, and is
through at a time that follows from when those that it needs have arrived and what lies between them. Values
are copied on arrival, as if they had been sent then.

What a member publishes others get by a request there and a copy back. A mutex is asked for at its owner, and
granted to one after another.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from shoal.core import Address, Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group.base import Done, Handle, Loss, Snapshot
from shoal.group.kernels import CopiedSnapshot, copy_out
from shoal.transport import Conditions
from shoal.transport.networks.pipes import Link, Passage

T = TypeVar("T")
CallAt: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Has something called at a time, in the order of times and, of equal ones, of being asked."""
Over: TypeAlias = Callable[[int, float], None]
"""Is told of a rank, and of a time."""
NOTICED_AFTER_S = 0.02
"""A process that has ended is missed so much later: what its machine says when its sockets close."""
Received = Callable[[int], None]
"""Is told how many bytes have come."""


class Links:
    """Between members that are known by their ranks; two of one address reach each other at once.

    What one member sends to another comes in the order in which it was sent, as in a stream.
    """

    def __init__(self, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self._conditions = conditions
        self._addresses = list(addresses)
        self._links: dict[tuple[int, int], Link | None] = {}
        self._last_s: dict[tuple[int, int], float] = {}

    def carry(self, source: int, target: int, now_s: float, size_bytes: int) -> Passage:
        """When it has left the source, and when it arrives."""
        ends = source, target
        if ends not in self._links:
            here, there = self._addresses[source], self._addresses[target]
            self._links[ends] = None if here == there else self._conditions.link(here, there)
        link = self._links[ends]
        if link is None:
            return Passage(now_s, now_s)
        left_s, arrives_s, _ = link.carry_stream(now_s, size_bytes)
        self._last_s[ends] = arrives_s = max(arrives_s, self._last_s.get(ends, 0.0))
        return Passage(left_s, arrives_s)


class Ring:
    """An all-reduce on its way: 2(n − 1) hops of one part in n each, from each member to the next.

    A member sends its first hop when it begins, and the following when it has sent the one before and the
    other's has come: at that time, so that whatever else is sent over the same links finds its place between.
    `over` is told when each has the whole sum, as soon as that is known.
    """

    def __init__(
        self, links: Links, call_at: CallAt, ranks: Sequence[int], size_bytes: int, over: Over
    ) -> None:
        self.ranks = tuple(ranks)
        self._links = links
        self._call_at = call_at
        self._over = over
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._num_hops = 2 * (len(ranks) - 1)
        self._hop_bytes = size_bytes // max(1, len(ranks))
        self._num_sent = [0] * len(ranks)
        self._left_s = [0.0] * len(ranks)
        self._comes_s: list[list[float]] = [[] for _ in ranks]
        """Of each member, when each of the hops comes that were sent to it."""

    def begin(self, rank: int, now_s: float) -> None:
        """One member is there; once is enough."""
        place = self._places[rank]
        if not self._num_hops:
            self._over(rank, now_s)
        elif not self._num_sent[place]:
            self._send(place, now_s)

    def _send(self, place: int, now_s: float) -> None:
        following = (place + 1) % len(self.ranks)
        ends = self.ranks[place], self.ranks[following]
        self._left_s[place], arrives_s, _ = self._links.carry(*ends, now_s, self._hop_bytes)
        self._num_sent[place] += 1
        coming = self._comes_s[following]
        coming.append(arrives_s)
        if len(coming) == self._num_sent[following]:
            self._go_on(following)
        if len(self._comes_s[place]) >= self._num_sent[place]:
            self._go_on(place)

    def _go_on(self, place: int) -> None:
        """It is known when a hop is over."""
        num_sent = self._num_sent[place]
        at_s = max(self._left_s[place], self._comes_s[place][num_sent - 1])
        if num_sent == self._num_hops:
            self._over(self.ranks[place], at_s)
        else:
            self._call_at(at_s, partial(self._send, place, at_s))


class Pending(Handle[T]):
    """Under way until `resolve`; `take` makes the result when it is first asked for after that."""

    def __init__(self, hub: Hub, rank: int, what: str) -> None:
        self._hub = hub
        self._rank = rank
        self._what = what
        self._due_s = math.inf
        self._take: Callable[[], T] | None = None
        self._result: list[T] = []
        self._error: ShoalError | None = None
        self._waiter: Turn | None = None
        self._until_s = math.inf
        self._is_announced = False
        """Whether its end is something that happens, for one that only looks."""
        self._blamed: tuple[int, float] | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether its end is known."""
        return self._take is not None

    @property
    def is_taken(self) -> bool:
        """Whether somebody has the result, or the error."""
        return bool(self._result) or self._error is not None

    def resolve(self, due_s: float, take: Callable[[], T], blamed: tuple[int, float] | None = None) -> None:
        """It is over at `due_s`; `blamed` is who came last, and when."""
        if self._take is None:
            self._due_s, self._take, self._blamed = due_s, take, blamed
            if self._waiter is not None:
                self._waiter.wake(min(due_s, self._until_s))

    def wait(self, deadline: Deadline | None = None) -> T:
        """In virtual time."""
        if self._result:
            return self._result[0]
        if self._error is not None:
            raise self._error
        turn = self._hub.turns.current
        turn.look_up()
        began_s = turn.now_s
        until_s = math.inf if deadline is None else began_s + deadline.remaining_s
        self._waiter, self._until_s = turn, until_s
        try:
            while (self._take is None or self._due_s > turn.now_s) and turn.now_s < until_s:
                turn.park(self._what, min(self._due_s, until_s))
        finally:
            self._waiter = None
        if self._take is None or self._due_s > turn.now_s:
            raise DeadlineExceeded(f"{self._what} on rank {self._rank}: the deadline has passed.")
        if self._blamed is not None:
            blamed, came_s = self._blamed
            if came_s > began_s:
                self._hub.waited_s[self._rank][blamed] += came_s - began_s
            self._blamed = None
        return self._finish(self._take)

    def is_done(self) -> bool:
        """At this worker's own time."""
        return self.is_taken or self._hub.turns.current.poll(self._is_due, self._what)

    def _is_due(self) -> bool:
        if self._take is None:
            return False
        turns = self._hub.turns
        is_due = self._due_s <= turns.now_s
        if not is_due and not self._is_announced:
            self._is_announced = True
            turns.call_at(self._due_s, _nothing)
        return is_due

    def _finish(self, take: Callable[[], T]) -> T:
        try:
            self._result.append(take())
        except ShoalError as error:
            self._error = error
            raise
        return self._result[0]


class Gathering(Generic[T]):
    """One operation of all members, by its number; `kind` says what each must have called."""

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self._number = number
        self.ring: Ring | None = None
        self.waiting: dict[int, Callable[[float], None]] = {}
        """Of a ring: who is told when it is over for a rank."""
        self.result: Any = None
        self.arrived_s: dict[int, float] = {}
        self.brought: dict[int, Any] = {}
        self._kinds: dict[int, str] = {}
        self._is_mixed = False
        self._attempts: dict[int, Callable[[], bool]] = {}
        self._missing: dict[int, dict[int, None]] = {}
        self._awaiting: dict[int, list[int]] = {}
        """By who is awaited."""

    def arrive(self, rank: int, kind: str, brought: Any) -> None:
        """One member is there."""
        self._is_mixed = self._is_mixed or next(iter(self._kinds.values()), kind) != kind
        self._kinds[rank] = kind
        self.arrived_s[rank] = self._hub.turns.now_s
        self.brought[rank] = brought

    def last_of(self, ranks: Iterable[int]) -> tuple[int, float] | None:
        """Who of them has arrived last, and when."""
        return max(((rank, self.arrived_s[rank]) for rank in ranks), key=lambda each: each[1], default=None)

    def mismatch(self) -> UsageError | None:
        """Why members cannot go on: they have called different things."""
        if not self._is_mixed:
            return None
        kinds = dict(sorted(self._kinds.items()))
        first = next(iter(kinds))
        other = next(rank for rank, kind in kinds.items() if kind != kinds[first])
        return UsageError(
            f"Operation {self._number}: rank {first} has called {kinds[first]}, rank {other} {kinds[other]}.",
            next_step="issue the same operations in the same order on all members.",
        )

    def settle(self, rank: int, needs: Iterable[int], attempt: Callable[[], bool]) -> None:
        """Try `attempt` when those that `rank` needs have arrived, and when somebody goes, until it is true.

        Those that have waited for `rank` are tried too.
        """
        present = self._hub.present
        missing = {each: None for each in needs if each not in self.arrived_s and each in present}
        self._attempts[rank], self._missing[rank] = attempt, missing
        for each in missing:
            self._awaiting.setdefault(each, []).append(rank)
        if self._is_mixed:
            self.look()
            return
        for waiting in self._awaiting.pop(rank, ()):
            self._missing[waiting].pop(rank, None)
            if not self._missing[waiting]:
                self._try(waiting)
        if not missing:
            self._try(rank)
        self._forget()

    def look(self) -> None:
        """Somebody is gone, or has called something else: try all that wait."""
        for missing in self._missing.values():
            for rank in [each for each in missing if each not in self._hub.present]:
                del missing[rank]
        for rank in list(self._attempts):
            self._try(rank)
        self._forget()

    def _try(self, rank: int) -> None:
        if rank in self._attempts and self._attempts[rank]():
            del self._attempts[rank]

    def _forget(self) -> None:
        if not self._attempts and all(rank in self.arrived_s for rank in self._hub.present):
            self._hub.gatherings.pop(self._number, None)


class Hub:
    """Of one group; `addresses` are what a profile calls its members."""

    def __init__(self, turns: Turns, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self.turns = turns
        self.links = Links(conditions, addresses)
        self.size = len(addresses)
        self.present = list(range(self.size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * self.size for _ in range(self.size)]
        self.gatherings: dict[int, Gathering[Any]] = {}
        self.published: dict[tuple[int, str], Any] = {}
        self.windows: dict[tuple[int, str], Any] = {}
        self.mutexes: dict[tuple[int, str], Any] = {}
        self._numbers = [0] * self.size
        self._watchers: list[Callable[[], None]] = []

    def next_gathering(self, rank: int) -> Gathering[Any]:
        """The one that this member comes to next."""
        number = self._numbers[rank]
        self._numbers[rank] += 1
        return self.gatherings.setdefault(number, Gathering(self, number))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have it called whenever somebody is gone."""
        self._watchers.append(callback)

    def leave(self, rank: int) -> None:
        """In order."""
        self._gone(rank)

    def lose(self, rank: int, reason: str, at_s: float) -> None:
        """It ends at a time, and the others notice a moment later."""

        def notice() -> None:
            if rank in self.present:
                self.lost[rank] = Loss(rank, reason)
                self._gone(rank)

        self.turns.call_at(at_s + NOTICED_AFTER_S, notice)

    def _gone(self, rank: int) -> None:
        if rank not in self.present:
            return
        self.present = [each for each in self.present if each != rank]
        for gathering in list(self.gatherings.values()):
            gathering.look()
        for callback in list(self._watchers):
            callback()

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[float], None]) -> None:
        """Carry something from now on; `deliver` is called when it arrives."""
        now_s = self.turns.now_s
        arrives_s = (
            now_s if source == target else self.links.carry(source, target, now_s, size_bytes).arrives_at_s
        )
        self.turns.call_at(arrives_s, lambda: deliver(arrives_s))


def _nothing() -> None:
    pass


def raising(error: ShoalError) -> Callable[[], Any]:
    """For `Pending.resolve`: the result is an error."""

    def take() -> Any:
        raise error

    return take


class Publication:
    """What one member has under one name."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensor: torch.Tensor | None = None
        self._version = -1
        self._is_changing = False
        self._waiting: list[Callable[[], bool]] = []

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """A newer one takes the place of the one before."""
        self._tensor, self._version = tensor.detach(), version
        self.look()

    def reclaim(self, name: str, version: int) -> None:
        """UsageError for the newest."""
        if self._tensor is not None and self._version <= version:
            raise UsageError(
                f"Version {version} of {name!r} is the newest that is published, and cannot be reclaimed.",
                next_step="publish a newer version first.",
            )

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """What is published is of that version when the block has ended well."""
        if self._tensor is None:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        if version < self._version:
            raise UsageError(
                f"{name!r} is of version {self._version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._is_changing = True
        yield
        self._is_changing = False
        self._version = version
        self.look()

    def snapshot(self, least_version: int = 0) -> CopiedSnapshot | None:
        """A copy; None where there is none of that version, or it is being changed."""
        if self._tensor is None or self._is_changing or self._version < least_version:
            return None
        return CopiedSnapshot(self._rank, self._version, self._tensor.clone())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever published."""
        return self._tensor is None

    def when(self, attempt: Callable[[], bool]) -> None:
        """Try now, and whenever it has changed, until it is true."""
        if not attempt():
            self._waiting.append(attempt)

    def look(self) -> None:
        """It has changed, or its member is gone."""
        self._waiting = [attempt for attempt in self._waiting if not attempt()]


def publication(hub: Hub, rank: int, name: str) -> Publication:
    """The one of this member and name."""
    key = rank, name
    if key not in hub.published:
        made = hub.published[key] = Publication(rank)
        hub.on_change(made.look)
    found: Publication = hub.published[key]
    return found


def fetch(hub: Hub, rank: int, peer: int, name: str, received: Received) -> Handle[Snapshot | None]:
    """What is there when the request comes, back over the link."""
    hub.turns.current.look_up()
    found = publication(hub, peer, name)
    if peer == rank:
        return Done(found.snapshot())
    handle: Pending[Snapshot | None] = Pending(hub, rank, f"fetch {name!r} of rank {peer}")

    def arrived(now_s: float) -> None:
        snapshot = found.snapshot() if peer in hub.present else None
        size_bytes = 0 if snapshot is None else snapshot.tensor.nbytes
        back_s = hub.links.carry(peer, rank, now_s, size_bytes).arrives_at_s

        def take() -> Snapshot | None:
            received(size_bytes)
            return snapshot

        handle.resolve(back_s, take)

    hub.send(rank, peer, 0, arrived)
    return handle


def read(
    hub: Hub, rank: int, peer: int, wanted: tuple[str, int, torch.Tensor], received: Received
) -> Handle[int | None]:
    """As `fetch`, once the version is there, into a tensor."""
    name, version, into = wanted
    hub.turns.current.look_up()
    found = publication(hub, peer, name)
    handle: Pending[int | None] = Pending(hub, rank, f"read {name!r} of rank {peer}")

    def attempt() -> bool:
        now_s = hub.turns.now_s
        is_none = peer not in hub.present or (found.is_empty and version == 0)
        snapshot = None if is_none else found.snapshot(version)
        if is_none:
            handle.resolve(now_s, lambda: None)
        elif snapshot is not None:
            size_bytes = 0 if peer == rank else snapshot.tensor.nbytes
            back_s = now_s if peer == rank else hub.links.carry(peer, rank, now_s, size_bytes).arrives_at_s

            def take() -> int:
                received(size_bytes)
                return copy_out(snapshot, into, name)

            handle.resolve(back_s, take)
        return handle.is_resolved

    if peer == rank:
        found.when(attempt)
    else:
        hub.send(rank, peer, 0, lambda _: found.when(attempt))
    return handle


class _Mutex:
    """At its owner."""

    def __init__(self, hub: Hub, owner: int) -> None:
        self._hub = hub
        self._owner = owner
        self.holder: int | None = None
        """As its owner knows: a little longer than the block lasts."""
        self.inside: int | None = None
        self._queue: list[tuple[int, Pending[None]]] = []
        hub.on_change(self._look)

    def ask(self, rank: int, handle: Pending[None]) -> None:
        """A request has come."""
        self._queue.append((rank, handle))
        self._look()

    def give_back(self, rank: int) -> None:
        """The holder has told that it is done."""
        if self.holder == rank:
            self.holder = None
        self._look()

    def _look(self) -> None:
        hub = self._hub
        if self._owner not in hub.present:
            loss = hub.lost.get(self._owner, Loss(self._owner, "it has left the group"))
            for _, handle in self._queue:
                handle.resolve(hub.turns.now_s, raising(loss.error()))
            self._queue.clear()
            return
        if self.holder is not None and self.holder not in hub.present:
            self.holder = None
        self._queue = [each for each in self._queue if each[0] in hub.present]
        if self.holder is None and self._queue:
            self.holder, handle = self._queue.pop(0)
            now_s = hub.turns.now_s
            if self.holder != self._owner:
                now_s = hub.links.carry(self._owner, self.holder, now_s, 0).arrives_at_s
            handle.resolve(now_s, lambda: None)


@contextlib.contextmanager
def hold(hub: Hub, rank: int, owner: int, name: str) -> Iterator[None]:
    """Have it for as long as the block lasts."""
    hub.turns.current.look_up()
    if (owner, name) not in hub.mutexes:
        hub.mutexes[owner, name] = _Mutex(hub, owner)
    mutex: _Mutex = hub.mutexes[owner, name]
    if mutex.inside == rank:
        raise UsageError(
            f"rank {rank} waits for mutex {name!r} of rank {owner}, which it holds itself.",
            next_step="end the first `with` block before the second begins.",
        )
    handle: Pending[None] = Pending(hub, rank, f"mutex {name!r} of rank {owner}")
    hub.send(rank, owner, 0, lambda _: mutex.ask(rank, handle))
    handle.wait()
    mutex.inside = rank
    try:
        yield
    finally:
        mutex.inside = None
        hub.turns.current.look_up()
        hub.send(rank, owner, 0, lambda _: mutex.give_back(rank))
