"""What an operation moves, by formula, and the group around another through which all operations pass.

The formulas say who sends how many bytes to whom, seen from one worker. They are those of a network without
shared memory, so that figures of one machine say what a cluster would have to carry; `Metered` lists them. A
`Tally` adds them up when operations are issued, for a few hundred nanoseconds each.

A `GroupWrapper` forwards everything: what counts, delays or disturbs operations begins there. A subclass
overrides `_issue` and `_call`, through which all operations pass, or single methods. A `Sleeper` holds the
caller's thread on purpose, in the one place where a group does so.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from shoal.core import SYSTEM_CLOCK, Clock, Deadline, DeadlineExceeded
from shoal.group.base import Group, Handle, Loss, Reduction, Slot, Snapshot, Window
from shoal.topology import Weights

T = TypeVar("T")
Bytes = Mapping[int, int]
"""By rank."""
_NONE: Bytes = MappingProxyType({})
_SLICE_S = 0.001  # others may wait for work that this worker does for them between two slices
_NEAR_S = 1e-9


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a group's method, as one worker makes it."""

    name: str
    size_bytes: int = 0
    sends: Bytes = field(default_factory=lambda: _NONE)
    receives: Bytes = field(default_factory=lambda: _NONE)
    num_steps: int = 1
    """How many times one after the other something is sent: each waits for the one before."""
    learns: Callable[[Any], Bytes] | None = None
    """For what only the result tells: from it to what was received."""
    is_request: bool = False
    """Whether what is received is sent only when the request has arrived."""

    @property
    def sent_bytes(self) -> int:
        """To all together."""
        return sum(self.sends.values())

    @property
    def received_bytes(self) -> int:
        """From all together, as far as it is known beforehand."""
        return sum(self.receives.values())


def all_reduce(group: Group, tensor: torch.Tensor) -> Operation:
    """In a ring of the members."""
    members = list(group.members)
    if len(members) < 2 or group.rank not in members:
        return Operation("all_reduce", tensor.nbytes)
    place = members.index(group.rank)
    num_steps = 2 * (len(members) - 1)
    size_bytes = num_steps * tensor.nbytes // len(members)
    following = members[(place + 1) % len(members)]
    return Operation(
        "all_reduce",
        tensor.nbytes,
        {following: size_bytes},
        {members[place - 1]: size_bytes},
        num_steps,
    )


def broadcast(group: Group, tensor: torch.Tensor, root: int) -> Operation:
    """From the root straight to everybody."""
    if group.rank == root:
        return Operation("broadcast", tensor.nbytes, dict.fromkeys(_others(group), tensor.nbytes))
    return Operation("broadcast", tensor.nbytes, receives={root: tensor.nbytes})


def all_gather(group: Group, tensor: torch.Tensor) -> Operation:
    """From everybody straight to everybody; the others' sizes are known when they have come."""
    members = tuple(group.members)

    def learn(result: list[torch.Tensor]) -> Bytes:
        given = zip(members, result, strict=False)  # a member may have left since
        return {rank: part.nbytes for rank, part in given if rank != group.rank}

    sends = dict.fromkeys(_others(group), tensor.nbytes)
    return Operation("all_gather", tensor.nbytes, sends, learns=learn)


def exchange(group: Group, tensor: torch.Tensor, weights: Weights, name: str = "exchange") -> Operation:
    """With those that the weights name and that are there."""
    destinations = weights.sources if weights.destinations is None else weights.destinations
    return _exchange(group, tensor, name, destinations, weights.sources)


def exchange_machines(group: Group, tensor: torch.Tensor, weights: Weights) -> Operation:
    """With all workers of one's own machine and of those that the weights name."""
    machines = [group.machine, *weights.sources]
    ranks = [rank for rank in group.members if rank != group.rank and group.machine_of(rank) in machines]
    return _exchange(group, tensor, "exchange_machines", ranks, ranks)


def barrier(group: Group) -> Operation:
    """No bytes, but a word from everybody to everybody."""
    words = dict.fromkeys(_others(group), 0)
    return Operation("barrier", 0, words, words)


def fetch(group: Group, peer: int) -> Operation:
    """A request, and what the peer has published."""
    if peer == group.rank:
        return Operation("fetch")

    def learn(snapshot: Snapshot | None) -> Bytes:
        return {} if snapshot is None else {peer: snapshot.tensor.nbytes}

    return Operation("fetch", sends={peer: 0}, learns=learn, is_request=True)


def write(group: Group, name: str, to: int, tensor: torch.Tensor) -> Operation:
    """Into a window of `to`, if it is there; over when it has arrived."""
    sends = {to: tensor.nbytes} if to in _others(group) else {}
    return Operation(name, tensor.nbytes, sends, is_request=True)


def read(group: Group, peer: int, into: torch.Tensor) -> Operation:
    """A request, and a copy of what the peer has published."""
    if peer == group.rank:
        return Operation("read", into.nbytes)

    def learn(version: int | None) -> Bytes:
        return {} if version is None else {peer: into.nbytes}

    return Operation("read", into.nbytes, {peer: 0}, learns=learn, is_request=True)


