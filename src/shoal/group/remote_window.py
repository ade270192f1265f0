"""A window of a group over several machines: mates write to shared memory, others by calls to one's own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import Done, Handle, Slot
from shoal.group.kernels import Write, WritingWindow, check_write, write_first, write_more
from shoal.tensors.memory import tensor_over

if TYPE_CHECKING:
    from shoal.group.remote import Remote

_HELD_S = 1e-4


class RemoteSlot(Slot):
    """What a worker of another machine has written here; memory of its own from the first write on."""

    def __init__(self, source: int, num_elements: int, dtype: torch.dtype) -> None:
        self.source = source
        self.num_writes = 0
        self.mass = 0.0
        self.note = b""
        self.lock = threading.Lock()
        self.is_held = False
        """By this worker, to read it."""
        self._num_elements = num_elements
        self._dtype = dtype
        self._memory: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """What was written."""
        if self._memory is None:
            self._memory = torch.zeros(self._num_elements, dtype=self._dtype)
        return self._memory

    def clear(self) -> None:
        """The next write starts from nothing."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""

    def take_in(self, write: Write) -> None:
        """One more; the lock is held."""
        if write.kind == "accumulate" and self.num_writes:
            write_more(self.tensor, write)
            self.mass += write.mass
        else:
            write_first(self.tensor, write)
            self.mass = write.mass
        self.note = write.note
        self.num_writes += 1


class Slots:
    """Those of one window at one worker, for sources on other machines."""

    def __init__(self, sources: Sequence[int], num_elements: int, dtype: torch.dtype) -> None:
        self.by_source = {source: RemoteSlot(source, num_elements, dtype) for source in sources}
        self._following = dict.fromkeys(sources, 0)
        """The number of the write that comes next from a source: they are taken in as they were begun."""
        self._size_bytes = num_elements * dtype.itemsize
        self._dtype = dtype

    def check(self, source: int, buffers: Sequence[memoryview]) -> None:
        """UsageError or TensorError for what cannot be written here."""
        if source not in self.by_source:
            raise UsageError(f"there is no slot for rank {source} here.", next_step="name it as a source.")
        if [buffer.nbytes for buffer in buffers] != [self._size_bytes]:
            raise TensorError(
                f"{sum(buffer.nbytes for buffer in buffers)} bytes were written to a window of "
                f"{self._size_bytes}."
            )

    def tensor_in(self, buffers: Sequence[memoryview]) -> torch.Tensor:
        """What came."""
        return tensor_over(buffers[0]).view(self._dtype)

    def try_write(self, source: int, number: int, write: Write) -> bool:
        """Take a write in, unless an earlier one is missing, its slot is held, or full for a send."""
        slot = self.by_source[source]
        if number != self._following[source] or (write.kind == "send" and slot.num_writes):
            return False
        if not slot.lock.acquire(blocking=False):
            return False
        try:
            slot.take_in(write)
            self._following[source] += 1
        finally:
            slot.lock.release()
        return True


class TorchWindow(WritingWindow):
    """One worker's side."""

    def __init__(
        self,
        remote: Remote,
        name: str,
        local: WritingWindow,
        slots: Slots,
        sources: Sequence[int],
    ) -> None:
        self.name = name
        self.num_elements = local.num_elements
        self.dtype = local.dtype
        self._sources = sources
        self._remote = remote
        self._group = remote.group
        self._local = local
        self._slots = slots
        self._num_written: dict[int, int] = {}
        self._is_open = True

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """Held while the block lasts."""
        place = self._check(source)
        if place is not None:
            with self._local.slot(place) as inside:
                inside.source = source
                yield inside
            return
        slot = self._slots.by_source.get(source)
        if slot is None:
            raise UsageError(
                f"rank {self._group.rank} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        if slot.is_held:
            raise UsageError(
                f"rank {self._group.rank} waits for a slot of window {self.name!r}, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        while not slot.lock.acquire(blocking=False):
            time.sleep(_HELD_S)  # a write that is being taken in
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.lock.release()

    def filled(self) -> Sequence[int]:
        """Sources whose slots have something in them."""
        self._check(self._group.rank)
        mates = self._group.ranks_on(self._group.machine)
        inside = [mates[place] for place in self._local.filled()]
        outside = [source for source, slot in self._slots.by_source.items() if slot.num_writes]
        return sorted(inside + outside)

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Until there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = self.filled()
            return bool(found) or self._is_deserted()

        with contextlib.suppress(DeadlineExceeded):
            self._group.wait(look, deadline, f"window {self.name}")
        return found

    def close(self) -> None:
        """Give the memory back; collective."""
        self._check(self._group.rank)
        self._is_open = False
        self._remote.close_window(self.name, self._local)

    def write(self, to: int, write: Write) -> Handle[None]:
        """In shared memory for mates, by a call for others."""
        place = self._check(to)
        if place is not None:
            return self._local.write(place, write)
        check_write(write, self.name, self.num_elements, self.dtype)
        if self._group.is_gone(to, self._group.next_seq):
            return Done(None)
        number = self._num_written.get(to, 0)
        self._num_written[to] = number + 1
        return self._remote.write(self.name, to, number, write)

    def _is_deserted(self) -> bool:
        """Whether nobody is left who could write."""
        members = self._group.members
        return not any(rank in members for rank in self._sources)

    def _check(self, to: int) -> int | None:
        """The place of a rank of this machine; None for others."""
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")
        if not 0 <= to < self._group.size:
            raise UsageError(f"There is no rank {to} among {self._group.size}.", next_step="name a member.")
        return self._group.place_of(to)
