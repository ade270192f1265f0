"""A tape in virtual time, one message after another: in the order in which the exact executor sends them.

For links that queue, or draw a delay of their own for each message. Workers take turns as threads do in
`core.turns`: whose time comes first, and of equal times the lower rank. The hops of a ring are calls, which
come before both.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core import Address
from shoal.group.simulated import CallAt, Links, Over, RingAllReduce
from shoal.simulate import stacked_tape
from shoal.simulate.stacked_tape import Backward, Exchange, Forward, Issue, Mark, Tape, Wait
from shoal.simulate.world import StepCosts, World
from shoal.transport import Conditions
from shoal.transport.network.pipes import Passage

Seconds: TypeAlias = npt.NDArray[np.float64]
_CALL = -1


def replay(tape: Tape, world: World, addresses: list[Address]) -> tuple[Seconds, Seconds]:
    """When each worker comes to each mark, and how long it has waited for whom since the first."""
    links = Links(Conditions(world.profile, seed=world.seed), addresses)
    stage = _Stage(tape, world, links)
    stage.run()
    return stage.marks_s, stage.waited_s


class _Meeting:
    """One operation under way; `known` is told for whom its end is known, and when that is."""

    def __init__(
        self, links: Links, operation: Exchange | stacked_tape.Ring, call_at: CallAt, known: Over
    ) -> None:
        self.due_s: dict[int, float] = {}
        """Of those whose end is known."""
        self.blamed: dict[int, tuple[int, float]] = {}
        self._links = links
        self._operation = operation
        self._known = known
        self._ring: RingAllReduce | None = None
        if isinstance(operation, stacked_tape.Ring):
            self._ring = RingAllReduce(
                links, call_at, range(operation.size), operation.size_bytes, self._over
            )
        self._arrived_s: dict[int, float] = {}
        self._places: dict[int, int] = {}
        """In the order of arrival."""
        self._passages: dict[int, dict[int, Passage]] = {}
        self._num_missing: dict[int, int] = {}

    def arrive(self, rank: int, now_s: float) -> None:
        """One more is there."""
        self._places[rank] = len(self._places)
        self._arrived_s[rank] = now_s
        if isinstance(self._operation, Exchange):
            self._exchange(self._operation, rank, now_s)
        elif self._ring is not None:
            if len(self._arrived_s) == self._operation.size:
                self.blamed = dict.fromkeys(self._arrived_s, self._last_of(self._arrived_s))
            self._ring.begin(rank, now_s)

    def _over(self, rank: int, at_s: float) -> None:
        self.due_s[rank] = at_s
        self._known(rank, at_s)

    def _exchange(self, operation: Exchange, rank: int, now_s: float) -> None:
        edges, arrived_s = operation.edges, self._arrived_s
        size_bytes = int(operation.size_bytes[rank])
        self._passages[rank] = {
            target: self._links.carry(rank, target, now_s, size_bytes) for target in edges.targets[rank]
        }
        ready = []
        for receiver in edges.needed_by[rank]:
            if receiver in self._num_missing:
                self._num_missing[receiver] -= 1
                if not self._num_missing[receiver]:
                    ready.append(receiver)
        self._num_missing[rank] = sum(source not in arrived_s for source in edges.sources[rank])
        ready.sort(key=self._places.__getitem__)
        if not self._num_missing[rank]:
            ready.append(rank)
        for each in ready:
            self._finish(operation, each)

    def _finish(self, operation: Exchange, rank: int) -> None:
        sources = operation.edges.sources[rank]
        own_s = [passage.left_at_s for passage in self._passages[rank].values()]
        comes_s = [self._comes_s(operation, source, rank) for source in sources]
        if sources:
            self.blamed[rank] = self._last_of(self._arrived_s if operation.is_for_all else sources)
        self._over(rank, max(self._arrived_s[rank], *own_s, *comes_s, 0.0))

    def _comes_s(self, operation: Exchange, source: int, rank: int) -> float:
        """One that its source did not reckon with is sent to after the others."""
        passages = self._passages[source]
        if rank not in passages:
            size_bytes = int(operation.size_bytes[source])
            passages[rank] = self._links.carry(source, rank, self._arrived_s[source], size_bytes)
        return passages[rank].arrives_at_s

    def _last_of(self, ranks: Iterable[int]) -> tuple[int, float]:
        last = max(ranks, key=self._arrived_s.__getitem__)
        return last, self._arrived_s[last]


class _Stage:
    """All workers, each at its own place of the tape."""

    def __init__(self, tape: Tape, world: World, links: Links) -> None:
        size = world.num_workers
        self.marks_s = np.zeros((len(tape.marked_bytes), size))
        self.waited_s = np.zeros((size, size))
        self._tape = tape
        self._links = links
        self._forward_share = world.compute.forward_share
        self._costs = [StepCosts(world, rank) for rank in range(size)]
        self._meetings: dict[int, _Meeting] = {}
        self._num_through: dict[int, int] = {}
        self._num_entries = 0
        self._queue: list[tuple[float, int, int, Callable[[], None] | None]] = []
        for rank in range(size):
            self._push(0.0, rank)
        self._places = [0] * size
        self._num_marks = [0] * size
        self._spent_s = [0.0] * size
        """Since it has had the turn."""
        self._rest_s = [0.0] * size
        self._parked: list[int | None] = [None] * size
        """The operation whose end is not known that it waits for."""
        self._began_s: list[float | None] = [None] * size
        """When it began to wait."""

    def run(self) -> None:
        """To the end of the tape."""
        while self._queue:
            now_s, rank, _, call = heapq.heappop(self._queue)
            if call is not None:
                call()
                continue
            while self._act(rank, now_s):
                self._places[rank] += 1

    def _push(self, at_s: float, rank: int, call: Callable[[], None] | None = None) -> None:
        self._num_entries += 1
        heapq.heappush(self._queue, (at_s, rank, self._num_entries, call))

    def _call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self._push(at_s, _CALL, call)

    def _act(self, rank: int, now_s: float) -> bool:
        """Do what comes next; False when it comes later, or there is nothing more."""
        if self._places[rank] == len(self._tape.events):
            return False
        match self._tape.events[self._places[rank]]:
            case Forward():
                step_s = self._costs[rank].next_s()
                self._rest_s[rank] = (1 - self._forward_share) * step_s
                self._spent_s[rank] += self._forward_share * step_s
            case Backward(share):
                self._spent_s[rank] += self._rest_s[rank] * share
            case Mark():
                self._mark(rank, now_s + self._spent_s[rank])
            case Issue(number):
                if self._looks_up(rank, now_s):
                    return False
                self._issue(rank, number, now_s)
            case Wait(number):
                return not self._looks_up(rank, now_s) and self._wait(rank, number, now_s)
        return True

    def _looks_up(self, rank: int, now_s: float) -> bool:
        """Whether others come first, until this one's own time."""
        spent_s, self._spent_s[rank] = self._spent_s[rank], 0.0
        if spent_s > 0:
            self._push(now_s + spent_s, rank)
        return spent_s > 0

    def _mark(self, rank: int, now_s: float) -> None:
        if not self._num_marks[rank]:
            self.waited_s[rank] = 0.0
        self.marks_s[self._num_marks[rank], rank] = now_s
        self._num_marks[rank] += 1

    def _issue(self, rank: int, number: int, now_s: float) -> None:
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = _Meeting(
                self._links, self._tape.operations[number], self._call_at, partial(self._known, number)
            )
            self._meetings[number] = meeting
        meeting.arrive(rank, now_s)

    def _known(self, number: int, rank: int, at_s: float) -> None:
        if self._parked[rank] == number:
            self._parked[rank] = None
            self._push(at_s, rank)

    def _wait(self, rank: int, number: int, now_s: float) -> bool:
        meeting = self._meetings[number]
        began_s = self._began_s[rank]
        if began_s is None:
            began_s = self._began_s[rank] = now_s
        due_s = meeting.due_s.get(rank)
        if due_s is None:
            self._parked[rank] = number
            return False
        if due_s > now_s:
            self._push(due_s, rank)
            return False
        self._began_s[rank] = None
        blamed, came_s = meeting.blamed.get(rank, (rank, began_s))
        self.waited_s[rank, blamed] += max(0.0, came_s - began_s)
        self._num_through[number] = self._num_through.get(number, 0) + 1
        if self._num_through[number] == len(self._costs):
            del self._meetings[number], self._num_through[number]
        return True
