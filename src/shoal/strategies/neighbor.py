"""Parameters averaged with neighbours (BlueFog's neighbor_allreduce): static and time-varying topologies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, Handle, exchange_machines
from shoal.strategies.exchange import ExchangeStrategy
from shoal.strategies.options import HierarchicalOptions, NeighborOptions, StrategyOptions
from shoal.strategies.session import TrainingSession
from shoal.topology import Topology, Weights, make_topology, make_topology_on

WeightsRule: TypeAlias = Callable[[int], Weights]
"""From the number of the round, counted from 0, to this worker's weights in it."""


class NeighborAverage(ExchangeStrategy):
    """`x_i ← Σ_j W_ij x_j` over the neighbours of the round; outlives lost peers.

    `topology` is a name, a function of the number of ranks, a Topology, a matrix or a networkx graph.
    `weights`, when it is set, comes before the topology, from the next round on.
    """

    name = "neighbor"
    survives_loss = True
    Options: ClassVar[type[StrategyOptions]] = NeighborOptions
    options: NeighborOptions
    topology: Topology
    _weights: Weights | WeightsRule | None = None

    def set_group(self, group: Group) -> None:
        """Makes the topology of the group's workers."""
        super().set_group(group)
        self.topology = make_topology_on(self.options.topology, group.size, group.num_machines)

    @property
    def is_overlapped(self) -> bool:
        """Whether it adapts while it combines."""
        return self.options.order == "adapt-while-combine"

    @property
    def weights(self) -> Weights | WeightsRule | None:
        """The weights of this worker, for every round until they are set again, or a function of the round.

        What one worker receives another must send: set them on all workers alike. None: the topology's.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Weights | WeightsRule | None) -> None:
        if isinstance(weights, Weights):
            weights.check(self._place, self.topology.size)
        self._weights = weights

    @property
    def _place(self) -> int:
        """The place of this worker in the topology."""
        return self.group.rank

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives those that were set, or the topology's."""
        weights = self._weights
        if weights is None:
            return self.topology.weights(self._place, self.rounds)
        return weights if isinstance(weights, Weights) else weights(self.rounds)


class HierarchicalAverage(NeighborAverage):
    """`x_i ← Σ_m W_{m(i) m} · mean of machine m`: `topology` and `weights` are over machines.

    The documents' hierarchical_neighbor_allreduce. On a single machine it averages all workers' parameters.
    """

    name = "hierarchical"
    survives_loss = False
    Options: ClassVar[type[StrategyOptions]] = HierarchicalOptions
    options: HierarchicalOptions

    def set_group(self, group: Group) -> None:
        """Makes the topology of the group's machines."""
        self.group = group
        workers = Counter(group.machines)
        if len(set(workers.values())) > 1:
            raise UsageError(
                "hierarchical averaging needs as many workers on every machine; there are "
                f"{', '.join(str(workers[machine]) for machine in sorted(workers))}.",
                cause="a mean of unequal machines gives their workers unequal weights.",
                next_step="start equally many on each (--workers-per-machine), or take `neighbor`.",
            )
        self.topology = make_topology(self.options.topology, group.num_machines)

    @property
    def _place(self) -> int:
        return self.group.machine

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Averages inside each machine first."""
        return exchange_machines(session.group, live, self.round_weights(session), out=spare)
