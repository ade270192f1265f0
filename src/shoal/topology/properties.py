"""What is true of a topology: which conditions its matrices meet, and how fast ranks come to agree.

The spectral gap and the turns until agreement follow what is left of a disagreement, `(I − 11ᵀ/n) W` applied
turn by turn: for rows that sum to 1 this product forgets nothing but the common value, so matrices need be
neither symmetric nor doubly stochastic. The `require_` functions say what a method's proof asks, and name
topologies that have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.plan import Matrix, Topology, as_square

_TOLERANCE = 1e-6
"""As much as float32 matrices of some thousand ranks need."""


def is_row_stochastic(topology: Topology | npt.ArrayLike) -> bool:
    """Whether each rank's weights are non-negative and sum to 1, in every turn: ranks that agree stay so."""
    return all(_sums_to_one(matrix, axis=1) for matrix in each_matrix(topology))


def is_column_stochastic(topology: Topology | npt.ArrayLike) -> bool:
    """Whether what is given to each rank's value sums to 1, in every turn: the average stays as it is."""
    return all(_sums_to_one(matrix, axis=0) for matrix in each_matrix(topology))


def is_doubly_stochastic(topology: Topology | npt.ArrayLike) -> bool:
    """Whether rows and columns do: the ranks come to agree on their average, if they are connected."""
    return all(_sums_to_one(matrix, 0) and _sums_to_one(matrix, 1) for matrix in each_matrix(topology))


def is_connected(topology: Topology | npt.ArrayLike) -> bool:
    """Whether every rank reaches every other one over the edges of all turns together."""
    edges = _all_edges(topology)
    return _reaches_all(edges) and _reaches_all(edges.T)


def is_regular(topology: Topology | npt.ArrayLike) -> bool:
    """Whether all ranks have the same number of sources and of destinations, in every turn."""
    for matrix in each_matrix(topology):
        edges = _edges(matrix)
        if len(np.unique([edges.sum(axis=0), edges.sum(axis=1)])) > 1:
            return False
    return True


def is_equivalent(first: Topology | npt.ArrayLike, second: Topology | npt.ArrayLike) -> bool:
    """Whether both have the same edges in the same turns, whatever the weights."""
    ours, theirs = list(each_matrix(first)), list(each_matrix(second))
    return len(ours) == len(theirs) and all(
        np.array_equal(_edges(a), _edges(b)) for a, b in zip(ours, theirs, strict=True)
    )


def each_matrix(topology: Topology | npt.ArrayLike) -> Iterator[Matrix]:
    """One period of mixing matrices; a matrix alone is one turn."""
    return topology.matrices() if isinstance(topology, Topology) else iter([as_square(topology)])


def _sums_to_one(matrix: Matrix, axis: int) -> bool:
    return bool((matrix >= 0).all() and (abs(matrix.sum(axis=axis) - 1) <= _TOLERANCE).all())


def _edges(matrix: Matrix) -> npt.NDArray[np.bool_]:
    edges: npt.NDArray[np.bool_] = matrix != 0
    np.fill_diagonal(edges, False)
    return edges


def _all_edges(topology: Topology | npt.ArrayLike) -> npt.NDArray[np.bool_]:
    matrices = each_matrix(topology)
    edges: npt.NDArray[np.bool_] = next(matrices) != 0
    for matrix in matrices:
        edges |= matrix != 0
    return edges


def _reaches_all(edges: npt.NDArray[np.bool_]) -> bool:
    reached = np.zeros(len(edges), dtype=bool)
    front = [0]
    reached[0] = True
    while front:
        news = np.flatnonzero(edges[front].any(axis=0) & ~reached)
        reached[news] = True
        front = news.tolist()
    return bool(reached.all())


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


SYMMETRIC = "ring, mesh, torus, star, full, hypercube, symmetric-exponential, random-regular"
"""Those that are static and symmetric."""
_MOST_TURNS = 64


def require_doubly_stochastic(topology: Topology, strategy: str) -> None:
    """In every turn (of very many, the first ones), and connected over all of them."""
    num_turns = min(topology.period, _MOST_TURNS)
    for turn in range(num_turns):
        if not is_doubly_stochastic(topology.matrix(turn)):
            raise UsageError(
                f"{strategy} needs weights that sum to 1 over sources and over destinations; those of "
                f"'{topology.name}' do not{f' in turn {turn}' if topology.period > 1 else ''}.",
                cause="the topology is irregular, or its matrix is only row-stochastic.",
                next_step="take a named topology (exponential-2, ring, one-peer-exponential), or sgp.",
            )
    if topology.period <= _MOST_TURNS:
        _require_connected(topology, strategy)


def require_symmetric(topology: Topology, strategy: str) -> None:
    """Static, symmetric, doubly stochastic and connected."""
    if topology.period != 1:
        raise UsageError(
            f"{strategy} needs the same weights in every round; '{topology.name}' changes them.",
            next_step=f"take a static symmetric topology ({SYMMETRIC}), or gradient-tracking.",
        )
    matrix = topology.matrix()
    if abs(matrix - matrix.T).max() > _TOLERANCE or not is_doubly_stochastic(matrix):
        raise UsageError(
            f"{strategy} needs a symmetric matrix whose rows sum to 1; that of '{topology.name}' is not.",
            cause="some edges go one way only, or their two ends have different weights.",
            next_step=f"take a static symmetric topology ({SYMMETRIC}), or gradient-tracking.",
        )
    _require_connected(topology, strategy)


def smallest_eigenvalue(topology: Topology) -> float:
    """Of a symmetric matrix."""
    return float(np.linalg.eigvalsh(topology.matrix())[0])


def lazier(topology: Topology, laziness: float) -> Topology:
    """`laziness · I + (1 − laziness) · W`, of a static topology, on the same edges."""
    if not laziness:
        return topology
    turn = tuple(
        replace(
            weights,
            own=laziness + (1 - laziness) * weights.own,
            sources={rank: (1 - laziness) * weight for rank, weight in weights.sources.items()},
        )
        for weights in (topology.weights(rank) for rank in range(topology.size))
    )
    return Topology.static(f"lazy {topology.name}", turn)


def _require_connected(topology: Topology, strategy: str) -> None:
    if not is_connected(topology):
        raise UsageError(
            f"{strategy} needs a way from every worker to every other; '{topology.name}' has none.",
            next_step="add edges between its parts.",
        )
