"""When things happen in a stacked run: a tape of what every worker does, and its replay in virtual time.

The tape is the same for all workers. Times come from formulas where no message waits for another; else the
tape is replayed message by message, in the order in which the exact executor sends them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core import Address
from shoal.group.operations import ring_bytes
from shoal.simulate.group import CallAt, Links, Over, RingAllReduce
from shoal.simulate.stacked.model import Edges
from shoal.simulate.world import StepCosts, World
from shoal.transport import Conditions, Profile
from shoal.transport.network.links import Passage
from shoal.transport.network.profiles import Way

Bytes: TypeAlias = npt.NDArray[np.int64]
"""How many bytes each worker sends, by rank."""


@dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """Straight from each sender to its receivers; who has no sources is through when its own has left."""

    edges: Edges
    size_bytes: Bytes
    """What each sends to each of its receivers."""
    is_for_all: bool = False
    """Whether everybody waits for everybody, so that the last of all is blamed."""

    @property
    def sent_bytes(self) -> Bytes:
        """The bytes that each sends to all its receivers together."""
        return self.size_bytes * self.edges.num_sent


@dataclass(frozen=True, eq=False, slots=True)
class Ring:
    """An all-reduce of so many bytes."""

    size: int
    size_bytes: int

    @property
    def sent_bytes(self) -> Bytes:
        """The bytes that each sends to the next one."""
        return np.full(self.size, ring_bytes(self.size_bytes, self.size))


Operation: TypeAlias = Exchange | Ring


@dataclass(frozen=True, slots=True)
class Forward:
    """Spends what comes before backward of a step's cost."""


@dataclass(frozen=True, slots=True)
class Backward:
    """Spends a share of what is left of a step's cost."""

    share: float


@dataclass(frozen=True, slots=True)
class Issue:
    """An operation begins; its number counts from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Until an operation is over."""

    number: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment to be told."""


Event: TypeAlias = Forward | Backward | Issue | Wait | Mark


@dataclass(slots=True)
class Tape:
    """The events until now."""

    size: int
    events: list[Event] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    marked_bytes: list[Bytes] = field(default_factory=list)
    """At each mark, what each worker has sent since the first one."""
    _sent_bytes: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self._sent_bytes = np.zeros(self.size, np.int64)

    def forward(self) -> None:
        """Takes note that a step begins."""
        self.events.append(Forward())

    def backward(self, share: float = 1.0) -> None:
        """Takes note that backward passes, or a share of it."""
        self.events.append(Backward(share))

    def issue(self, operation: Operation) -> int:
        """Its number, for `wait`."""
        number = len(self.operations)
        self.operations.append(operation)
        self.events.append(Issue(number))
        self._sent_bytes = self._sent_bytes + operation.sent_bytes
        return number

    def exchange(self, edges: Edges, size_bytes: int | Sequence[int], *, is_for_all: bool = False) -> int:
        """Begins an exchange of as many bytes from each, or of some by rank; returns its number."""
        sizes = np.broadcast_to(np.asarray(size_bytes, np.int64), self.size)
        return self.issue(Exchange(edges, sizes, is_for_all))

    def wait(self, number: int) -> None:
        """Nobody goes on before its part of the operation is over."""
        self.events.append(Wait(number))

    def mark(self) -> None:
        """Marks this moment; bytes count from the first mark on."""
        if not self.marked_bytes:
            self._sent_bytes = np.zeros(self.size, np.int64)
        self.events.append(Mark())
        self.marked_bytes.append(self._sent_bytes)


Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Times:
    """The virtual times of all workers, as one vector."""

    marks_s: Seconds
    """When each worker came to each mark, by mark and rank."""
    waited_s: Seconds
    """By rank and by the one that it waited for, since the first mark."""


def times_of(tape: Tape, world: World, addresses: list[Address], *, can_sweep: bool = True) -> Times:
    """Computes the times of a world without faults; without `can_sweep` always one link after another."""
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
    """Who has come last, by rank; oneself stands for nobody."""
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
        """Runs to the end of the tape."""
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


_CALL = -1


def replay(tape: Tape, world: World, addresses: list[Address]) -> tuple[Seconds, Seconds]:
    """When each worker comes to each mark, and how long it has waited for whom since the first."""
    links = Links(Conditions(world.profile, seed=world.seed), addresses)
    stage = _Stage(tape, world, links)
    stage.run()
    return stage.marks_s, stage.waited_s


class _Meeting:
    """One operation under way; `known` is told for whom its end is known, and when that is."""

    def __init__(self, links: Links, operation: Exchange | Ring, call_at: CallAt, known: Over) -> None:
        self.due_s: dict[int, float] = {}
        """Of those whose end is known."""
        self.blamed: dict[int, tuple[int, float]] = {}
        self._links = links
        self._operation = operation
        self._known = known
        self._ring: RingAllReduce | None = None
        if isinstance(operation, Ring):
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
        """Runs to the end of the tape."""
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
