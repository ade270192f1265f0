"""Weights for a graph that has none, and matrices of any origin brought into one form.

`adjacency[i, j]` says whether rank i receives from rank j; its diagonal does not matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.plan import Matrix


def metropolis_hastings(adjacency: npt.ArrayLike) -> Matrix:
    """`1 / max(d_i, d_j)` for an edge, where d counts the rank itself; the rest stays with the rank.

    Doubly stochastic on every undirected graph.
    """
    edges = _edges(adjacency)
    if (edges != edges.T).any():
        i, j = (int(index) for index in np.argwhere(edges & ~edges.T)[0])
        raise UsageError(
            f"rank {i} receives from rank {j}, but not {j} from {i}.",
            cause="Metropolis–Hastings weights need a graph whose edges go both ways.",
            next_step="add the missing edges, or take uniform weights.",
        )
    degrees = edges.sum(axis=1) + 1
    matrix: Matrix = edges / np.maximum.outer(degrees, degrees)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix


def uniform(adjacency: npt.ArrayLike) -> Matrix:
    """`1 / (number of sources + 1)` for each source and the rank itself.

    Rows sum to 1. Columns do only where every rank has as many destinations as sources, the same number
    everywhere: elsewhere the ranks agree on something else than the average.
    """
    edges = _edges(adjacency)
    np.fill_diagonal(edges, True)
    matrix: Matrix = edges / edges.sum(axis=1, keepdims=True)
    return matrix


def as_square(matrix: npt.ArrayLike) -> Matrix:
    """The matrix in float64; UsageError when it is none, or not square."""
    try:
        array = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"this is no matrix of numbers: {error}.", next_step="give a square array, one row for each rank."
        ) from error
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise UsageError(
            f"a matrix over ranks is square, not of shape {array.shape}.",
            next_step="give one row and one column for each rank.",
        )
    return array


def _edges(adjacency: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    edges: npt.NDArray[np.bool_] = as_square(adjacency) != 0
    np.fill_diagonal(edges, False)
    return edges
