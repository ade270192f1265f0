"""What each operation of a group sends, receives and needs, and the wrapper through which operations pass.

An `OperationPlan` is one row of that table, seen from one worker: it serves counting, tracing, shaping,
faults and virtual time alike. Its bytes are those of a network without shared memory, so that figures of one
machine say what a cluster would have to carry; `Metered` lists the formulas.

A `GroupWrapper` forwards everything, by methods that are made from the table. A subclass overrides the hooks
through which all operations pass, or single methods.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch

from shoal.core import SYSTEM_CLOCK, Clock, Deadline
from shoal.group.base import Group, GroupStats, Handle, Loss, Reduction, Window, WindowForm, Write, passed_on
from shoal.group.functions import others, spread_over_ranks
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Bytes = Mapping[int, int]
"""Bytes by rank."""
Row: TypeAlias = Callable[..., "OperationPlan"]
"""One row of the table: makes the operation of a group and of what its method is called with."""
_SLICE_S = 0.001  # others may wait for work that this worker does for them between two slices
_NEAR_S = 1e-9


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """One call of a method of a group or a window, as one worker makes it."""

    name: str
    size_bytes: int = 0
    sends: Bytes = field(default_factory=dict)
    receives: Bytes = field(default_factory=dict)
    num_steps: int = 1
    """How many times one after the other something is sent: each waits for the one before."""
    needs: Sequence[int] = ()
    """The other ranks from which something must come; a peer that is gone may be among them."""
    needs_all: bool = False
    """Whether it fails without one of them, instead of doing without."""
    learns: Callable[[Any], Bytes] | None = None
    """For what only the result tells: maps it to what was received."""
    is_request: bool = False
    """Whether it goes to one peer, and what is received is sent only when the request has arrived."""
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


def all_reduce(group: Group, tensor: torch.Tensor, op: Reduction = "mean") -> OperationPlan:
    """Goes round a ring of the members."""
    members = list(group.members)
    if len(members) < 2 or group.rank not in members:
        return OperationPlan("all_reduce", tensor.nbytes, needs_all=True, tensor=tensor)
    place, num_hops = members.index(group.rank), 2 * (len(members) - 1)
    size_bytes = ring_bytes(tensor.nbytes, len(members))
    sends, receives = {members[(place + 1) % len(members)]: size_bytes}, {members[place - 1]: size_bytes}
    return OperationPlan(
        "all_reduce", tensor.nbytes, sends, receives, num_hops, others(group), needs_all=True, tensor=tensor
    )


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> OperationPlan:
    """Goes from the root straight to everybody."""
    size_bytes, peers = tensor.nbytes, others(group)
    if group.rank == root:
        return OperationPlan("broadcast", size_bytes, dict.fromkeys(peers, size_bytes), tensor=tensor)
    needs = [root] if root in peers else []
    return OperationPlan(
        "broadcast", size_bytes, receives={root: size_bytes}, needs=needs, needs_all=True, tensor=tensor
    )


def all_gather(group: Group, tensor: torch.Tensor) -> OperationPlan:
    """Goes from everybody straight to everybody; the others' sizes are known when they have come."""
    members, peers = tuple(group.members), others(group)

    def learn(result: list[torch.Tensor]) -> Bytes:
        given = zip(members, result, strict=False)  # a member may have left since
        return {rank: part.nbytes for rank, part in given if rank != group.rank}

    sends = dict.fromkeys(peers, tensor.nbytes)
    return OperationPlan("all_gather", tensor.nbytes, sends, needs=peers, needs_all=True, learns=learn)


def exchange(
    group: Group, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
) -> OperationPlan:
    """Goes straight to and from those that are there, of the ranks or machines that the weights name."""
    weights = spread_over_ranks(group, weights)
    members, size_bytes = group.members, tensor.nbytes
    to = weights.sources if weights.destinations is None else weights.destinations
    sends = {rank: size_bytes for rank in to if rank in members}
    receives = {rank: size_bytes for rank in weights.sources if rank in members}
    written = tensor if out is None else out
    return OperationPlan(
        "exchange", size_bytes, sends, receives, needs=tuple(weights.sources), tensor=written
    )


def barrier(group: Group) -> OperationPlan:
    """Carries no bytes, but a word from everybody to everybody."""
    peers = others(group)
    words = dict.fromkeys(peers, 0)
    return OperationPlan("barrier", 0, words, words, needs=peers, needs_all=True)


def write(group: Group, to: int, one: Write) -> OperationPlan:
    """Goes into a window of `to`, if it is there; is over when it has arrived."""
    size_bytes = one.tensor.nbytes
    sends = {to: size_bytes} if to in others(group) else {}
    return OperationPlan(one.kind, size_bytes, sends, is_request=True)


