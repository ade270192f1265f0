"""A window whose writes go wrong as a fault script says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shoal.core import Deadline
from shoal.group.base import Done, Group, Handle, Window
from shoal.group.operations import Operation
from shoal.group.wrapped_window import Issue, WrappedWindow

Meddle = Callable[[int, torch.Tensor, bool], torch.Tensor | None]
"""What arrives of a tensor that is written to a rank, None for nothing; whether it would be sent again."""


Listen = Callable[[Deadline | None], Sequence[int]]
"""Waits as a window does."""


class FaultyWindow(WrappedWindow):
    """Does what `inner` does with what `meddle` leaves of a write; `listen` waits for others'."""

    def __init__(self, inner: Window, group: Group, issue: Issue, meddle: Meddle, listen: Listen) -> None:
        super().__init__(inner, group, issue, _at_once)
        self._meddle = meddle
        self._listen = listen

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Not for those beyond a partition, unless there is a deadline."""
        return self._listen(deadline)

    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Not at all when it is dropped."""
        put = partial(super().put, weight=weight, mass=mass, note=note)
        return self._write(to, tensor, put, is_sent_again=False)

    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Not at all beyond a partition."""
        accumulate = partial(super().accumulate, weight=weight, mass=mass, note=note)
        return self._write(to, tensor, accumulate, is_sent_again=True)

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Not at all beyond a partition."""
        return self._write(to, tensor, partial(super().send, note=note), is_sent_again=True)

    def _write(
        self,
        to: int,
        tensor: torch.Tensor,
        write: Callable[[int, torch.Tensor], Handle[None]],
        *,
        is_sent_again: bool,
    ) -> Handle[None]:
        arriving = self._meddle(to, tensor, is_sent_again)
        return Done(None) if arriving is None else write(to, arriving)


def _at_once(operation: Operation, act: Callable[[], Sequence[int]]) -> Sequence[int]:
    return act()
