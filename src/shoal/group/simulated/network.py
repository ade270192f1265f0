"""What the members of a simulated group share: who is there, what is under way, and when it is over.

When what is sent over a profile's links arrives, and when a ring has reduced, are times alone, no bytes
(`Links`, `Ring`): both executors of a simulated world ask here, so that they agree.

An operation that several take part in is a `Collective`: each member arrives with what it brings, and is
through at a time that follows from when those that it needs have arrived and what lies between them. Values
are copied on arrival, as if they had been sent then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

from shoal.core import Address, Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group.base import Handle, Loss
from shoal.group.solo import Publication
from shoal.transport import Conditions
from shoal.transport.networks.pipes import Link, Passage

T = TypeVar("T")
CallAt: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Has something called at a time, in the order of times and, of equal ones, of being asked."""
Over: TypeAlias = Callable[[int, float], None]
"""Is told of a rank, and of a time."""
NOTICED_AFTER_S = 0.02
"""A process that has ended is missed so much later: what its machine says when its sockets close."""


class Links:
    """The links between members, by rank; two members of one address reach each other at once.

    What one member sends to another comes in the order in which it was sent, as in a stream.
    """

    def __init__(self, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self._conditions = conditions
        self._addresses = list(addresses)
        self._links: dict[tuple[int, int], Link | None] = {}
        self._last_s: dict[tuple[int, int], float] = {}

    def carry(self, source: int, target: int, now_s: float, size_bytes: int) -> Passage:
        """Tells when so many bytes have left the source, and when they arrive."""
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
        """Tells that one member is there; once is enough."""
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
        """Sends a member's next hop when the one before is over, whose end is known now."""
        num_sent = self._num_sent[place]
        at_s = max(self._left_s[place], self._comes_s[place][num_sent - 1])
        if num_sent == self._num_hops:
            self._over(self.ranks[place], at_s)
        else:
            self._call_at(at_s, partial(self._send, place, at_s))


class SimulatedNetwork:
    """The members of one group and the links between them; `addresses` are what a profile calls them."""

    def __init__(self, turns: Turns, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self.turns = turns
        self.links = Links(conditions, addresses)
        self.size = len(addresses)
        self.present = list(range(self.size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * self.size for _ in range(self.size)]
        self.windows: dict[tuple[int, str], Any] = {}
        self._collectives: dict[int, Collective] = {}
        self._published: dict[tuple[int, str], Publication] = {}
        self._numbers = [0] * self.size
        self._watchers: list[Callable[[], None]] = []

    def next_collective(self, rank: int) -> Collective:
        """Finds the operation that this member comes to next."""
        number = self._numbers[rank]
        self._numbers[rank] += 1
        return self._collectives.setdefault(number, Collective(self, number))

    def forget(self, number: int) -> None:
        """Lets go of an operation to which nobody comes any more."""
        self._collectives.pop(number, None)

    def publication(self, rank: int, name: str) -> Publication:
        """Finds what a member publishes under a name, or will."""
        key = rank, name
        if key not in self._published:
            self._published[key] = Publication(rank, name)
            self.on_change(self._published[key].look)
        return self._published[key]

    def on_change(self, callback: Callable[[], None]) -> None:
        """Has it called whenever somebody is gone."""
        self._watchers.append(callback)

    def leave(self, rank: int) -> None:
        """Has a member be gone from now on."""
        if rank not in self.present:
            return
        self.present = [each for each in self.present if each != rank]
        for collective in list(self._collectives.values()):
            collective.look()
        for callback in list(self._watchers):
            callback()

    def lose(self, loss: Loss) -> None:
        """Has the others notice a loss at its time, unless that member is gone by then."""

        def notice() -> None:
            if loss.rank in self.present:
                self.lost[loss.rank] = loss
                self.leave(loss.rank)

        self.turns.call_at(loss.at_s, notice)

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[float], None]) -> None:
        """Carries something from now on; `deliver` is called when it arrives, with that time."""
        arrives_s = self.arrives_s(source, target, size_bytes)
        self.turns.call_at(arrives_s, lambda: deliver(arrives_s))

    def arrives_s(self, source: int, target: int, size_bytes: int) -> float:
        """Sends something now, and tells when it arrives."""
        now_s = self.turns.now_s
        return now_s if source == target else self.links.carry(source, target, now_s, size_bytes).arrives_at_s


class PendingOperation(Handle[T]):
    """Is under way until `resolve`; `take` makes the result when it is first asked for after that."""

    def __init__(self, network: SimulatedNetwork, rank: int, what: str) -> None:
        self._network = network
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
        """Has it be over at `due_s`; `blamed` is who came last, and when."""
        if self._take is None:
            self._due_s, self._take, self._blamed = due_s, take, blamed
            if self._waiter is not None:
                self._waiter.wake(min(due_s, self._until_s))

    def fail(self, error: ShoalError) -> None:
        """Has it be over now, with an error for a result."""

        def take() -> NoReturn:
            raise error

        self.resolve(self._network.turns.now_s, take)

    def wait(self, deadline: Deadline | None = None) -> T:
        """Waits in virtual time."""
        if self._result:
            return self._result[0]
        if self._error is not None:
            raise self._error
        turn = self._network.turns.current
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
                self._network.waited_s[self._rank][blamed] += came_s - began_s
            self._blamed = None
        try:
            self._result.append(self._take())
        except ShoalError as error:
            self._error = error
            raise
        return self._result[0]

    def is_done(self) -> bool:
        """Looks at this worker's own time."""
        return self.is_taken or self._network.turns.current.poll(self._is_due, self._what)

    def _is_due(self) -> bool:
        if self._take is None:
            return False
        turns = self._network.turns
        is_due = self._due_s <= turns.now_s
        if not is_due and not self._is_announced:
            self._is_announced = True
            turns.call_at(self._due_s, lambda: None)
        return is_due


class Collective:
    """One operation of all members, by its number; each says what it has called."""

    def __init__(self, network: SimulatedNetwork, number: int) -> None:
        self._network = network
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
        """Notes that one member is there, with what it brings."""
        self._is_mixed = self._is_mixed or next(iter(self._kinds.values()), kind) != kind
        self._kinds[rank] = kind
        self.arrived_s[rank] = self._network.turns.now_s
        self.brought[rank] = brought

    def last_of(self, ranks: Iterable[int]) -> tuple[int, float] | None:
        """Finds who of them has arrived last, and when."""
        return max(((rank, self.arrived_s[rank]) for rank in ranks), key=lambda each: each[1], default=None)

    def mismatch(self) -> UsageError | None:
        """Says why members cannot go on: they have called different things."""
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
        """Tries `attempt` when those that `rank` needs have arrived, or somebody goes, until it is true.

        Those that have waited for `rank` are tried too.
        """
        present = self._network.present
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
        """Tries all that wait: somebody is gone, or has called something else."""
        for missing in self._missing.values():
            for rank in [each for each in missing if each not in self._network.present]:
                del missing[rank]
        for rank in list(self._attempts):
            self._try(rank)
        self._forget()

    def _try(self, rank: int) -> None:
        if rank in self._attempts and self._attempts[rank]():
            del self._attempts[rank]

    def _forget(self) -> None:
        if not self._attempts and all(rank in self.arrived_s for rank in self._network.present):
            self._network.forget(self._number)
