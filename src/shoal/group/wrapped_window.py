"""A window of a group inside, whose writes pass through the group around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from shoal.core import Deadline
from shoal.group import operations
from shoal.group.base import Group, Handle, Slot, Window
from shoal.group.operations import Operation

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
        return self._issue(operations.write(self._group, "put", to, tensor), start)

    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Through the inner window."""
        start = partial(self.inner.accumulate, to, tensor, weight=weight, mass=mass, note=note)
        return self._issue(operations.write(self._group, "accumulate", to, tensor), start)

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Through the inner window."""
        return self._issue(
            operations.write(self._group, "send", to, tensor), partial(self.inner.send, to, tensor, note=note)
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
