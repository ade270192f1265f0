"""How the examples of a labelled set are divided among workers: alike for all, or each with other classes.

Pure; every worker draws the same division of the same seed, and takes its own part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core import UsageError

Indices = npt.NDArray[np.int64]
IID = "iid"
_DIRICHLET = "dirichlet"


def check_split(text: str) -> float | None:
    """The concentration of 'dirichlet:0.1', None for 'iid'; UsageError for anything else."""
    name, _, number = text.partition(":")
    if text == IID:
        return None
    try:
        concentration = float(number)
    except ValueError:
        concentration = 0.0
    if name != _DIRICHLET or not 0 < concentration < float("inf"):
        raise UsageError(
            f"There is no split {text!r}.",
            next_step="say iid, or dirichlet:0.1 (smaller: fewer classes for each worker).",
        )
    return concentration


def divide(labels: npt.NDArray[Any], num_parts: int, split: str, seed: int) -> list[Indices]:
    """Indices for each part; all parts are of one size, and what does not go round is nobody's.

    'dirichlet:a' draws for each part how much it has of each class from a Dirichlet distribution whose every
    parameter is a; where a class is used up, the part takes more of its others, and then of what is left.
    """
    concentration = check_split(split)
    num_each = len(labels) // num_parts
    if num_each == 0:
        raise UsageError(
            f"{len(labels)} examples cannot be divided among {num_parts} workers.",
            next_step="start fewer workers.",
        )
    generator = np.random.default_rng(seed)
    if concentration is None:
        order = generator.permutation(len(labels))
        return [order[part * num_each : (part + 1) * num_each] for part in range(num_parts)]
    classes = np.unique(labels)
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in classes]
    parts = []
    for _ in range(num_parts):
        shares = generator.dirichlet([concentration] * len(classes))
        counts = _counts(generator, shares, np.array([len(pool) for pool in pools]), num_each)
        parts.append(np.concatenate([pool[:count] for pool, count in zip(pools, counts, strict=True)]))
        pools = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
    return parts


def _counts(
    generator: np.random.Generator, shares: npt.NDArray[np.float64], left: Indices, num_wanted: int
) -> Indices:
    """How many of each class, `num_wanted` in all, by these shares and never more than are left."""
    counts = np.zeros_like(left)
    while (num_missing := num_wanted - int(counts.sum())) > 0:
        free = left - counts
        weights = np.where(free > 0, shares, 0.0)
        if weights.sum() < 1e-12:
            weights = free.astype(np.float64)
        drawn = generator.multinomial(num_missing, weights / weights.sum())
        counts += np.minimum(drawn, free)
    return counts
