"""One worker's share of a mixing matrix, as an exchange needs it, and the other side of an exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shoal.core.errors import UsageError

_NOBODY: Mapping[int, float] = MappingProxyType({})
_NOTHING = 1e-9
"""What a sum of weights misses by rounding."""


def are_differences(own: float, sources: Iterable[float]) -> bool:
    """Whether weights sum to zero, so that what is summed are differences from oneself."""
    return own < 0 and abs(own + sum(sources)) < _NOTHING


@dataclass(frozen=True, slots=True)
class Weights:
    """`new x_i = own · x_i + Σ_j sources[j] · d_j[i] · x_j`, seen from worker i.

    `sources` are i's factors for what it receives. `destinations` are its factors for what it sends, `d_i`;
    without them a worker serves whoever names it, with factor 1. With them the two sides must agree: a
    source must have its receiver among its destinations.

    `is_by_rule` says that all workers take the weights of this round from one rule, in which each sends with
    factor 1: then a worker on a GPU need not wait to hear the others' factors.
    """

    own: float
    sources: Mapping[int, float] = field(default_factory=lambda: _NOBODY)
    destinations: Mapping[int, float] | None = None
    is_by_rule: bool = field(default=False, compare=False)

    @classmethod
    def uniform(cls, sources: Collection[int], destinations: Collection[int] | None = None) -> Weights:
        """The same weight for oneself and each source."""
        share = 1 / (len(sources) + 1)
        sends = None if destinations is None else dict.fromkeys(sorted(destinations), 1.0)
        return cls(share, dict.fromkeys(sorted(sources), share), sends, is_by_rule=True)

    @property
    def is_difference(self) -> bool:
        """Whether the sum is zero."""
        return are_differences(self.own, self.sources.values())

    def differences(self) -> Weights:
        """`Σ_j sources[j] · (x_j − x_i)`: what mixing changes, where weights sum to 1 and factors are 1."""
        return replace(self, own=-sum(self.sources.values()))

    def check(self, rank: int, size: int) -> None:
        """UsageError when a rank is impossible."""
        for peer in (*self.sources, *(self.destinations or ())):
            if not 0 <= peer < size or peer == rank:
                raise UsageError(
                    f"rank {rank} of {size} cannot exchange with rank {peer}.",
                    next_step="name other ranks of the group; the own weight is `own`.",
                )

    def without(self, gone: Collection[int]) -> Weights:
        """What is left when some peers are gone: their weight goes to oneself, so that the sum stays."""
        lost = sum(weight for peer, weight in self.sources.items() if peer in gone)
        sources = {peer: weight for peer, weight in self.sources.items() if peer not in gone}
        sends = self.destinations
        if sends is not None:
            sends = {peer: weight for peer, weight in sends.items() if peer not in gone}
        return replace(self, own=self.own + lost, sources=sources, destinations=sends)


@dataclass(frozen=True, slots=True)
class MachineWeights:
    """Weights between machines by their indices: the workers of each machine are averaged first.

    Factors for sending (`weights.destinations`) do not count: all of a machine's workers receive.
    """

    weights: Weights


def destinations_from_sources(sources: Sequence[Collection[int]]) -> list[list[int]]:
    """By rank, in order: to whom it sends, given from whom each rank receives."""
    return _turned(sources, "source")


def sources_from_destinations(destinations: Sequence[Collection[int]]) -> list[list[int]]:
    """By rank, in order: from whom it receives, given to whom each rank sends."""
    return _turned(destinations, "destination")


def _turned(table: Sequence[Collection[int]], side: str) -> list[list[int]]:
    other: list[list[int]] = [[] for _ in table]
    for rank, peers in enumerate(table):
        for peer in peers:
            if not 0 <= peer < len(table) or peer == rank:
                raise UsageError(
                    f"rank {rank} of {len(table)} names {peer} as a {side}.",
                    next_step="name other ranks of the group, one list for each rank.",
                )
            if rank not in other[peer][-1:]:
                other[peer].append(rank)
    return other
