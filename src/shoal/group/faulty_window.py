"""A window whose writes go wrong as a fault script says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shoal.group.base import Done, Group, Handle, Window
from shoal.group.wrapped_window import Call, Issue, WrappedWindow

Meddle = Callable[[int, torch.Tensor, bool], torch.Tensor | None]
"""What arrives of a tensor that is written to a rank, None for nothing; whether it would be sent again."""


class FaultyWindow(WrappedWindow):
    """Does what `inner` does with what `meddle` leaves of a write."""

    def __init__(self, inner: Window, group: Group, issue: Issue, call: Call, meddle: Meddle) -> None:
        super().__init__(inner, group, issue, call)
        self._meddle = meddle

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
