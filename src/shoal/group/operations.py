"""What each operation of a group sends, receives and needs, and the wrapper through which operations pass.

An `Operation` is one row of that table, seen from one worker: it serves counting, tracing, shaping, faults
and virtual time alike. Its bytes are those of a network without shared memory, so that figures of one machine
say what a cluster would have to carry; `Metered` lists the formulas.

A `GroupWrapper` forwards everything. A subclass overrides the hooks through which all operations pass, or
single methods. A `Sleeper` holds the caller's thread on purpose, in the one place where a group does so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from shoal.core import SYSTEM_CLOCK, Clock, Deadline
from shoal.group.base import Group, GroupStats, Handle, Loss, Reduction, Slot, Snapshot, Window, Write
from shoal.group.functions import spread_over_ranks
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")
Bytes = Mapping[int, int]
"""Bytes by rank."""
_NONE: Bytes = MappingProxyType({})
_SLICE_S = 0.001  # others may wait for work that this worker does for them between two slices
_NEAR_S = 1e-9


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a method of a group or a window, as one worker makes it."""

    name: str
    size_bytes: int = 0
    sends: Bytes = field(default_factory=lambda: _NONE)
    receives: Bytes = field(default_factory=lambda: _NONE)
    num_steps: int = 1
    """How many times one after the other something is sent: each waits for the one before."""
    learns: Callable[[Any], Bytes] | None = None
    """For what only the result tells: maps it to what was received."""
    is_request: bool = False
    """Whether it goes to one peer, and what is received is sent only when the request has arrived."""
    needs: Sequence[int] = ()
    """The other ranks from which something must come; a peer that is gone may be among them."""
    needs_all: bool = False
    """Whether it fails without one of them, instead of doing without."""
    tensor: torch.Tensor | None = None
    """The memory that what comes from others is written to, where the caller has given it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes to all others together."""
        return sum(self.sends.values())

    @property
    def received_bytes(self) -> int:
        """Bytes from all others together, as far as they are known beforehand."""
        return sum(self.receives.values())


def ring_bytes(size_bytes: int, num_members: int) -> int:
    """Counts what one member of a ring sends, and receives, until a tensor is reduced on all."""
    return 2 * (num_members - 1) * size_bytes // num_members


def all_reduce(group: Group, tensor: torch.Tensor) -> Operation:
    """Goes round a ring of the members."""
    members = list(group.members)
    if len(members) < 2 or group.rank not in members:
        return Operation("all_reduce", tensor.nbytes, tensor=tensor)
    place = members.index(group.rank)
    size_bytes = ring_bytes(tensor.nbytes, len(members))
    following = members[(place + 1) % len(members)]
    return Operation(
        "all_reduce",
        tensor.nbytes,
        {following: size_bytes},
        {members[place - 1]: size_bytes},
        2 * (len(members) - 1),
        needs=_others(group),
        needs_all=True,
        tensor=tensor,
    )


def broadcast(group: Group, tensor: torch.Tensor, root: int) -> Operation:
    """Goes from the root straight to everybody."""
    size_bytes, others = tensor.nbytes, _others(group)
    if group.rank == root:
        return Operation("broadcast", size_bytes, dict.fromkeys(others, size_bytes), tensor=tensor)
    needs = [root] if root in others else []
    return Operation(
        "broadcast", size_bytes, receives={root: size_bytes}, needs=needs, needs_all=True, tensor=tensor
    )


def all_gather(group: Group, tensor: torch.Tensor) -> Operation:
    """Goes from everybody straight to everybody; the others' sizes are known when they have come."""
    members, others = tuple(group.members), _others(group)

    def learn(result: list[torch.Tensor]) -> Bytes:
        given = zip(members, result, strict=False)  # a member may have left since
        return {rank: part.nbytes for rank, part in given if rank != group.rank}

    sends = dict.fromkeys(others, tensor.nbytes)
    return Operation("all_gather", tensor.nbytes, sends, learns=learn, needs=others, needs_all=True)


def exchange(
    group: Group, tensor: torch.Tensor, weights: Weights | MachineWeights, out: torch.Tensor | None = None
) -> Operation:
    """Goes straight to and from those that are there, of the ranks or machines that the weights name."""
    weights = spread_over_ranks(group, weights)
    members, size_bytes = group.members, tensor.nbytes
    to = weights.sources if weights.destinations is None else weights.destinations
    return Operation(
        "exchange",
        size_bytes,
        {rank: size_bytes for rank in to if rank in members},
        {rank: size_bytes for rank in weights.sources if rank in members},
        needs=tuple(weights.sources),
        tensor=tensor if out is None else out,
    )


