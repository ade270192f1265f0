"""What can be said of a topology or a mixing matrix without counting turns; `speed` counts them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shoal.topology.mixing import as_square
from shoal.topology.plan import Matrix, Topology

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
