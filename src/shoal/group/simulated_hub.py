"""What the members of a simulated group share: who is there, what is under way, and when it is over.

An operation that several take part in is a `Gathering`: each member arrives with what it brings, and is
through at a time that follows from when those that it needs have arrived and what lies between them. Values
are copied on arrival, as if they had been sent then. What travels one way is `Mail`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from shoal.core import Address, Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group.base import Handle, Loss
from shoal.group.simulated_times import Links, Ring
from shoal.transport import Conditions

T = TypeVar("T")

NOTICED_AFTER_S = 0.02
"""A process that has ended is missed so much later: what its machine says when its sockets close."""


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