def barrier(group: Group) -> Operation:
    """Carries no bytes, but a word from everybody to everybody."""
    others = _others(group)
    words = dict.fromkeys(others, 0)
    return Operation("barrier", 0, words, words, needs=others, needs_all=True)


def write(group: Group, to: int, one: Write) -> Operation:
    """Goes into a window of `to`, if it is there; is over when it has arrived."""
    size_bytes = one.tensor.nbytes
    sends = {to: size_bytes} if to in _others(group) else {}
    return Operation(one.kind, size_bytes, sends, is_request=True)


def fetch(group: Group, peer: int) -> Operation:
    """Sends a request, and receives what the peer has published."""

    def learn(snapshot: Snapshot | None) -> Bytes:
        return {} if snapshot is None else {peer: snapshot.tensor.nbytes}

    if peer == group.rank:
        return Operation("fetch")
    needs = [peer] if peer in _others(group) else []
    return Operation("fetch", sends={peer: 0}, learns=learn, is_request=True, needs=needs)


def read(group: Group, peer: int, into: torch.Tensor) -> Operation:
    """Sends a request, and receives a copy of what the peer has published."""

    def learn(version: int | None) -> Bytes:
        return {} if version is None else {peer: into.nbytes}

    if peer == group.rank:
        return Operation("read", into.nbytes)
    needs = [peer] if peer in _others(group) else []
    return Operation(
        "read", into.nbytes, {peer: 0}, learns=learn, is_request=True, needs=needs, tensor=into.detach()
    )


def _others(group: Group) -> list[int]:
    return [rank for rank in group.members if rank != group.rank]


class TrafficCounter:
    """Counts one worker's bytes by the same formulas, where making an `Operation` would take too long."""

    def __init__(self, rank: int, size: int) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._rank = rank
        self._size = size

    def add(self, operation: Operation) -> None:
        """Counts what is known of an operation when it is issued."""
        self.sent_bytes += operation.sent_bytes
        self.received_bytes += operation.received_bytes

    def all_reduce(self, size_bytes: int) -> None:
        """Counts an all-reduce of so many bytes."""
        moved_bytes = ring_bytes(size_bytes, self._num_members())
        self.sent_bytes += moved_bytes
        self.received_bytes += moved_bytes

    def broadcast(self, size_bytes: int, root: int) -> None:
        """Counts a broadcast of so many bytes."""
        if self._rank == root:
            self.sent_bytes += size_bytes * (self._num_members() - 1)
        else:
            self.received_bytes += size_bytes

    def all_gather(self, size_bytes: int, received_bytes: int) -> None:
        """Counts an all-gather: the bytes of one's own tensor, and those of all others' together."""
        self.sent_bytes += size_bytes * (self._num_members() - 1)
        self.received_bytes += received_bytes

    def _num_members(self) -> int:
        """Counts the members that are there, this worker included; here nobody ever leaves."""
        return self._size


