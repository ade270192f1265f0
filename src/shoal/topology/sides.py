"""The other side of an exchange: who sends to me, when it is known to whom everybody sends, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.core.errors import UsageError


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
