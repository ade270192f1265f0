"""The window of a group of one: a slot in which this worker may write to itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from shoal.core import Deadline, DeadlineExceeded, UsageError
from shoal.group.base import Done, Handle, Slot
from shoal.group.writing import Write, WritingWindow, check_write, write_first, write_more


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
