"""Base-(k+1) graphs: the exact average of any number of ranks in few turns, with few partners in each.

After Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized
Learning via Finite-time Convergence", NeurIPS 2023, algorithms 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, combinations, zip_longest
from typing import TypeAlias

import numpy as np

from shoal.core.errors import UsageError
from shoal.topology.plan import Topology, Turn, check_size, matrix_turn

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
