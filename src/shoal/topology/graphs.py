"""Graphs: static ones, the base-(k+1) graphs, spanning trees, and random numbers that all ranks draw alike.

`base_graph` takes the exact average of any number of ranks in few turns, with few partners in each: Takezawa
et al., "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning via
Finite-time Convergence", NeurIPS 2023, algorithms 1 to 3. The edges of a spanning tree have colors: those of
one color are pairs that meet at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, zip_longest
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.plan import (
    Topology,
    Turn,
    check_size,
    circulant_turn,
    matrix_turn,
    metropolis_hastings,
    uniform_turn,
)
from shoal.topology.properties import is_connected


class CommonDraws:
    """A stream of draws that its name alone decides.

    It builds on `random.Random.random` only, the one method whose numbers Python promises to keep.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit − 1."""
        return int(self._random.random() * limit)

    def shuffled(self, items: Iterable[int]) -> list[int]:
        """The items in random order."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            chosen = self.below(last + 1)
            order[last], order[chosen] = order[chosen], order[last]
        return order


Direction = Literal["both", "left", "right"]

_SWAPS_PER_EDGE = 10


def exponential_two(size: int) -> Topology:
    """Every rank sends to those 1, 2, 4, 8, … ahead."""
    return _circulant("exponential-2", size, list(powers(2, size)))


def exponential(size: int, base: int = 2) -> Topology:
    """Every rank sends to those at the powers of `base` ahead."""
    return _circulant(f"exponential:{base}", size, list(powers(base, size)))


