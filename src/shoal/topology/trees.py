"""Spanning trees of ranks, whose edges have colors: those of one color are pairs that meet at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
