"""The group of one, and what any member of a group inside one process has: ordinary memory, and windows.

For one worker alone whatever is sent has arrived at once, and who waits for what has not come waits for
itself. Groups in virtual time (`shoal.simulate.group`) have the same windows, which others write to as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import (
    PENDING,
    Done,
    Group,
    GroupStats,
    Handle,
    Loss,
    Pending,
    PolledHandle,
    Reduction,
    Snapshot,
    Window,
    WindowForm,
    WindowSlot,
    Write,
    check_rank,
    has_left,
    held_by_itself,
)
from shoal.group.functions import others, spread_over_ranks
from shoal.group.kernels import CopiedSnapshot, MemorySlot, check_reduction, check_write, copy_out
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")


class LocalGroup(Group):
    """One member's side of a group inside one process: memory is ordinary, and others have copies of it."""

    def __init__(self, rank: int, machines: Sequence[int], patience: float = 1.0) -> None:
        self.rank = rank
        self.size = len(machines)
        self.machine = machines[rank]
        self.machines = machines
        self.num_machines = max(machines) + 1
        self.patience = patience
        self._has_left = False

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes ordinary memory, which torch aligns; nobody is waited for."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Does nothing: the memory goes with its last tensor."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Does nothing: nobody else reads it."""

    def _check_member(self) -> None:
        """Raises UsageError for whoever does something after it has left."""
        if self.rank not in self.members:
            raise has_left(self.rank)

    def _prepare_exchange(
        self, tensor: torch.Tensor, between: Weights | MachineWeights, out: torch.Tensor | None
    ) -> tuple[Weights, torch.Tensor]:
        """Finds the weights of ranks, and where the result goes; TensorError where it does not fit there."""
        weights = spread_over_ranks(self, between)
        weights.check(self.rank, self.size)
        result = tensor if out is None else out
        if tensor.shape != result.shape or tensor.dtype != result.dtype:
            raise TensorError(
                f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into "
                f"{result.dtype} of shape {list(result.shape)}."
            )
        return weights, result


class SoloGroup(LocalGroup):
    """One worker alone; every operation is over when it returns."""

    lost: Mapping[int, Loss] = MappingProxyType({})

    def __init__(self, patience: float = 1.0) -> None:
        super().__init__(0, (0,), patience)
        self._windows: dict[str, LocalWindow] = {}

    @property
    def members(self) -> Sequence[int]:
        """Lists this worker, until it leaves."""
        return () if self._has_left else (0,)

    @property
    def stats(self) -> GroupStats:
        """Counts nothing: nobody is sent anything, nor waited for."""
        return GroupStats(0, 0, (0.0,), (0,), (0,))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        self._check_member()
        check_reduction(tensor, op)
        return Done(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        self._check_member()
        check_rank(root, self.size)
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Copies the tensor into a list of one."""
        self._check_member()
        return Done([tensor.detach().clone()])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Multiplies the tensor by one's own weight."""
        self._check_member()
        weights, result = self._prepare_exchange(tensor, weights, out)
        with torch.no_grad():
            if out is not None:
                out.copy_(tensor)
            return Done(result if weights.own == 1 else result.mul_(weights.own))

    def barrier(self) -> Handle[None]:
        """Is over at once."""
        self._check_member()
        return Done(None)

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes a window that this worker may write to itself, if it is among the sources."""
        self._check_member()
        for rank in sources or ():
            check_rank(rank, self.size)
        before = self._windows.get(form.name)
        window = LocalWindow(self, form, others(self) if sources is None else sources, before)
        self._windows[form.name] = window
        return window

    def progress(self) -> None:
        """Does nothing: nothing is ever under way."""

    def leave(self) -> None:
        """Takes part in nothing more; what waits for this worker is over."""
        if not self._has_left:
            self._has_left = True
            for window in self._windows.values():
                window.drop_writes()

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; there is nothing to give back."""
        self.leave()


class _QueueingSlot(MemorySlot):
    """A slot whose writes are done in order, and wait while it is held, or full and to be sent to."""

    is_held = False

    def __init__(self, source: int, form: WindowForm) -> None:
        super().__init__(source, form)
        self._queue: list[tuple[Write, Callable[[], None]]] = []

    def offer(self, write: Write, done: Callable[[], None]) -> None:
        self._queue.append((write, done))
        self.settle()

    def settle(self) -> None:
        """Does what writes can be done."""
        while self._queue and not self.is_held and self.may_take(self._queue[0][0]):
            write, done = self._queue.pop(0)
            self.take(write)
            done()

    def drop(self) -> None:
        while self._queue:
            self._queue.pop(0)[1]()