def fetch(group: Group, peer: int) -> OperationPlan:
    """Sends a request, and receives what the peer has published."""
    return _request(group, "fetch", peer, lambda snapshot: snapshot.tensor.nbytes)


def read(group: Group, peer: int, into: torch.Tensor, *, version: int = 0) -> OperationPlan:
    """Sends a request, and receives a copy of what the peer has published."""
    return _request(group, "read", peer, lambda version: into.nbytes, into.detach())


def _request(
    group: Group, name: str, peer: int, count: Callable[[Any], int], into: torch.Tensor | None = None
) -> OperationPlan:
    size_bytes = 0 if into is None else into.nbytes
    if peer == group.rank:
        return OperationPlan(name, size_bytes)

    def learn(result: Any) -> Bytes:
        return {} if result is None else {peer: count(result)}

    needs = [peer] if peer in others(group) else []
    return OperationPlan(name, size_bytes, {peer: 0}, needs=needs, learns=learn, is_request=True, tensor=into)


class TrafficCounter:
    """Counts one worker's bytes by the same formulas, where making an `OperationPlan` would take too long.

    `members` lists those that take part, this worker included; without it everybody always does.
    """

    def __init__(self, rank: int, size: int, members: Callable[[], Sequence[int]] | None = None) -> None:
        self.sent_to = [0] * size
        """Bytes by rank; what others take without asking, only they count."""
        self.received_from = [0] * size
        """Bytes by rank; what others put here without asking, only they count."""
        self._rank = rank
        self._size = size
        self._members = members or (lambda: range(size))

    def stats(self, waited_s: Sequence[float]) -> GroupStats:
        """Gives the counts, beside the seconds waited."""
        sent_to, received_from = tuple(self.sent_to), tuple(self.received_from)
        return GroupStats(sum(sent_to), sum(received_from), waited_s, sent_to, received_from)

    def all_reduce(self, size_bytes: int) -> None:
        """Counts an all-reduce of so many bytes."""
        members = self._members()
        num_members = len(members)
        if num_members > 1 and self._rank in members:
            # in each step: while all are there, their ranks need not be searched
            place = self._rank if num_members == self._size else members.index(self._rank)
            moved_bytes = ring_bytes(size_bytes, num_members)
            self.sent_to[members[place + 1 - num_members]] += moved_bytes
            self.received_from[members[place - 1]] += moved_bytes

    def broadcast(self, size_bytes: int, root: int) -> None:
        """Counts a broadcast of so many bytes."""
        if self._rank == root:
            self.moved(dict.fromkeys(self._members(), size_bytes), {})
        else:
            self.received_from[root] += size_bytes

    def all_gather(self, size_bytes: int, received: Bytes) -> None:
        """Counts an all-gather: the bytes of one's own tensor, and those of all, by rank."""
        self.moved(dict.fromkeys(self._members(), size_bytes), received)

    def exchange(self, size_bytes: int, weights: Weights) -> None:
        """Counts an exchange with those of its sources and destinations that are there."""
        sources: Collection[int] = weights.sources
        destinations = sources if weights.destinations is None else weights.destinations
        members = self._members()
        if len(members) < self._size:
            destinations = [rank for rank in destinations if rank in members]
            sources = [rank for rank in sources if rank in members]
        for rank in destinations:
            self.sent_to[rank] += size_bytes
        for rank in sources:
            self.received_from[rank] += size_bytes

    def write(self, size_bytes: int, to: int) -> None:
        """Counts a write into a window of `to`, if it is there."""
        if to != self._rank and to in self._members():
            self.sent_to[to] += size_bytes

    def moved(self, sends: Bytes, receives: Bytes) -> None:
        """Counts bytes to and from each rank; those of one's own are none."""
        for total, moved in ((self.sent_to, sends), (self.received_from, receives)):
            for rank, size_bytes in moved.items():
                if rank != self._rank:
                    total[rank] += size_bytes


def _empty(
    group: Group, num_elements: int, dtype: torch.dtype = torch.float32, **where: Any
) -> OperationPlan:
    return OperationPlan("empty", num_elements * dtype.itemsize)


def _publish(group: Group, tensor: torch.Tensor, version: int) -> OperationPlan:
    return OperationPlan("publish", tensor.nbytes)


def _forwarded(method: Method, row: Row | None = None, hook: str = "_issue") -> Method:
    """Makes a wrapper's method that does the same inside, through a hook if it has a row of the table."""
    name = method.__name__

    @wraps(method)
    def forward(self: GroupWrapper | WrappedWindow, *args: Any, **options: Any) -> Any:
        act = partial(getattr(self.inner, name), *args, **options)
        if row is None:
            return act()
        return getattr(self._wrapper, hook)(row(self._wrapper, *args, **options), act)

    forward.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return cast(Method, forward)


_HOOKS = ("_issue", "_call", "_write", "_wait")