def _exchange(
    group: Group, tensor: torch.Tensor, name: str, to: Iterable[int], sources: Collection[int]
) -> Operation:
    members, size_bytes = group.members, tensor.nbytes
    return Operation(
        name,
        size_bytes,
        {rank: size_bytes for rank in to if rank in members},
        {rank: size_bytes for rank in sources if rank in members},
    )


def _others(group: Group) -> list[int]:
    return [rank for rank in group.members if rank != group.rank]


class Tally:
    """Of a worker in a group that nobody leaves."""

    def __init__(self, rank: int, size: int) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._rank = rank
        self._size = size

    def all_reduce(self, size_bytes: int) -> None:
        """In a ring of the members."""
        num_members = self._num_members()
        moved_bytes = 2 * (num_members - 1) * size_bytes // num_members
        self.sent_bytes += moved_bytes
        self.received_bytes += moved_bytes

    def broadcast(self, size_bytes: int, root: int) -> None:
        """From the root straight to everybody."""
        if self._rank == root:
            self.sent_bytes += size_bytes * (self._num_members() - 1)
        else:
            self.received_bytes += size_bytes

    def all_gather(self, size_bytes: int, received_bytes: int) -> None:
        """From everybody straight to everybody."""
        self.sent_bytes += size_bytes * (self._num_members() - 1)
        self.received_bytes += received_bytes

    def _num_members(self) -> int:
        """Oneself included."""
        return self._size


class GroupWrapper(Group):
    """Does what `inner` does."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.local_rank = inner.local_rank
        self.size = inner.size
        self.machine = inner.machine
        self.num_machines = inner.num_machines
        self.patience = inner.patience
        self.everybody = inner.everybody
        self.num_servers = inner.num_servers
        self.role = inner.role

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Every operation that has a handle; `start` begins it in the inner group."""
        return start()

    def _call(self, operation: Operation, act: Callable[[], T]) -> T:
        """Every operation that is over when it returns."""
        return act()

    @cached_property
    def notes(self) -> dict[str, Any]:
        """The inner group's."""
        return self.inner.notes

    # --- who is there ---

    @property
    def should_survive(self) -> bool:
        """As the inner group's."""
        return self.inner.should_survive

    @should_survive.setter
    def should_survive(self, value: bool) -> None:
        self.inner.should_survive = value

    @property
    def members(self) -> Sequence[int]:
        """As the inner group's."""
        return self.inner.members

    @property
    def lost(self) -> Mapping[int, Loss]:
        """As the inner group's."""
        return self.inner.lost

    @property
    def waited_s(self) -> Sequence[float]:
        """As the inner group's."""
        return self.inner.waited_s

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """As the inner group's."""
        return self.inner.traffic_bytes

    def blame(self, error: BaseException | None) -> None:
        """The inner group tells."""
        self.inner.blame(error)

    def check_split(self) -> None:
        """As the inner group's."""
        self.inner.check_split()

    def machine_of(self, rank: int) -> int:
        """As the inner group's."""
        return self.inner.machine_of(rank)

    # --- operations; `share` goes through `all_gather` ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Memory of the inner group."""
        operation = Operation("empty", num_elements * dtype.itemsize)
        return self._call(operation, partial(self.inner.empty, num_elements, dtype, device=device))

    def free(self, tensor: torch.Tensor) -> None:
        """Give memory of the inner group back."""
        self._call(Operation("free", tensor.nbytes), partial(self.inner.free, tensor))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = all_reduce(self.inner, tensor)
        return self._issue(operation, partial(self.inner.all_reduce, tensor, op))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = broadcast(self.inner, tensor, root)
        return self._issue(operation, partial(self.inner.broadcast, tensor, root))

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Through the inner group."""
        operation = all_gather(self.inner, tensor)
        return self._issue(operation, partial(self.inner.all_gather, tensor))

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = exchange(self.inner, tensor, weights)
        return self._issue(operation, partial(self.inner.exchange, tensor, weights, out=out))

    def exchange_machines(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Through the inner group, which may know a shorter way than an exchange of all."""
        operation = exchange_machines(self.inner, tensor, weights)
        return self._issue(operation, partial(self.inner.exchange_machines, tensor, weights, out=out))

    def pair_gossip(self, tensor: torch.Tensor, peer: int, weight: float = 0.5) -> Handle[torch.Tensor]:
        """Through the inner group."""
        weights = Weights(1 - weight, {peer: weight})
        operation = exchange(self.inner, tensor, weights, "pair_gossip")
        return self._issue(operation, partial(self.inner.pair_gossip, tensor, peer, weight))

    def settle(self, tensor: torch.Tensor) -> None:
        """Through the inner group."""
        self._call(Operation("settle"), partial(self.inner.settle, tensor))

    def barrier(self) -> Handle[None]:
        """Through the inner group."""
        return self._issue(barrier(self.inner), self.inner.barrier)

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Through the inner group."""
        operation = Operation("publish", tensor.nbytes)
        self._call(operation, partial(self.inner.publish, name, tensor, version))

    def reclaim(self, name: str, version: int) -> None:
        """Through the inner group."""
        self.inner.reclaim(name, version)

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """Through the inner group."""
        return self._issue(fetch(self.inner, peer), partial(self.inner.fetch, name, peer))

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Through the inner group."""
        with contextlib.ExitStack() as stack:
            change = self.inner.changing(name, version)
            self._call(Operation("changing"), partial(stack.enter_context, change))
            yield

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Through the inner group."""
        operation = read(self.inner, peer, into)
        return self._issue(operation, partial(self.inner.read, name, peer, into, version=version))

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> Window:
        """One of the inner group, around which this one counts, delays or disturbs writes."""
        make = partial(self.inner.window, name, num_elements, dtype, sources=sources)
        inner = self._call(Operation("window", num_elements * dtype.itemsize), make)
        return WrappedWindow(inner, self.inner, self._issue, self._call)

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Through the inner group."""
        with contextlib.ExitStack() as stack:
            mutex = self.inner.mutex(name, owner)
            self._call(Operation("mutex"), partial(stack.enter_context, mutex))
            yield

    # --- its life ---

    def progress(self) -> None:
        """Of the inner group's operations."""
        self.inner.progress()

    def leave(self) -> None:
        """Leave the inner group."""
        self.inner.leave()

    def close(self) -> None:
        """Close the inner group."""
        self.inner.close()

    def abandon(self) -> None:
        """Abandon the inner group."""
        self.inner.abandon()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """For the timeline of a group inside."""
        with self.inner.span(name):
            yield


