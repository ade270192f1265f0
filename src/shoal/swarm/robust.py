"""Averages that a few liars cannot move far, and what each member counts for.

All are made of operations that round one by one, in an order that the senders' places give: whoever averages
the same bytes gets the same bits, whatever its processor. Audits rest on that.

What a robust average knows is one part of a model: its norms and distances are the part's own. A liar may so
be far off in one part and honest in the others; it gains nothing by that, each part being bounded by itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

CENTERED_CLIP, MEDIAN = "centered-clip", "median"
KINDS = ("", CENTERED_CLIP, MEDIAN)

CLIP_FACTOR = 3.0
WEIGHT_CAP = 4
"""In a robust run nobody counts for more than so many times the median."""
_NUM_CLIPS = 3
_BLOCK = 16_384
"""Elements that stay in the cache while they are averaged."""


def squared_norm(values: Any) -> float:
    """Sums the squares of a vector; not finite where one of its values is not.

    Not by BLAS, whose threads wait for each other on a busy machine.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.einsum("i,i->", values, values))
    if math.isfinite(found) or not np.isfinite(values).all():
        return found
    return float(np.square(values, dtype=np.float64).sum())  # the squares are beyond float32, the values not


def squared_distance(values: Any, center: Any) -> float:
    """Sums the squares of what is between two vectors, with the same bits on all processors.

    By halves: the order of a sum of numpy's is that of the processor's registers.
    """
    found = 0.0
    for begin in range(0, len(values), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        squares = np.subtract(values[block], center[block], dtype=np.float64)
        np.multiply(squares, squares, out=squares)
        while len(squares) > 1:
            half = (len(squares) + 1) // 2
            squares[: len(squares) - half] += squares[half:]
            squares = squares[:half]
        found += float(squares[0])
    return found


def is_finite(values: Any) -> bool:
    """Whether all values are finite: so is their sum, unless it is beyond float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(np.add.reduce(values))) or bool(np.isfinite(values).all())


N = TypeVar("N", int, float)


def capped(values: Sequence[N], floor: N | int = 0) -> list[N]:
    """Has nobody count for more than four times the median, or than four times the floor if that is more."""
    if not values:
        return []
    cap = WEIGHT_CAP * max(statistics.median_low(values), floor)
    return [min(value, cap) for value in values]


def average(kind: str, parts: Sequence[tuple[float, Any, float]], out: Any) -> None:
    """Averages vectors into `out`, each given with its weight and its squared norm.

    Without a kind: by weight, each clipped to three times the median norm. By numpy, in one thread: on a busy
    machine torch's threads wait for each other at every operation.
    """
    rows = [values for _, values, _ in parts]
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == MEDIAN:
            coordinate_median(rows, out)
        elif kind == CENTERED_CLIP:
            centered_clip(rows, [weight for weight, _, _ in parts], out)
        else:
            _clipped_mean(parts, out)


def coordinate_median(rows: Sequence[Any], out: Any) -> None:
    """Takes the median of each element; of two in the middle their mean. Weights do not count.

    By a network of comparisons (Batcher's odd-even merge sort): a dozen times as fast as sorting columns.
    """
    num, pairs = len(rows), _network(len(rows))
    for begin in range(0, len(out), _BLOCK):
        end = begin + _BLOCK
        lines = [np.array(row[begin:end]) for row in rows]
        spare = np.empty_like(lines[0])
        for low, high in pairs:
            np.minimum(lines[low], lines[high], out=spare)
            np.maximum(lines[low], lines[high], out=lines[high])
            lines[low], spare = spare, lines[low]
        if num % 2:
            out[begin:end] = lines[num // 2]
        else:  # halves first: the sum of two large values may be beyond float32
            np.multiply(lines[num // 2 - 1], np.float32(0.5), out=spare)
            lines[num // 2] *= np.float32(0.5)
            np.add(spare, lines[num // 2], out=out[begin:end])
        # of two zeros processors choose the lesser in different ways, and one may have a sign
        out[begin:end] += np.float32(0.0)


def _network(num: int) -> list[tuple[int, int]]:
    """Lists the comparisons that sort so many lines, each with the smaller value's line first."""
    pairs = []
    size = 1
    while size < num:
        step = size
        while step:
            for first in range(step % size, num - step, 2 * step):
                lows = range(first, min(first + step, num - step))
                pairs += [
                    (low, low + step) for low in lows if low // (2 * size) == (low + step) // (2 * size)
                ]
            step //= 2
        size *= 2
    return pairs


def centered_clip(rows: Sequence[Any], weights: Sequence[float], out: Any) -> None:
    """Averages by weight, each row clipped to a ball around where the others are.

    CenteredClip (Karimireddy et al. 2021, section 4.1; Gorbunov et al. 2022): v ← v + Σ w·clip(x − v, τ). The
    center begins at the coordinate median, so it needs no history; the radius τ is the median distance from
    it, which fewer than half cannot make longer than an honest one's. Three times: the center moves by 3·τ
    at most, whatever is sent.
    """
    coordinate_median(rows, out)
    total = sum(weights)
    for _ in range(_NUM_CLIPS if len(rows) > 1 else 0):
        distances = [math.sqrt(squared_distance(row, out)) for row in rows]
        radius = statistics.median_low(distances)
        factors = [
            np.float32(weight / total * (radius / distance if distance > radius else 1.0))
            for weight, distance in zip(weights, distances, strict=True)
        ]
        for begin in range(0, len(out), _BLOCK):
            center = out[begin : begin + _BLOCK]
            moved = np.zeros_like(center)
            for row, factor in zip(rows, factors, strict=True):
                step = row[begin : begin + _BLOCK] - center
                step *= factor
                moved += step
            center += moved


def _clipped_mean(parts: Sequence[tuple[float, Any, float]], out: Any) -> None:
    norms = [math.sqrt(squared) for _, _, squared in parts]
    limit = CLIP_FACTOR * statistics.median(norms)
    total = sum(weight for weight, _, _ in parts)
    factors = [
        weight / total * (limit / norm if limit and norm > limit else 1.0)
        for (weight, _, _), norm in zip(parts, norms, strict=True)
    ]
    arrays = [values for _, values, _ in parts]
    if len(set(factors)) == 1:
        if len(arrays) > 1:
            np.add(arrays[0], arrays[1], out=out)
            for array in arrays[2:]:
                out += array
            out *= np.float32(factors[0])
        else:
            np.multiply(arrays[0], np.float32(factors[0]), out=out)
        return
    np.multiply(arrays[0], np.float32(factors[0]), out=out)
    scaled = np.empty_like(out)
    for array, factor in zip(arrays[1:], factors[1:], strict=True):
        np.multiply(array, np.float32(factor), out=scaled)
        out += scaled