def symmetric_exponential(size: int, base: int = 4) -> Topology:
    """Every rank exchanges with those at the powers of `base` ahead and behind, up to half the circle."""
    ahead = list(powers(base, size // 2 + 1))
    return _circulant(
        f"symmetric-exponential:{base}", size, [*ahead, *(size - distance for distance in ahead)]
    )


def ring(size: int, direction: Direction = "both") -> Topology:
    """A circle: each rank sends to rank − 1 (left), to rank + 1 (right), or to both."""
    distances = {"both": [1, size - 1], "left": [size - 1], "right": [1]}
    if direction not in distances:
        raise UsageError(
            f"a ring has no direction '{direction}'.", next_step=f"take one of {', '.join(distances)}."
        )
    name = "ring" if direction == "both" else f"ring:{direction}"
    return _circulant(name, size, distances[direction])


def full(size: int) -> Topology:
    """Everybody with everybody: the average in one turn."""
    return _circulant("full", size, list(range(1, size)))


def star(size: int, center: int = 0) -> Topology:
    """Everybody with the centre, at weight 1/n; the others keep 1 − 1/n of their own."""
    check_size(size)
    if not 0 <= center < size:
        raise UsageError(
            f"rank {center} cannot be the centre of a star of {size}.",
            next_step=f"name a rank from 0 to {size - 1}.",
        )
    matrix = np.eye(size) * (1 - 1 / size)
    matrix[center, :] = matrix[:, center] = 1 / size
    return Topology.static("star" if center == 0 else f"star:{center}", matrix_turn(matrix))


def mesh(size: int, shape: tuple[int, int] | None = None) -> Topology:
    """A grid with Metropolis–Hastings weights; without a shape, of the two closest factors of `size`."""
    rows, columns = _shape(size, shape)
    adjacency = _grid(rows, columns, is_closed=False)
    return Topology.static(f"mesh:{rows}x{columns}", matrix_turn(metropolis_hastings(adjacency)))


def torus(size: int, shape: tuple[int, int] | None = None) -> Topology:
    """A grid whose borders meet; without a shape, of the two closest factors of `size`."""
    rows, columns = _shape(size, shape)
    adjacency = _grid(rows, columns, is_closed=True)
    return Topology.static(f"torus:{rows}x{columns}", matrix_turn(metropolis_hastings(adjacency)))


def hypercube(size: int) -> Topology:
    """Ranks that differ in one binary digit exchange; `size` must be a power of two."""
    check_size(size)
    if size & (size - 1):
        raise UsageError(
            f"a hypercube of {size} ranks is impossible: it needs a power of two.",
            next_step="take 'exponential-2' or 'base:2', which are as fast and fit any number.",
        )
    return Topology.static(
        "hypercube", uniform_turn([[rank ^ distance for distance in powers(2, size)] for rank in range(size)])
    )


def random_regular(size: int, degree: int = 4, seed: int = 0) -> Topology:
    """A connected undirected graph, drawn by the seed, in which all ranks have `degree` neighbours.

    With no more than `degree` + 1 ranks it is the full graph.
    """
    check_size(size)
    degree = min(degree, size - 1)
    if degree < min(2, size - 1) or size * degree % 2:
        raise UsageError(
            f"there is no connected graph in which all of {size} ranks have {degree} neighbours.",
            cause="it needs at least 2, and an even one for an odd number of ranks.",
            next_step=f"take {max(2, degree + degree % 2)}.",
        )
    edges = [
        (rank, (rank + distance) % size) for distance in range(1, degree // 2 + 1) for rank in range(size)
    ]
    if degree % 2:
        edges += [(rank, rank + size // 2) for rank in range(size // 2)]
    draws = CommonDraws(f"random-regular/{size}/{degree}/{seed}")
    adjacency = _rewired(edges, size, draws)
    while not is_connected(adjacency):
        adjacency = _rewired(edges, size, draws)
    return Topology.static(f"random-regular:{degree}", matrix_turn(metropolis_hastings(adjacency)))


def powers(base: int, limit: int) -> Iterator[int]:
    """1, base, base², … below `limit`."""
    if base < 2:
        raise UsageError(f"{base} is no base of an exponential graph.", next_step="take 2 or more.")
    power = 1
    while power < limit:
        yield power
        power *= base


def _circulant(name: str, size: int, distances: list[int]) -> Topology:
    check_size(size)
    kept = sorted({distance % size for distance in distances} - {0})
    return Topology.static(name, circulant_turn(size, kept))


def _shape(size: int, shape: tuple[int, int] | None) -> tuple[int, int]:
    check_size(size)
    if shape is None:
        rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
        return rows, size // rows
    rows, columns = shape
    if rows < 1 or rows * columns != size:
        raise UsageError(
            f"a grid of {rows}x{columns} has {rows * columns} places for {size} ranks.",
            next_step="give two factors of the number of ranks, or no shape.",
        )
    return rows, columns


def _grid(rows: int, columns: int, *, is_closed: bool) -> npt.NDArray[np.bool_]:
    adjacency = np.zeros((rows * columns, rows * columns), dtype=bool)
    places = np.arange(rows * columns).reshape(rows, columns)
    pairs = [(places[:, :-1], places[:, 1:]), (places[:-1], places[1:])]
    if is_closed:
        pairs += [(places[:, -1], places[:, 0]), (places[-1], places[0])]
    for one, other in pairs:
        adjacency[one, other] = adjacency[other, one] = True
    return adjacency


def _rewired(edges: list[tuple[int, int]], size: int, draws: CommonDraws) -> npt.NDArray[np.bool_]:
    """Swap the ends of pairs of edges, which keeps every degree, in `edges` itself."""
    adjacency = np.zeros((size, size), dtype=bool)
    for a, b in edges:
        adjacency[a, b] = adjacency[b, a] = True
    for _ in range(_SWAPS_PER_EDGE * len(edges)):
        first, second = draws.below(len(edges)), draws.below(len(edges))
        a, b = edges[first]
        c, d = edges[second][:: 1 if draws.below(2) else -1]
        if a == d or b == c or adjacency[a, d] or adjacency[c, b]:
            continue
        for one, other, is_edge in ((a, b, False), (c, d, False), (a, d, True), (c, b, True)):
            adjacency[one, other] = adjacency[other, one] = is_edge
        edges[first], edges[second] = (a, d), (c, b)
    return adjacency


_Edges: TypeAlias = list[tuple[int, int, float]]
"""Pairs that exchange in a turn, with the weight that each gives to the other's value."""


def base_graph(size: int, base: int = 2) -> Topology:
    """At most `base` − 1 partners a turn, and after one period everybody has the exact average.

    A larger base has more partners a turn and fewer turns: at most about 2·log(size) / log(base) + 2.
    """
    check_size(size)
    if base < 2:
        raise UsageError(f"a base-{base} graph is impossible.", next_step="take a base of 2 or more.")
    num_groups, group_size = 1, size
    for factor in range(2, base + 1):
        while group_size % factor == 0:
            num_groups, group_size = num_groups * factor, group_size // factor
    ranks = range(size)
    inside = [_simple(ranks[first : first + group_size], base) for first in range(0, size, group_size)]
    across = [_hypercube(ranks[place::group_size], base) for place in range(group_size)]
    turns = min(_simple(ranks, base), _side_by_side(inside) + _side_by_side(across), key=len)
    return Topology.cycle(f"base:{base}", [_turn(size, edges) for edges in turns or [[]]])


def _simple(ranks: Sequence[int], base: int) -> list[_Edges]:
    """Algorithm 2: parts as the digits of the number of ranks say, each a multiple of a power of the base.

    First each part averages inside. Then, from the largest part on, its blocks exchange with all the smaller
    parts, so that the mean of each block and that of the smaller parts become the common one; after that the
    blocks average inside.
    """
    place = 1
    while place * base <= len(ranks):
        place *= base
    parts: list[list[Sequence[int]]] = []
    start = 0
    while start < len(ranks):
        num_blocks = (len(ranks) - start) // place
        if num_blocks:
            ends = [start + place * block for block in range(num_blocks + 1)]
            parts.append([ranks[first : first + place] for first in ends[:-1]])
            start = ends[-1]
        place //= base
    if len(parts) == 1:
        return _hypercube(ranks, base)
    opening = _side_by_side(_hypercube([rank for block in part for rank in block], base) for part in parts)
    return opening + _side_by_side(
        [
            *([[]] * index),
            _handing_down(part, parts[index + 1 :]),
            *_side_by_side(_hypercube(block, base) for block in part),
        ]
        for index, part in enumerate(parts[:-1])
    )


def _handing_down(part: list[Sequence[int]], smaller: list[list[Sequence[int]]]) -> _Edges:
    rest = [rank for other in smaller for block in other for rank in block]
    weight = len(part[0]) / (len(part) * len(part[0]) + len(rest))
    return [(rank, partner, weight) for block in part for rank, partner in zip(rest, block, strict=False)]


def _hypercube(ranks: Sequence[int], base: int) -> list[_Edges]:
    """Algorithm 1: in each turn, cliques along one factor of the number of ranks."""
    turns = []
    stride = 1
    for factor in _factors(len(ranks), base):
        corners = [place for place in range(len(ranks)) if place // stride % factor == 0]
        cliques = [ranks[corner : corner + stride * factor : stride] for corner in corners]
        turns.append([(*pair, 1 / factor) for clique in cliques for pair in combinations(clique, 2)])
        stride *= factor
    return turns


@cache
def _factors(number: int, largest: int) -> tuple[int, ...]:
    """The fewest factors of `number`, none above `largest`."""
    if number == 1:
        return ()
    fitting = [factor for factor in range(largest, 1, -1) if number % factor == 0]
    return min(((factor, *_factors(number // factor, largest)) for factor in fitting), key=len)


def _side_by_side(schedules: Iterable[list[_Edges]]) -> list[_Edges]:
    return [list(chain(*edges)) for edges in zip_longest(*schedules, fillvalue=[])]


def _turn(size: int, edges: _Edges) -> Turn:
    matrix = np.zeros((size, size))
    for one, other, weight in edges:
        matrix[one, other] = matrix[other, one] = weight
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix_turn(matrix)


Kind = Literal["binary", "chain"]

_PARENTS: dict[Kind, Callable[[int], int]] = {
    "binary": lambda rank: (rank - 1) // 2,
    "chain": lambda rank: rank - 1,
}


@dataclass(frozen=True, slots=True)
class Branch:
    """One edge of the tree, seen from one of its ends."""

    color: int
    """Edges that meet in a rank have different ones, so that those of one color are pairs."""
    partner: int
    size: int
    """How many ranks lie beyond it, the partner included."""


def branches(kind: Kind, size: int) -> list[list[Branch]]:
    """Gives each rank's edges in a tree of `size` ranks, in order of color."""
    parent_of = _PARENTS[kind]
    below = [1] * size
    for rank in range(size - 1, 0, -1):
        below[parent_of(rank)] += below[rank]
    found: list[list[Branch]] = [[] for _ in range(size)]
    for rank in range(1, size):
        parent = parent_of(rank)
        taken = {branch.color for branch in found[parent]}
        color = next(number for number in range(size) if number not in taken)
        found[parent].append(Branch(color, rank, below[rank]))
        found[rank].append(Branch(color, parent, size - below[rank]))
    return [sorted(own, key=lambda branch: branch.color) for own in found]


def num_colors(tree: Sequence[Sequence[Branch]]) -> int:
    """Counts the meetings that a round takes."""
    return max((branch.color + 1 for own in tree for branch in own), default=0)