class ObservedHandle(Handle[T]):
    """A handle that sees when it is waited for, when its operation is found to be over, and the result.

    Nobody tells a worker that an operation is over while it does not look: the end is when it is noticed.
    A wait that ran into its deadline is no end.
    """

    def __init__(self, inner: Handle[T], clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._is_over = False
        self._has_result = False

    @abc.abstractmethod
    def _waited(self, began_s: float, ended_s: float) -> None:
        """Somebody has waited."""

    @abc.abstractmethod
    def _ended(self, at_s: float) -> None:
        """It is over, well or not; once."""

    def _brought(self, result: T) -> None:
        """It has a result; once."""

    def wait(self, deadline: Deadline | None = None) -> T:
        """As the inner handle's."""
        began_s = self._clock.now_s()
        is_over = True
        try:
            result = self._inner.wait(deadline)
        except DeadlineExceeded:
            is_over = False
            raise
        finally:
            ended_s = self._clock.now_s()
            self._waited(began_s, ended_s)
            if is_over:
                self._notice(ended_s)
        if not self._has_result:
            self._has_result = True
            self._brought(result)
        return result

    def is_done(self) -> bool:
        """As the inner handle's."""
        is_done = self._inner.is_done()
        if is_done:
            self._notice(self._clock.now_s())
        return is_done

    def _notice(self, at_s: float) -> None:
        if not self._is_over:
            self._is_over = True
            self._ended(at_s)


Issue = Callable[[Operation, Callable[[], Handle[None]]], Handle[None]]
Call = Callable[[Operation, Callable[[], Sequence[int]]], Sequence[int]]


class WrappedWindow(Window):
    """Does what `inner` does; a `slot` is the inner one's."""

    def __init__(self, inner: Window, group: Group, issue: Issue, call: Call) -> None:
        self.inner = inner
        self._group = group
        self.name = inner.name
        self.num_elements = inner.num_elements
        self.dtype = inner.dtype
        self._issue = issue
        self._call = call

    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Through the inner window."""
        start = partial(self.inner.put, to, tensor, weight=weight, mass=mass, note=note)
        return self._issue(write(self._group, "put", to, tensor), start)

    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Through the inner window."""
        start = partial(self.inner.accumulate, to, tensor, weight=weight, mass=mass, note=note)
        return self._issue(write(self._group, "accumulate", to, tensor), start)

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Through the inner window."""
        return self._issue(
            write(self._group, "send", to, tensor), partial(self.inner.send, to, tensor, note=note)
        )

    def slot(self, source: int) -> contextlib.AbstractContextManager[Slot]:
        """The inner window's."""
        return self.inner.slot(source)

    def filled(self) -> Sequence[int]:
        """As the inner window's."""
        return self.inner.filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """As the inner window's."""
        return self._call(Operation("window_wait"), partial(self.inner.wait, deadline))

    def close(self) -> None:
        """Close the inner window."""
        self.inner.close()


class Sleeper:
    """Sleeps by a clock; a test gives one whose `sleep` moves a manual clock."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock

    def sleep(self, seconds: float) -> None:
        """Hold the thread."""
        time.sleep(seconds)

    def until(self, due_s: float, between: Callable[[], None], deadline: Deadline, what: str) -> None:
        """Sleep until a moment of the clock, calling `between` now and then.

        DeadlineExceeded, naming `what` was waited for, if the deadline comes first.
        """
        while (left_s := due_s - self.clock.now_s()) > _NEAR_S:
            deadline.check(what)
            self.sleep(min(left_s, _SLICE_S, deadline.remaining_s))
            between()
