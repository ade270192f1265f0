"""When each worker comes to each mark of a tape, and for whom it has waited.

Links are those of the exact executor, asked by the same functions and in the same order (`stacked_replay`).
Where each link always takes the same time, and nothing queues, order does not matter, and all workers take
each event at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core import Address
from shoal.simulate.stacked_mixing import Edges
from shoal.simulate.stacked_replay import replay
from shoal.simulate.stacked_tape import Backward, Exchange, Forward, Issue, Mark, Operation, Ring, Tape, Wait
from shoal.simulate.world import StepCosts, World
from shoal.transport import Profile
from shoal.transport.network.profiles import Way

Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Times:
    """The virtual times of all workers, as one vector."""

    marks_s: Seconds
    """By mark and rank."""
    waited_s: Seconds
    """By rank and by the one that it waited for, since the first mark."""


def times_of(tape: Tape, world: World, addresses: list[Address], *, can_sweep: bool = True) -> Times:
    """Of a world without faults; without `can_sweep` always one link after another."""
    if can_sweep and _is_constant(world.profile):
        return _Sweep(world, addresses).run(tape)
    return Times(*replay(tape, world, addresses))


def _is_constant(profile: Profile) -> bool:
    """Whether every link always takes one time for any number of bytes."""
    ways = [profile.ways.default, *profile.ways.between]
    lines = profile.places.values()
    return all(_takes_one_time(way) for way in ways) and not any(
        place.up_mbit_s or place.down_mbit_s for place in lines
    )


def _takes_one_time(way: Way) -> bool:
    is_number = way.delay_ms is None or isinstance(way.delay_ms, int | float)
    return is_number and not (way.jitter_ms or way.loss or way.mbit_s)


@dataclass(frozen=True, slots=True)
class _Over:
    """When each worker is through with an operation, and who has come last of those that it needed."""

    due_s: Seconds
    blamed: npt.NDArray[np.int64]
    """Oneself for nobody."""
    came_s: Seconds


class _Sweep:
    """All workers at once, event after event."""

    def __init__(self, world: World, addresses: list[Address]) -> None:
        self._profile = world.profile
        self._addresses = addresses
        self._forward_share = world.compute.forward_share
        self._costs = [StepCosts(world, rank) for rank in range(world.num_workers)]
        self._size = world.num_workers
        self._has_one_way = not world.profile.ways.between and world.between == "workers"
        self._default_s = self._delay_s(*addresses[:1], *addresses[-1:])
        self._delays_s: dict[Edges, Seconds] = {}
        self._ring = Edges(
            [[(rank - 1) % self._size] for rank in range(self._size)],
            [[(rank + 1) % self._size] for rank in range(self._size)],
        )

    def run(self, tape: Tape) -> Times:
        """To the end of the tape."""
        now_s = np.zeros(self._size)
        rest_s = np.zeros(self._size)
        waited_s = np.zeros((self._size, self._size))
        ranks = np.arange(self._size)
        marks_s: list[Seconds] = []
        under_way: dict[int, _Over] = {}
        for event in tape.events:
            match event:
                case Forward():
                    step_s = np.array([costs.next_s() for costs in self._costs])
                    rest_s = (1 - self._forward_share) * step_s
                    now_s = now_s + self._forward_share * step_s
                case Backward(share):
                    now_s = now_s + rest_s * share
                case Issue(number):
                    under_way[number] = self._begun(tape.operations[number], now_s)
                case Wait(number):
                    over = under_way.pop(number)
                    waited_s[ranks, over.blamed] += np.maximum(over.came_s - now_s, 0.0)
                    now_s = np.maximum(now_s, over.due_s)
                case Mark():
                    if not marks_s:
                        waited_s[:] = 0.0
                    marks_s.append(now_s)
        return Times(np.array(marks_s), waited_s)

    def _begun(self, operation: Operation, began_s: Seconds) -> _Over:
        if isinstance(operation, Ring):
            return self._reduced(operation, began_s)
        return self._exchanged(operation, began_s)

    def _exchanged(self, operation: Exchange, began_s: Seconds) -> _Over:
        edges = operation.edges
        due_s, blamed, came_s = began_s.copy(), np.arange(self._size), began_s.copy()
        if not len(edges.senders):
            return _Over(due_s, blamed, came_s)
        has_sources = edges.num_needed > 0
        starts = np.append(0, np.cumsum(edges.num_needed)[:-1])[has_sources]
        sent_s = began_s[edges.senders]
        last_s = np.maximum.reduceat(sent_s + self._delays_of(edges), starts)
        due_s[has_sources] = np.maximum(due_s[has_sources], last_s)
        if operation.is_for_all:
            return _Over(due_s, *self._last_of_all(began_s))
        came_s[has_sources] = np.maximum.reduceat(sent_s, starts)
        is_last = sent_s == came_s[edges.receivers]
        places = np.where(is_last, np.arange(len(sent_s)), len(sent_s))
        blamed[has_sources] = edges.senders[np.minimum.reduceat(places, starts)]
        return _Over(due_s, blamed, came_s)

    def _reduced(self, operation: Ring, began_s: Seconds) -> _Over:
        delays_s = self._delays_of(self._ring)
        due_s = began_s
        for _ in range(2 * (operation.size - 1)):
            due_s = np.maximum(due_s, np.roll(due_s, 1) + delays_s)
        return _Over(due_s, *self._last_of_all(began_s))

    def _last_of_all(self, began_s: Seconds) -> tuple[npt.NDArray[np.int64], Seconds]:
        last = int(np.argmax(began_s))
        return np.full(self._size, last), np.full(self._size, began_s[last])

    def _delays_of(self, edges: Edges) -> Seconds:
        """Of the edges over which something is needed."""
        delays_s = self._delays_s.get(edges)
        if delays_s is None:
            if self._has_one_way:
                delays_s = np.full(len(edges.senders), self._default_s)
            else:
                pairs = zip(edges.senders.tolist(), edges.receivers.tolist(), strict=True)
                ends = ((self._addresses[sender], self._addresses[receiver]) for sender, receiver in pairs)
                delays_s = np.array([self._delay_s(here, there) for here, there in ends])
            self._delays_s[edges] = delays_s
        return delays_s

    def _delay_s(self, here: Address, there: Address) -> float:
        if here == there:
            return 0.0
        delay_ms = self._profile.way_between(here, there).delay_ms
        assert isinstance(delay_ms, int | float), "a profile of constant delays"
        return delay_ms * 1e-3