class LocalWindow(Window):
    """One member's window, in ordinary memory; here that of a worker to which nobody else writes.

    One that is made again under a name that is in use, where there was one `before`, goes on with what that
    has published.
    """

    def __init__(
        self, group: LocalGroup, form: WindowForm, sources: Collection[int], before: LocalWindow | None
    ) -> None:
        super().__init__(form)
        self._group = group
        self._rank = group.rank
        self._slots = {source: _QueueingSlot(source, form) for source in sorted(sources)}
        self._published: torch.Tensor | None = None if before is None else before._published
        self._version: int = -1 if before is None else before._version
        self._is_changing = False

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Is over when it is in the slot; at once for one that is gone."""
        self._check_write(to, write)
        if to not in self._group.members:
            return Done(None)
        over: list[None] = []
        sent = dataclasses.replace(write, tensor=write.tensor.detach().clone())
        self._slot_of(to).offer(sent, lambda: over.append(None))
        return _WaitForOneself(f"{write.kind} into {self.name!r}", lambda: None if over else PENDING)

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[WindowSlot]:
        """Holds a slot; what is written meanwhile is done after the block."""
        self._check_open()
        slot = self._slot_of(source)
        self._look_up()
        if slot.is_held:
            raise held_by_itself(self._rank, f"slot of rank {source} in window {self.name!r}")
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.settle()

    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them."""
        self._check_open()
        return self._filled()

    def _filled(self) -> list[int]:
        return [source for source, slot in self._slots.items() if slot.num_writes]

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Lists what is there now: nobody else is there to write."""
        return self.filled()

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Lets others copy the tensor as it is when they ask."""
        self._begin()
        check_write(Write("put", tensor), self)
        self._published, self._version = tensor.detach(), version
        self._changed()

    def reclaim(self, version: int) -> None:
        """Does nothing more than to check: snapshots are copies."""
        if self._published is not None and self._version <= version:
            raise UsageError(
                f"Version {version} of {self.name!r} is the newest that is published, and cannot be "
                "reclaimed.",
                next_step="publish a newer version first.",
            )

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Has readers wait until the block has ended, and for good if it raises."""
        self._begin()
        self._check_change(None if self._published is None else self._version, version)
        self._is_changing = True
        yield
        self._is_changing = False
        self._version = version
        self._changed()

    def snapshot(self, least_version: int = 0) -> CopiedSnapshot | None:
        """Copies what is published; None where it is older than asked for, or is being changed."""
        if self._published is None or self._is_changing or self._version < least_version:
            return None
        return CopiedSnapshot(self._rank, self._version, self._published.clone())

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Copies what this worker itself has published."""
        check_rank(peer, self._group.size)
        self._begin()
        return Done(self.snapshot())

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies as `fetch` does, once the version is there, into a tensor."""
        check_rank(peer, self._group.size)
        self._begin()

        def look() -> int | Pending | None:
            found = self.snapshot(version) if self._is_open else None
            if found is not None:
                return copy_out(found, into.detach(), self.name)
            has_nothing = version == 0 and self._published is None
            return None if has_nothing or peer not in self._group.members else PENDING

        handle = _WaitForOneself(f"read {self.name!r}", look)
        handle.is_done()
        return handle

    def close(self) -> None:
        """Drops what was not taken or comes later, and what was published."""
        if self._is_open:
            self._is_open = False
            self._published = None
            self.drop_writes()

    def drop_writes(self) -> None:
        """Ends writes that wait: nobody will ever take them."""
        for slot in self._slots.values():
            slot.drop()

    def _begin(self) -> None:
        """Comes to this worker's own time, unless it may not do anything more."""
        self._check_open()
        self._group._check_member()
        self._look_up()

    def _look_up(self) -> None:
        """Lets others do what comes before; here nobody is there."""

    def _changed(self) -> None:
        """Lets those go on who wait for what is published; here nobody is there."""

    def _check_write(self, to: int, write: Write) -> None:
        self._check_open()
        check_write(write, self)
        check_rank(to, self._group.size)

    def _slot_of(self, source: int) -> _QueueingSlot:
        if source not in self._slots:
            raise self._no_slot(self._rank, source)
        return self._slots[source]


class _WaitForOneself(PolledHandle[T]):
    """Is over when an attempt has succeeded; nobody else can bring that about, so `wait` never waits."""

    def __init__(self, what: str, attempt: Callable[[], T | Pending]) -> None:
        super().__init__(attempt)
        self._what = what

    def wait(self, deadline: Deadline | None = None) -> T:
        if not self.is_done():
            raise DeadlineExceeded(
                f"{self._what}: this worker waits for itself, and nobody else can make it possible.",
                next_step="first do what it waits for, then wait.",
            )
        return super().wait()
