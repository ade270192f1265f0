"""How fast a topology brings ranks to agree: its spectral gap, and the turns until they do.

Both follow what is left of a disagreement, which is `(I − 11ᵀ/n) W` applied turn by turn: for rows that sum
to 1 this product forgets nothing but the common value, so matrices need be neither symmetric nor doubly
stochastic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.checks import each_matrix
from shoal.topology.plan import Matrix, Topology

_LONGEST_PERIOD = 10_000
_ROUND_OFF = 1e-12
"""A turn that leaves less than this of a disagreement leaves none: the rest is the arithmetic's."""


def spectral_gap(topology: Topology | npt.ArrayLike) -> float:
    """`1 − ρ`, by how much a disagreement shrinks in a turn in the long run; 0 never, 1 at once.

    ρ is the second-largest modulus of an eigenvalue of W. With several turns, the same of the product over a
    period, its `period`-th root. The gap is 1 where one period ends in exact agreement.
    """
    left: Matrix | None = None
    log_scale, num_turns = 0.0, 0
    for step in _disagreements(topology):
        left = step if left is None else step @ left
        num_turns += 1
        norm = float(np.linalg.norm(left))
        if norm < _ROUND_OFF:
            return 1.0
        left, log_scale = left / norm, log_scale + math.log(norm)
    assert left is not None
    modulus = float(abs(np.linalg.eigvals(left)).max())
    if modulus < _ROUND_OFF:
        return 1.0
    gap = 1 - math.exp((log_scale + math.log(modulus)) / num_turns)
    return gap if gap > _ROUND_OFF else 0.0


def consensus_time(topology: Topology | npt.ArrayLike, reduction: float = 1e-3) -> float:
    """Turns, counted from turn 0, until the worst disagreement is at most `reduction` of what it was.

    The disagreement is the Euclidean distance from the average, over all starts. `math.inf` when some start
    never gets there.
    """
    if not 0 < reduction < 1:
        raise UsageError(
            f"a disagreement cannot be reduced to {reduction} of itself.",
            next_step="give a part of 1, as 1e-3.",
        )
    left, num_turns = None, 0
    for step in _disagreements(topology):
        left = step if left is None else step @ left
        num_turns += 1
        if _norm(left) <= reduction:
            return 0 if len(left) == 1 else num_turns
    assert left is not None
    if not spectral_gap(topology):
        return math.inf
    period, powers = num_turns, [left]
    while _norm(powers[-1]) > reduction:
        powers.append(powers[-1] @ powers[-1])
    left = powers[-2]
    num_turns = period << (len(powers) - 2)
    for exponent, power in reversed(list(enumerate(powers[:-2]))):
        longer = power @ left
        if _norm(longer) > reduction:
            left, num_turns = longer, num_turns + (period << exponent)
    for step in _disagreements(topology):
        left = step @ left
        num_turns += 1
        if _norm(left) <= reduction:
            break
    return num_turns


def _disagreements(topology: Topology | npt.ArrayLike) -> Iterator[Matrix]:
    if isinstance(topology, Topology) and topology.period > _LONGEST_PERIOD:
        raise UsageError(
            f"the topology '{topology.name}' repeats only after {topology.period} turns.",
            next_step=f"measure one with a period of at most {_LONGEST_PERIOD}.",
        )
    for matrix in each_matrix(topology):
        if (abs(matrix.sum(axis=1) - 1) > 1e-6).any():
            raise UsageError(
                "the ranks never agree: the rows of this matrix do not sum to 1.",
                next_step="divide each row by its sum; a matrix's row i is what rank i gives to each value.",
            )
        yield matrix - matrix.mean(axis=0)


def _norm(matrix: Matrix) -> float:
    return float(np.linalg.norm(matrix, 2))
