"""A topology: one mixing matrix for each turn, held as each rank's weights.

What the matrices are is told by the files that make topologies; how good they are, by `checks` and `speed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import UsageError
from shoal.topology.sides import destinations_from_sources
from shoal.topology.weights import Weights

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
        )
        for i in range(len(matrix))
    )
