"""Topologies of the user's own: mixing matrices, and graphs as networkx makes them, without importing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.mixing import as_square, metropolis_hastings, uniform
from shoal.topology.plan import Matrix, Topology, matrix_turn

_TOLERANCE = 1e-6


@runtime_checkable
class Graph(Protocol):
    """What Shoal asks of a networkx graph, directed or not."""

    @property
    def nodes(self) -> Any:
        """The ranks that are nodes of the graph."""

    @property
    def edges(self) -> Any:
        """Called with data='weight', gives (from, to, weight or None)."""

    def is_directed(self) -> bool:
        """Whether an edge goes one way."""


def from_matrix(matrix: npt.ArrayLike, name: str = "matrix") -> Topology:
    """A mixing matrix as a topology: row i is what rank i gives to each rank's value."""
    return Topology.static(name, matrix_turn(_checked(matrix)))


def from_matrices(matrices: Iterable[npt.ArrayLike], name: str = "matrices") -> Topology:
    """Mixing matrices of successive turns, repeated when they are through."""
    checked = [_checked(matrix) for matrix in matrices]
    if len({len(matrix) for matrix in checked}) != 1:
        raise UsageError(
            f"a topology needs matrices of one size, not of {sorted({len(matrix) for matrix in checked})}.",
            next_step="give at least one matrix, and the same ranks in each.",
        )
    return Topology.cycle(name, [matrix_turn(matrix) for matrix in checked])


def from_graph(graph: Graph, name: str = "graph") -> Topology:
    """A graph over the ranks 0 to n − 1; the edge i → j lets j receive from i.

    Its `weight` is what j gives to i's value, a loop's what a rank keeps; without loops a rank keeps what is
    left to 1. Without any weights, a directed graph gets uniform ones, and one whose edges go both ways
    Metropolis–Hastings weights, which keep the average.
    """
    ranks = list(graph.nodes)
    size = len(ranks)
    if (
        not size
        or any(not isinstance(rank, int | np.integer) for rank in ranks)
        or sorted(ranks) != list(range(size))
    ):
        raise UsageError(
            f"the nodes of a graph over {size} ranks are the whole numbers from 0 to {size - 1}, "
            f"not {', '.join(map(repr, ranks[:8]))}{' …' if size > 8 else ''}.",
            next_step="name each node by its rank, as networkx.convert_node_labels_to_integers does.",
        )
    edges = [(int(a), int(b), weight) for a, b, weight in graph.edges(data="weight")]
    if not graph.is_directed():
        edges += [(b, a, weight) for a, b, weight in edges if a != b]
    weighted = [weight is not None for _, _, weight in edges]
    if any(weighted) and not all(weighted):
        a, b, _ = edges[weighted.index(False)]
        raise UsageError(
            f"the edge from {a} to {b} has no weight, but others have one.",
            next_step="give every edge a 'weight', or none.",
        )
    matrix = np.zeros((size, size))
    for source, receiver, weight in edges:
        matrix[receiver, source] = 1.0 if weight is None else matrix[receiver, source] + weight
    if not any(weighted):
        is_mutual = bool((matrix == matrix.T).all())
        return from_matrix(metropolis_hastings(matrix) if is_mutual else uniform(matrix), name)
    if not matrix.diagonal().any():
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return from_matrix(matrix, name)


def _checked(matrix: npt.ArrayLike) -> Matrix:
    array = as_square(matrix)
    if not (np.isfinite(array) & (array >= 0)).all():
        i, j = (int(index) for index in np.argwhere(~(np.isfinite(array) & (array >= 0)))[0])
        raise UsageError(
            f"rank {i} gives rank {j} the weight {array[i, j]:g}; weights are 0 or more.",
            next_step="correct this entry; what a rank gives sums to 1.",
        )
    sums = array.sum(axis=1)
    if (abs(sums - 1) > _TOLERANCE).any():
        rank = int(abs(sums - 1).argmax())
        raise UsageError(
            f"the weights of rank {rank} sum to {sums[rank]:g} instead of 1.",
            cause="the matrix is transposed, or its rows are not divided by their sums."
            if (abs(array.sum(axis=0) - 1) <= _TOLERANCE).all()
            else "its rows are not divided by their sums.",
            next_step="row i is what rank i gives to each rank's value, its own included.",
        )
    return array
