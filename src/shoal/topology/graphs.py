"""The static graphs: every turn is like the first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.checks import is_connected
from shoal.topology.draws import Draws
from shoal.topology.mixing import metropolis_hastings
from shoal.topology.plan import Topology, check_size, circulant_turn, matrix_turn, uniform_turn

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
    draws = Draws(f"random-regular/{size}/{degree}/{seed}")
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


def _rewired(edges: list[tuple[int, int]], size: int, draws: Draws) -> npt.NDArray[np.bool_]:
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
