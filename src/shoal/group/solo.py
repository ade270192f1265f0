"""The group of one, which has nothing to wait for and nobody to lose, and windows in memory of one process.

A `LocalWindow` keeps its slots and what it publishes in ordinary tensors. In the group of one it has at most
one slot, in which this worker writes to itself; the group in virtual time adds the way between members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import (
    Done,
    Group,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Slot,
    Snapshot,
    T,
    Window,
    Write,
)
from shoal.group.functions import spread_over_ranks
from shoal.group.kernels import CopiedSnapshot, MemorySlot, check_reduction, check_write, copy_out
from shoal.topology import MachineWeights, Weights

Form: TypeAlias = tuple[int, torch.dtype, torch.device | None]
"""Of a window's slots: the number of elements, their type, and where they lie."""
_NOBODY: Mapping[int, Loss] = MappingProxyType({})


class SoloGroup(Group):
    """One worker alone; every operation is over when it returns."""

    def __init__(self, patience: float = 1.0) -> None:
        self.rank = 0
        self.size = 1
        self.machine = 0
        self.machines = (0,)
        self.num_machines = 1
        self.patience = patience
        self._has_left = False

    @property
    def members(self) -> Sequence[int]:
        """Rank 0, until it leaves."""
        return () if self._has_left else (0,)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Nobody can be lost."""
        return _NOBODY

    @property
    def stats(self) -> GroupStats:
        """Nothing is sent, and nobody is waited for."""
        return GroupStats(0, 0, (0.0,))

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes ordinary memory, which torch aligns."""
        check_member(self)
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Does nothing: the memory goes with its last tensor."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        check_member(self)
        check_reduction(tensor, op)
        return Done(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        check_member(self)
        _check_rank(root)
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Copies the tensor."""
        check_member(self)
        return Done([tensor.detach().clone()])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Multiplies the tensor by one's own weight."""
        check_member(self)
        weights = spread_over_ranks(self, weights)
        weights.check(self.rank, self.size)
        result = tensor if out is None else out
        check_alike(tensor, result)
        with torch.no_grad():
            if out is not None:
                out.copy_(tensor)
            return Done(result if weights.own == 1 else result.mul_(weights.own))

    def settle(self, tensor: torch.Tensor) -> None:
        """Does nothing: nobody reads it."""

    def barrier(self) -> Handle[None]:
        """Is over at once."""
        check_member(self)
        return Done(None)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
        device: torch.device | None = None,
    ) -> Window:
        """Makes a window with a slot for oneself, if rank 0 is named as a source."""
        check_member(self)
        has_slot = sources is not None and 0 in sources
        own = [0] if has_slot else []
        return _SoloWindow(self, Publication(0, name), (num_elements, dtype, device), own)

    def progress(self) -> None:
        """Does nothing: nothing is ever under way."""

    def leave(self) -> None:
        """Takes part in nothing more."""
        self._has_left = True

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; nobody is there to find this worker lost."""
        self.leave()


def check_member(group: Group) -> None:
    """UsageError for whoever does something after it has left."""
    if group.rank not in group.members:
        raise UsageError(
            f"rank {group.rank} has left the group and takes part in nothing more.",
            next_step="make it the last thing to leave or to close.",
        )


def check_alike(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """TensorError when the result of an exchange does not fit where it should go."""
    if tensor.shape != out.shape or tensor.dtype != out.dtype:
        raise TensorError(
            f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into {out.dtype} of "
            f"shape {list(out.shape)}."
        )


def _check_rank(rank: int) -> None:
    if rank != 0:
        raise UsageError(f"There is no rank {rank} in a group of one.", next_step="name rank 0.")


class Publication:
    """What one member has published under one name, and those that wait for a version of it."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self._tensor: torch.Tensor | None = None
        self._version = -1
        self._is_changing = False
        self._waiting: list[Callable[[], bool]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is published."""
        return self._tensor is None

    def publish(self, tensor: torch.Tensor | None, version: int) -> None:
        """Takes the place of what was published before; None withdraws it."""
        self._tensor, self._version = None if tensor is None else tensor.detach(), version
        self.look()

    def check_reclaim(self, version: int) -> None:
        """UsageError for the newest version; nobody has more than copies of any other."""
        if self._tensor is not None and self._version <= version:
            raise UsageError(
                f"Version {version} of {self.name!r} is the newest that is published, and cannot be "
                "reclaimed.",
                next_step="publish a newer version first.",
            )

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Has what is published be of that version when the block has ended well."""
        if self._tensor is None:
            raise UsageError(
                f"Nothing is published as {self.name!r}, so it cannot be changed.",
                next_step="publish it first.",
            )
        if version < self._version:
            raise UsageError(
                f"{self.name!r} is of version {self._version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._is_changing = True
        yield
        self._is_changing = False
        self._version = version
        self.look()

    def snapshot(self, least_version: int = 0) -> CopiedSnapshot | None:
        """Copies what is published; None where it is older than asked for, or is being changed."""
        if self._tensor is None or self._is_changing or self._version < least_version:
            return None
        return CopiedSnapshot(self.rank, self._version, self._tensor.clone())

    def when(self, attempt: Callable[[], bool]) -> None:
        """Tries now, and whenever something is published or changed, until it is true."""
        if not attempt():
            self._waiting.append(attempt)

    def look(self) -> None:
        """Tries those that wait: it has changed, or its member is gone."""
        self._waiting = [attempt for attempt in self._waiting if not attempt()]


class QueueingSlot(MemorySlot):
    """A slot whose writes are done in order, and wait while it is held, or full and to be sent to."""

    def __init__(
        self, source: int, num_elements: int, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__(source, num_elements, dtype, device)
        self.is_held = False
        self._queue: list[tuple[Write, Callable[[], None]]] = []

    def offer(self, write: Write, done: Callable[[], None]) -> None:
        """Takes a write when its time has come, and calls `done` then."""
        self._queue.append((write, done))
        self.settle()

    def settle(self) -> None:
        """Does what writes can be done."""
        while self._queue and not self.is_held and self.may_take(self._queue[0][0]):
            write, done = self._queue.pop(0)
            self.take(write)
            done()

    def drop(self) -> None:
        """Forgets writes that wait: nobody will ever take them."""
        while self._queue:
            self._queue.pop(0)[1]()


class LocalWindow(Window):
    """A window whose slots, and what it publishes, lie in memory of this process."""

    def __init__(self, group: Group, publication: Publication, form: Form, sources: Collection[int]) -> None:
        self.name = publication.name
        self.num_elements, self.dtype, device = form
        self.device = device or torch.device("cpu")
        self._group = group
        self._rank = group.rank
        self._publication = publication
        self._slots = {source: QueueingSlot(source, *form) for source in sorted(sources)}
        self._is_open = True

    def _begin(self) -> None:
        """Comes to this worker's own time, where members have one."""

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """Holds a slot; what is written meanwhile is done after the block."""
        slot = self._slot_of(source)
        self._begin()
        if slot.is_held:
            raise UsageError(
                f"rank {self._rank} waits for slot of rank {source} in window {self.name!r}, which it holds "
                "itself.",
                next_step="end the first `with` block before the second begins.",
            )
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.settle()

    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them."""
        self._check_open()
        return [source for source, slot in self._slots.items() if slot.num_writes]

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Lets others copy the tensor as it is when they ask."""
        self._check_usable()
        check_write(Write("put", tensor), self.name, self.num_elements, self.dtype)
        self._begin()
        self._publication.publish(tensor, version)

    def reclaim(self, version: int) -> None:
        """Does nothing more than to check: snapshots are copies."""
        self._publication.check_reclaim(version)

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Has readers wait until the block has ended."""
        self._check_usable()
        self._begin()
        with self._publication.changing(version):
            yield

    def close(self) -> None:
        """Drops what was not taken, and what was published."""
        if self._is_open:
            self._is_open = False
            self._publication.publish(None, -1)
            for slot in self._slots.values():
                slot.drop()

    def _slot_of(self, source: int) -> QueueingSlot:
        self._check_open()
        if source not in self._slots:
            raise no_slot(self._rank, source, self.name)
        return self._slots[source]

    def _check_usable(self) -> None:
        self._check_open()
        check_member(self._group)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")


def no_slot(rank: int, source: int, name: str) -> UsageError:
    """Makes the error of whoever uses a slot that a window does not have."""
    return UsageError(
        f"rank {rank} has no slot for rank {source} in window {name!r}.",
        next_step="name it among the sources when the window is made.",
    )


class _SoloWindow(LocalWindow):
    """A window in which everything is done at once, or waits for this worker itself."""

    def _write(self, to: int, write: Write) -> Handle[None]:
        _check_rank(to)
        slot = self._slot_of(to)
        check_write(write, self.name, self.num_elements, self.dtype)
        handle: _Awaited[None] = _Awaited(f"The slot of rank 0 in window {self.name!r} to be free")
        slot.offer(write, lambda: handle.resolve(None))
        return handle

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Lists as `filled`: nothing comes while this worker waits."""
        return self.filled()

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Copies what this worker itself has published."""
        self._check_usable()
        _check_rank(peer)
        return Done(self._publication.snapshot())

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies what this worker itself has published, once it is of that version."""
        self._check_usable()
        _check_rank(peer)
        handle: _Awaited[int | None] = _Awaited(f"Version {version} of {self.name!r} to be published")

        def attempt() -> bool:
            snapshot = self._publication.snapshot(version)
            if snapshot is not None:
                handle.resolve(copy_out(snapshot, into.detach(), self.name))
            elif self._publication.is_empty and not version:
                handle.resolve(None)
            return handle.is_done()

        self._publication.when(attempt)
        return handle


class _Awaited(Handle[T]):
    """Something that only this worker itself can do: to wait for it is an error."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._result: list[T] = []

    def resolve(self, result: T) -> None:
        """Gives it its result."""
        self._result.append(result)

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result; DeadlineExceeded at once where there is none."""
        if not self._result:
            raise DeadlineExceeded(
                f"{self._what}: nobody else is there to see to it.", next_step="do it first, then wait."
            )
        return self._result[0]

    def is_done(self) -> bool:
        """Tells whether it has its result."""
        return bool(self._result)
