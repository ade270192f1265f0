"""The least squares that calibrate a cost model: few numbers, none below zero, none of them far-fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Model = Callable[[Sequence[float]], Sequence[float]]
"""From parameters to predictions."""

_ROUNDS = 60
_NUDGE = 1e-4
_LEAST = 1e-12


def fit(model: Model, measured: Sequence[float], beginnings: Sequence[Sequence[float]]) -> list[float]:
    """The parameters, at least zero, whose predictions are nearest to what was measured, in proportion.

    Gauss and Newton's way from each beginning, all of whose entries are above zero; the best end counts.
    """
    target = np.asarray(measured, dtype=float)

    def misses(parameters: Vector) -> Vector:
        predicted: Vector = np.asarray(model(parameters.tolist()), dtype=float)
        off: Vector = predicted / target - 1
        return off

    ends = [_descend(misses, np.asarray(beginning, dtype=float)) for beginning in beginnings]
    best: list[float] = min(ends, key=lambda end: float(np.sum(misses(end) ** 2))).tolist()
    return best


def _descend(misses: Callable[[Vector], Vector], at: Vector) -> Vector:
    scale = at.copy()
    damping = 1e-3
    now = misses(at)
    for _ in range(_ROUNDS):
        slopes = np.stack(
            [(misses(at + step) - now) / _NUDGE for step in np.diag(scale * _NUDGE)], axis=1
        )  # for each parameter, in units of its beginning
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.eye(len(at)), -slopes.T @ now)
        there = np.maximum(at + move * scale, 0.0)
        then = misses(there)
        if float(then @ then) < float(now @ now):
            is_done = float(now @ now) - float(then @ then) < _LEAST * _LEAST
            at, now, damping = there, then, damping / 4
            if is_done:
                break
        else:
            damping *= 8
    return at
