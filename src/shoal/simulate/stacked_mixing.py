"""One round's mixing of all workers at once: who sends to whom, and the product with a mixing matrix.

Kept as edges, so that a thousand workers with a few neighbours each cost what their edges cost. When the
bytes of an edge arrive is left to `stacked_times`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shoal.topology import Topology, Weights

Ranks: TypeAlias = npt.NDArray[np.int64]
Peers: TypeAlias = Sequence[Sequence[int]]
"""By rank, in order."""

_DENSE_SHARE = 0.1
"""Of all pairs, from which on a dense product is faster than one over edges."""
_KEPT_TURNS = 64


class Edges:
    """Whose values each rank needs, and to whom each sends without being asked, which may be others."""

    def __init__(self, sources: Peers, targets: Peers) -> None:
        self.size = len(sources)
        self.sources = sources
        self.targets = targets

    @cached_property
    def needed_by(self) -> Peers:
        """By rank: those that have it as a source."""
        receivers: list[list[int]] = [[] for _ in self.sources]
        for receiver, senders in enumerate(self.sources):
            for sender in senders:
                receivers[sender].append(receiver)
        return receivers

    @cached_property
    def num_sent(self) -> Ranks:
        """The number of peers that each rank sends to."""
        return np.array([len(peers) for peers in self.targets])

    @cached_property
    def num_needed(self) -> Ranks:
        """The number of peers that each rank needs something of."""
        return np.array([len(peers) for peers in self.sources])

    @cached_property
    def senders(self) -> Ranks:
        """The senders of all edges over which something is needed, those to one receiver together."""
        return np.array([sender for peers in self.sources for sender in peers], np.int64)

    @cached_property
    def receivers(self) -> Ranks:
        """The receivers of the same edges."""
        return np.repeat(np.arange(self.size), self.num_needed)


class Mix(Protocol):
    """A linear map of workers' values, and the messages that it takes."""

    @property
    def edges(self) -> Edges:
        """Who needs whose values."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""


class Mixing:
    """`x_i ← own_i · x_i + Σ_j w_ij x_j` for all i, where row i of `values` is x_i."""

    def __init__(self, turn: Sequence[Weights]) -> None:
        size = len(turn)
        self.edges = Edges(
            [sorted(weights.sources) for weights in turn],
            [
                sorted(weights.sources if weights.destinations is None else weights.destinations)
                for weights in turn
            ],
        )
        factors = [weights.own for weights in turn]
        for rank, sources in enumerate(self.edges.sources):
            for source in sources:
                sends = turn[source].destinations
                factors.append(turn[rank].sources[source] * (1.0 if sends is None else sends[rank]))
        ranks = np.arange(size)
        places = np.stack(
            [np.append(ranks, self.edges.receivers), np.append(ranks, self.edges.senders)],
        )
        self._is_dense = len(factors) - size > _DENSE_SHARE * size**2
        self._sparse = torch.sparse_coo_tensor(
            torch.from_numpy(places),
            torch.tensor(factors, dtype=torch.float64),
            (size, size),
            check_invariants=True,
        ).coalesce()
        self._matrices: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""
        matrix = self._matrices.get(values.dtype)
        if matrix is None:
            matrix = self._sparse.to_dense() if self._is_dense else self._sparse
            self._matrices[values.dtype] = matrix = matrix.to(values.dtype)
        return matrix @ values if self._is_dense else torch.sparse.mm(matrix, values)


class Everybody:
    """`x_i ← x_i + share · (mean of all − x_i)`: an exchange of all with all, as one mean."""

    def __init__(self, size: int, share: float = 1.0) -> None:
        self._size = size
        self._share = share

    @cached_property
    def edges(self) -> Edges:
        """The edges from everybody to everybody."""
        return all_edges(self._size)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""
        return torch.lerp(values, values.mean(0, keepdim=True), self._share)


class Rounds:
    """The rounds of a topology, each made when it is first asked for."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._made = lru_cache(_KEPT_TURNS)(self._make)

    def __getitem__(self, number: int) -> Mixing:
        return self._made(number % self._topology.period)

    def _make(self, number: int) -> Mixing:
        return Mixing(self._topology.rule(number))


class MachineRounds(Rounds):
    """Of a topology of machines: each worker gets the weighted mean of its machine and of others.

    `machines` are those of the workers, by rank.
    """

    def __init__(self, topology: Topology, machines: Sequence[int]) -> None:
        super().__init__(topology)
        self._machines = machines
        self._workers: list[list[int]] = [[] for _ in range(topology.size)]
        for rank, machine in enumerate(machines):
            self._workers[machine].append(rank)

    def _make(self, number: int) -> Mixing:
        turn = self._topology.rule(number)
        return Mixing([self._spread(rank, turn[machine]) for rank, machine in enumerate(self._machines)])

    def _spread(self, rank: int, weights: Weights) -> Weights:
        factors = {self._machines[rank]: weights.own, **weights.sources}
        spread = {
            worker: factor / len(self._workers[machine])
            for machine, factor in factors.items()
            for worker in self._workers[machine]
        }
        return Weights(spread.pop(rank), spread)


def all_edges(size: int) -> Edges:
    """From everybody to everybody."""
    others = [[peer for peer in range(size) if peer != rank] for rank in range(size)]
    return Edges(others, others)


def edges_from(root: int, size: int) -> Edges:
    """From one to everybody."""
    others = [rank for rank in range(size) if rank != root]
    return Edges(
        [[root] if rank != root else [] for rank in range(size)],
        [others if rank == root else [] for rank in range(size)],
    )
