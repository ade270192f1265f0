"""The group of one: nothing to wait for, nobody to lose.

Its window has one slot, in which this worker may write to itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Slot, Snapshot
from shoal.group.kernels import (
    Write,
    WritingWindow,
    check_reduction,
    check_write,
    copy_out,
    write_first,
    write_more,
)
from shoal.topology import Weights

_NOBODY: Mapping[int, Loss] = MappingProxyType({})


class SoloGroup(Group):
    """One worker alone; every operation is over when it returns."""

    def __init__(self, patience: float = 1.0) -> None:
        self.rank = 0
        self.size = 1
        self.machine = 0
        self.num_machines = 1
        self.patience = patience
        self._has_left = False
        self._published: dict[str, _SoloSnapshot] = {}
        self._reclaimed: dict[str, int] = {}
        self._held: list[str] = []

    @property
    def members(self) -> Sequence[int]:
        """Oneself, until one leaves."""
        return () if self._has_left else (0,)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Nobody."""
        return _NOBODY

    @property
    def waited_s(self) -> Sequence[float]:
        """No time at all."""
        return (0.0,)

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """None: there is nobody to send to."""
        return 0, 0

    def machine_of(self, rank: int) -> int:
        """The only one."""
        _check_rank(rank)
        return 0

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Ordinary memory, which torch aligns."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Nothing: the memory goes with its last tensor."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """The tensor as it is."""
        self._check_member()
        check_reduction(tensor, op)
        return Done(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """The tensor as it is."""
        self._check_member()
        _check_rank(root)
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """A copy of the tensor."""
        self._check_member()
        return Done([tensor.detach().clone()])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """`own` times the tensor."""
        self._check_member()
        weights.check(self.rank, self.size)
        with torch.no_grad():
            if out is not None:
                _check_alike(tensor, out)
                out.copy_(tensor)
            result = tensor if out is None else out
            return Done(result if weights.own == 1 else result.mul_(weights.own))

    def settle(self, tensor: torch.Tensor) -> None:
        """Nothing: nobody reads it."""

    def barrier(self) -> Handle[None]:
        """All have come."""
        self._check_member()
        return Done(None)

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """For oneself to fetch."""
        self._check_member()
        self._published[name] = _SoloSnapshot(tensor, version, self._reclaimed, name)

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots of this version and older ones are void."""
        newest = self._published.get(name)
        if newest is not None and newest.version <= version:
            raise UsageError(
                f"Version {version} of {name!r} is the newest that is published, and cannot be reclaimed.",
                next_step="publish a newer version first.",
            )
        self._reclaimed[name] = version

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """What this worker itself has published."""
        _check_rank(peer)
        return Done(self._published.get(name))

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Nobody else reads it meanwhile."""
        self._check_member()
        published = self._published.get(name)
        if published is None:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        if version < published.version:
            raise UsageError(
                f"{name!r} is of version {published.version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._reclaimed[name] = published.version
        yield
        self._published[name] = _SoloSnapshot(published.tensor, version, self._reclaimed, name)

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Of what this worker itself has published; a version that there is not yet is a DeadlineExceeded."""
        _check_rank(peer)
        return _SoloRead(self._published, name, into.detach(), version)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> WritingWindow:
        """With a slot for oneself, if that is asked for."""
        self._check_member()
        return SoloWindow(name, num_elements, dtype, has_slot=sources is not None and 0 in sources)

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Nobody else wants it."""
        _check_rank(owner)
        if name in self._held:
            raise UsageError(
                f"rank 0 waits for mutex {name!r} of rank 0, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        self._held.append(name)
        try:
            yield
        finally:
            self._held.remove(name)

    def progress(self) -> None:
        """Nothing is ever under way."""

    def leave(self) -> None:
        """Take part in nothing more."""
        self._has_left = True
        self._published.clear()

    def close(self) -> None:
        """Leave."""
        self.leave()

    def abandon(self) -> None:
        """Nobody is there to find this worker lost."""
        self.leave()

    def _check_member(self) -> None:
        if self._has_left:
            raise UsageError(
                "rank 0 has left the group and takes part in nothing more.",
                next_step="make it the last thing to leave or to close.",
            )


class _SoloSnapshot(Snapshot):
    def __init__(self, tensor: torch.Tensor, version: int, reclaimed: Mapping[str, int], name: str) -> None:
        self.rank = 0
        self.version = version
        self.tensor = tensor
        self._reclaimed = reclaimed
        self._name = name

    def is_intact(self) -> bool:
        """Until its version is reclaimed."""
        return self._name not in self._reclaimed or self._reclaimed[self._name] < self.version


class _SoloRead(Handle[int | None]):
    def __init__(
        self, published: Mapping[str, _SoloSnapshot], name: str, into: torch.Tensor, version: int
    ) -> None:
        self._published = published
        self._name = name
        self._into = into
        self._version = version
        self._result: list[int | None] = []
        self.is_done()

    def wait(self, deadline: Deadline | None = None) -> int | None:
        """The version that was copied."""
        if not self.is_done():
            raise DeadlineExceeded(
                f"Version {self._version} of {self._name!r} is not published, and nobody else is there to do "
                "it.",
                next_step="publish it, or change it, first.",
            )
        return self._result[0]

    def is_done(self) -> bool:
        """Once it is of that version."""
        found = self._published.get(self._name)
        if not self._result and found is None and not self._version:
            self._result.append(None)
        elif not self._result and found is not None and found.version >= self._version:
            self._result.append(copy_out(found, self._into, self._name))
        return bool(self._result)


def _check_rank(rank: int) -> None:
    if rank != 0:
        raise UsageError(f"There is no rank {rank} in a group of one.", next_step="name rank 0.")


def _check_alike(tensor: torch.Tensor, out: torch.Tensor) -> None:
    if tensor.shape != out.shape or tensor.dtype != out.dtype:
        raise TensorError(
            f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into {out.dtype} of "
            f"shape {list(out.shape)}."
        )


class SoloWindow(WritingWindow):
    """`SoloGroup.window` makes one; it has a slot only when rank 0 is named as a source."""

    def __init__(self, name: str, num_elements: int, dtype: torch.dtype, *, has_slot: bool) -> None:
        self.name = name
        self.num_elements = num_elements
        self.dtype = dtype
        self._slot = _SoloSlot(torch.zeros(num_elements, dtype=dtype)) if has_slot else None
        self._is_held = False
        self._waiting: list[_Waiting] = []
        self._is_open = True

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """What was written to oneself."""
        slot = self._own_slot(source)
        if self._is_held:
            raise UsageError(
                f"rank 0 waits for slot of rank 0 in window {self.name!r}, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        self._is_held = True
        try:
            yield slot
        finally:
            self._is_held = False

    def filled(self) -> Sequence[int]:
        """Rank 0, or nobody."""
        self._check_open()
        self._progress()
        return [0] if self._slot is not None and self._slot.num_writes else []

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """As `filled`: nothing comes while this worker waits."""
        return self.filled()

    def close(self) -> None:
        """What was not written is dropped."""
        self._is_open = False
        self._slot = None
        self._waiting.clear()

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")

    def _own_slot(self, rank: int) -> _SoloSlot:
        self._check_open()
        if rank != 0:
            raise UsageError(f"There is no rank {rank} in a group of one.", next_step="name rank 0.")
        if self._slot is None:
            raise UsageError(
                f"rank 0 has no slot for rank 0 in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        return self._slot

    def write(self, to: int, write: Write) -> Handle[None]:
        """At once, outside of a `slot` block; nobody else could empty a slot for a send."""
        self._own_slot(to)
        check_write(write, self.name, self.num_elements, self.dtype)
        self._waiting.append(_Waiting(self, write))
        handle = self._waiting[-1]
        return Done(None) if handle.is_done() else handle

    def _progress(self) -> None:
        while self._waiting and self._slot is not None and self._slot.may_take(self._waiting[0].write):
            if self._is_held:
                break
            self._slot.take(self._waiting.pop(0).write)


class _Waiting(Handle[None]):
    def __init__(self, window: SoloWindow, write: Write) -> None:
        self.write = write
        self._window = window

    def wait(self, deadline: Deadline | None = None) -> None:
        """DeadlineExceeded at once where it could only wait for itself."""
        if not self.is_done():
            raise DeadlineExceeded(
                f"The slot of rank 0 in window {self._window.name!r} is full or held, and nobody else is "
                "there to change that.",
                next_step="take what is in it first.",
            )

    def is_done(self) -> bool:
        """After those before it."""
        self._window._progress()
        return all(waiting is not self for waiting in self._window._waiting)


class _SoloSlot(Slot):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.source = 0
        self.tensor = tensor
        self.clear()

    def may_take(self, write: Write) -> bool:
        """A `send` waits for an empty slot."""
        return write.kind != "send" or self.num_writes == 0

    def take(self, write: Write) -> None:
        """One write."""
        has_more = write.kind == "accumulate" and self.num_writes > 0
        (write_more if has_more else write_first)(self.tensor, write)
        self.mass = write.mass + (self.mass if has_more else 0.0)
        self.note = write.note
        self.num_writes += 1

    def clear(self) -> None:
        """The memory is left as it is."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""