class GroupWrapper(Group):
    """Does what `inner` does, through hooks that a subclass overrides.

    Each operation with a handle passes `_issue`, each that is over when it returns `_call`; writes into
    windows pass `_write` before, and waits for them `_wait`.
    """

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.machine = inner.machine
        self.machines = inner.machines
        self.num_machines = inner.num_machines
        self.run = inner.run
        self.local_rank = inner.local_rank
        self.patience = inner.patience
        self.everybody = inner.everybody
        self.num_servers = inner.num_servers
        self.role = inner.role
        self.timeline = inner.timeline

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Begins an operation that has a handle; `start` does it in the inner group."""
        return start()

    def _call(self, operation: Operation, act: Callable[[], T]) -> T:
        """Does an operation that is over when it returns."""
        return act()

    def _write(self, window: Window, to: int, one: Write) -> Handle[None]:
        """Begins a write into a window of the inner group."""
        return self._issue(write(self, to, one), partial(window._write, to, one))

    def _wait(self, window: Window, sources: Collection[int], deadline: Deadline | None) -> Sequence[int]:
        """Waits for what its sources write into a window of the inner group."""
        return self._call(Operation("window_wait"), partial(window.wait, deadline))

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What strategies remember of the inner group."""
        return self.inner.notes

    @property
    def should_survive(self) -> bool:
        """Whether operations of the inner group go on without lost peers."""
        return self.inner.should_survive

    @should_survive.setter
    def should_survive(self, value: bool) -> None:
        self.inner.should_survive = value

    @property
    def members(self) -> Sequence[int]:
        """The members of the inner group."""
        return self.inner.members

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that the inner group has lost."""
        return self.inner.lost

    @property
    def stats(self) -> GroupStats:
        """What the inner group has cost."""
        return self.inner.stats

    @property
    def split(self) -> Exception | None:
        """The error that ends this worker after a cut, from the inner group."""
        return self.inner.split

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes memory of the inner group."""
        operation = Operation("empty", num_elements * dtype.itemsize)
        return self._call(operation, partial(self.inner.empty, num_elements, dtype, device=device))

    def free(self, tensor: torch.Tensor) -> None:
        """Gives memory of the inner group back."""
        self._call(Operation("free", tensor.nbytes), partial(self.inner.free, tensor))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Reduces through the inner group."""
        return self._issue(all_reduce(self, tensor), partial(self.inner.all_reduce, tensor, op))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Broadcasts through the inner group."""
        return self._issue(broadcast(self, tensor, root), partial(self.inner.broadcast, tensor, root))

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Gathers through the inner group."""
        return self._issue(all_gather(self, tensor), partial(self.inner.all_gather, tensor))

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Exchanges through the inner group, which may know a shorter way between machines."""
        operation = exchange(self, tensor, weights, out)
        return self._issue(operation, partial(self.inner.exchange, tensor, weights, out=out))

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads the tensor through the inner group."""
        self._call(Operation("settle"), partial(self.inner.settle, tensor))

    def barrier(self) -> Handle[None]:
        """Meets the others in the inner group."""
        return self._issue(barrier(self), self.inner.barrier)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
        device: torch.device | None = None,
    ) -> Window:
        """Makes a window of the inner group, whose operations pass the hooks."""
        make = partial(self.inner.window, name, num_elements, dtype, sources=sources, device=device)
        inner = self._call(Operation("window", num_elements * dtype.itemsize), make)
        return WrappedWindow(inner, self, _others(self) if sources is None else list(sources))

    def progress(self) -> None:
        """Does work of the inner group's operations."""
        self.inner.progress()

    def leave(self) -> None:
        """Leaves the inner group."""
        self.inner.leave()

    def close(self, error: BaseException | None = None) -> None:
        """Closes the inner group."""
        self.inner.close(error)


class WrappedWindow(Window):
    """A window of the group inside a wrapper, whose operations pass the wrapper's hooks."""

    def __init__(self, inner: Window, group: GroupWrapper, sources: Collection[int]) -> None:
        self.inner = inner
        self.name = inner.name
        self.num_elements = inner.num_elements
        self.dtype = inner.dtype
        self.device = inner.device
        self._group = group
        self._sources = sources

    def _write(self, to: int, write: Write) -> Handle[None]:
        return self._group._write(self.inner, to, write)

    def slot(self, source: int) -> contextlib.AbstractContextManager[Slot]:
        """Holds a slot of the inner window."""
        return self.inner.slot(source)

    def filled(self) -> Sequence[int]:
        """Lists the filled slots of the inner window."""
        return self.inner.filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Waits for writes into the inner window."""
        return self._group._wait(self.inner, self._sources, deadline)

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Publishes through the inner window."""
        operation = Operation("publish", tensor.nbytes)
        self._group._call(operation, partial(self.inner.publish, tensor, version))

    def reclaim(self, version: int) -> None:
        """Reclaims in the inner window."""
        self.inner.reclaim(version)

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Changes what the inner window publishes."""
        with contextlib.ExitStack() as stack:
            change = self.inner.changing(version)
            self._group._call(Operation("changing"), partial(stack.enter_context, change))
            yield

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Fetches through the inner window."""
        return self._group._issue(fetch(self._group, peer), partial(self.inner.fetch, peer))

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Reads through the inner window."""
        start = partial(self.inner.read, peer, into, version=version)
        return self._group._issue(read(self._group, peer, into), start)

    def close(self) -> None:
        """Closes the inner window."""
        self.inner.close()


class Sleeper:
    """Sleeps by a clock; a test gives one whose `sleep` moves a manual clock."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock

    def sleep(self, seconds: float) -> None:
        """Holds the thread for so many seconds."""
        time.sleep(seconds)

    def until(self, due_s: float, between: Callable[[], None], deadline: Deadline, what: str) -> None:
        """Sleeps until a moment of the clock, calling `between` now and then.

        DeadlineExceeded, naming `what` was waited for, if the deadline comes first.
        """
        while (left_s := due_s - self.clock.now_s()) > _NEAR_S:
            deadline.check(what)
            self.sleep(min(left_s, _SLICE_S, deadline.remaining_s))
            between()
