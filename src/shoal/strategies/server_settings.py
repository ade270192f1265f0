"""The numbers of an optimizer's groups (lr, momentum, betas): a worker's schedule, obeyed on the servers.

They travel as one list of numbers. What is no number (nesterov, foreach) stays as it was at attach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerNumbers:
    """Those of one optimizer, in an order that is the same wherever it was built alike."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._places = [
            (number, name, position)
            for number, group in enumerate(optimizer.param_groups)
            for name in sorted(group)
            if name != "params"
            for position in _positions(group[name])
        ]
        self._last: list[float] | None = None

    @property
    def names(self) -> list[tuple[int, str, int | None]]:
        """Group, name, and the position in a tuple, of each."""
        return self._places

    def read(self, rate_factor: float = 1.0) -> list[float]:
        """As they are now, learning rates times a factor."""
        groups = self._optimizer.param_groups
        return [
            _number(groups[number][name], position) * (rate_factor if name == "lr" else 1.0)
            for number, name, position in self._places
        ]

    def write(self, values: Sequence[float], rate_factor: float = 1.0) -> None:
        """Make them what they were elsewhere; nearly free when they are that already."""
        values = [
            value * (rate_factor if name == "lr" else 1.0)
            for value, (_, name, _) in zip(values, self._places, strict=True)
        ]
        if values == self._last:
            return
        self._last = values
        for value, (number, name, position) in zip(values, self._places, strict=True):
            group = self._optimizer.param_groups[number]
            group[name] = _replaced(group[name], position, value)


def _positions(value: Any) -> Sequence[int | None]:
    """Where there are numbers in it; None stands for itself."""
    if isinstance(value, list | tuple):
        return [place for place, part in enumerate(value) if _is_number(part)]
    return [None] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, position: int | None) -> float:
    return float(value if position is None else value[position])


def _replaced(value: Any, position: int | None, number: float) -> Any:
    if position is not None:
        parts = [_replaced(part, None, number) if at == position else part for at, part in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number
