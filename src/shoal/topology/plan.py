"""A topology: one mixing matrix for each turn, held as each rank's weights.

It is made of a graph, whose weights follow from the degrees, or of matrices of any origin. `adjacency[i, j]`
says whether rank i receives from rank j; its diagonal does not matter. How good a topology is, `properties`
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.weights import Weights, destinations_from_sources


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


Matrix: TypeAlias = npt.NDArray[np.float64]
Turn: TypeAlias = tuple[Weights, ...]
"""The weights of one turn, by rank."""

_KEPT_TURNS = 64


@dataclass(frozen=True, eq=False)
class Topology:
    """Who exchanges with whom in which turn; a pure function of the turn, the same on every rank.

    Turns count from 0 and repeat after `period` of them; a static topology has period 1. `rule` is called
    with turns below `period`, and need not remember what it made.
    """

    name: str
    size: int
    period: int
    rule: Callable[[int], Turn] = field(repr=False)

    def __post_init__(self) -> None:
        check_size(self.size)
        object.__setattr__(self, "rule", lru_cache(_KEPT_TURNS)(self.rule))

    @classmethod
    def static(cls, name: str, turn: Turn) -> Topology:
        """The same weights in every turn."""
        return cls(name, len(turn), 1, lambda _: turn)

    @classmethod
    def cycle(cls, name: str, turns: Sequence[Turn]) -> Topology:
        """These turns, one after another, again and again."""
        turns = tuple(turns)
        return cls(name, len(turns[0]), len(turns), turns.__getitem__)

    def weights(self, rank: int, turn: int = 0) -> Weights:
        """What `rank` gives to whom in this turn; the destinations are always told."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"there is no rank {rank} in the topology '{self.name}' of {self.size} ranks.",
                next_step=f"name a rank from 0 to {self.size - 1}.",
            )
        return self.rule(turn % self.period)[rank]

    def sources(self, rank: int, turn: int = 0) -> tuple[int, ...]:
        """The ranks from which `rank` receives in this turn, in order."""
        return tuple(sorted(self.weights(rank, turn).sources))

    def destinations(self, rank: int, turn: int = 0) -> tuple[int, ...]:
        """The ranks to which `rank` sends in this turn, in order."""
        return tuple(sorted(self.weights(rank, turn).destinations or ()))

    def degree(self) -> int:
        """The most ranks from which one rank receives in one turn."""
        return max(len(weights.sources) for turn in range(self.period) for weights in self.rule(turn))

    def matrix(self, turn: int = 0) -> Matrix:
        """Row i is what rank i gives to each rank's value; the rows sum to 1."""
        matrix = np.zeros((self.size, self.size))
        for rank, weights in enumerate(self.rule(turn % self.period)):
            matrix[rank, rank] = weights.own
            for source, weight in weights.sources.items():
                matrix[rank, source] = weight
        return matrix

    def matrices(self) -> Iterator[Matrix]:
        """One period of them, made as they are asked for."""
        return (self.matrix(turn) for turn in range(self.period))


def check_size(size: int) -> None:
    """UsageError for a group that cannot be."""
    if size < 1:
        raise UsageError(f"a topology of {size} ranks is impossible.", next_step="ask for 1 rank or more.")


def uniform_turn(sources: Sequence[Collection[int]]) -> Turn:
    """Each rank gives itself and each of its sources the same weight."""
    destinations = destinations_from_sources(sources)
    return tuple(Weights.uniform(*sides) for sides in zip(sources, destinations, strict=True))


def circulant_turn(size: int, distances: Collection[int]) -> Turn:
    """Every rank sends to those at these distances ahead of it, each from 1 to size − 1; equal weights."""
    return uniform_turn([[(rank - distance) % size for distance in distances] for rank in range(size)])


def matrix_turn(matrix: Matrix) -> Turn:
    """The weights that a mixing matrix holds; zeros are no edges."""
    sources = [[int(j) for j in np.flatnonzero(row) if j != i] for i, row in enumerate(matrix)]
    destinations = destinations_from_sources(sources)
    return tuple(
        Weights(
            float(matrix[i, i]),
            {j: float(matrix[i, j]) for j in sources[i]},
            dict.fromkeys(destinations[i], 1.0),
            is_by_rule=True,
        )
        for i in range(len(matrix))
    )


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