class GroupWrapper(Group):
    """Does what `inner` does, through hooks that a subclass overrides.

    Each operation with a handle passes `_issue`, each that is over when it returns `_call`; writes into
    windows pass `_write` before, and waits for them `_wait`.
    """

    def __init__(self, inner: Group) -> None:
        self._adopt(inner)
        GroupWrapper.on_change(self, self._adopt_anew)

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Calls a method whenever the group inside has become another one; only an elastic group does."""
        on_change = getattr(self.inner, "on_change", None)
        if on_change is not None:
            on_change(watcher)

    def _adopt(self, inner: Group) -> None:
        """Takes over what is said of the group inside."""
        self.inner = inner
        self.notes = inner.notes
        self.on_wait = inner.on_wait
        for name in Group.__annotations__:
            if name != "should_survive":
                setattr(self, name, getattr(inner, name))
        if not self._has_own("_issue") and not self._has_own("_call"):
            # nobody looks at operations here: to make a plan of each would be most of what they cost
            for name, method in vars(GroupWrapper).items():
                if hasattr(method, "__wrapped__") and not self._has_own(name):  # a forwarded one
                    setattr(self, name, getattr(inner, name))

    def _has_own(self, name: str) -> bool:
        """Tells whether a subclass overrides a method."""
        return getattr(type(self), name) is not getattr(GroupWrapper, name)

    def _adopt_anew(self) -> None:
        self._adopt(self.inner)

    should_survive: bool = passed_on("inner", "should_survive", is_settable=True)
    members = passed_on("inner", "members")
    lost: Mapping[int, Loss] = passed_on("inner", "lost")
    stats = passed_on("inner", "stats")
    split = passed_on("inner", "split")
    empty = _forwarded(Group.empty, _empty, "_call")
    free = _forwarded(Group.free, lambda group, tensor: OperationPlan("free", tensor.nbytes), "_call")
    all_reduce = _forwarded(Group.all_reduce, all_reduce)
    broadcast = _forwarded(Group.broadcast, broadcast)
    all_gather = _forwarded(Group.all_gather, all_gather)
    exchange = _forwarded(Group.exchange, exchange)
    settle = _forwarded(Group.settle, lambda group, tensor: OperationPlan("settle"), "_call")
    barrier = _forwarded(Group.barrier, barrier)
    progress = _forwarded(Group.progress)
    leave = _forwarded(Group.leave)
    close = _forwarded(Group.close)

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes a window of the inner group, whose operations pass the hooks."""
        if not any(map(self._has_own, _HOOKS)):
            return self.inner._make_window(form, sources)
        what = form.name, form.num_elements, form.dtype
        make = partial(self.inner.window, *what, sources=sources, device=form.device)
        inner = self._call(OperationPlan("window", form.num_elements * form.dtype.itemsize), make)
        return WrappedWindow(inner, self, others(self) if sources is None else list(sources))

    def _issue(self, operation: OperationPlan, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Begins an operation that has a handle; `start` does it in the inner group."""
        return start()

    def _call(self, operation: OperationPlan, act: Callable[[], T]) -> T:
        """Does an operation that is over when it returns."""
        return act()

    def _write(self, window: Window, to: int, one: Write) -> Handle[None]:
        """Begins a write into a window of the inner group."""
        return self._issue(write(self, to, one), partial(window._write, to, one))

    def _wait(self, window: Window, sources: Collection[int], deadline: Deadline | None) -> Sequence[int]:
        """Waits for what its sources write into a window of the inner group."""
        return self._call(OperationPlan("window_wait"), partial(window.wait, deadline))

    @property
    def _wrapper(self) -> GroupWrapper:
        return self


class WrappedWindow(Window):
    """A window of the group inside a wrapper, whose operations pass the wrapper's hooks."""

    def __init__(self, inner: Window, group: GroupWrapper, sources: Collection[int]) -> None:
        self.inner = inner
        for name in Window.__annotations__:
            setattr(self, name, getattr(inner, name))
        self._wrapper = group
        self._sources = sources

    slot = _forwarded(Window.slot)
    filled = _forwarded(Window.filled)
    publish = _forwarded(Window.publish, _publish, "_call")
    reclaim = _forwarded(Window.reclaim)
    fetch = _forwarded(Window.fetch, fetch)
    read = _forwarded(Window.read, read)
    close = _forwarded(Window.close)

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Waits for writes into the inner window."""
        return self._wrapper._wait(self.inner, self._sources, deadline)

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Changes what the inner window publishes; to wait for its readers is one operation."""
        with contextlib.ExitStack() as stack:
            change = self.inner.changing(version)
            self._wrapper._call(OperationPlan("changing"), partial(stack.enter_context, change))
            yield

    def _write(self, to: int, write: Write) -> Handle[None]:
        return self._wrapper._write(self.inner, to, write)


class ClockSleeper:
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
