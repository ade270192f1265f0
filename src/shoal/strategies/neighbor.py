"""Parameters averaged with neighbours (BlueFog's neighbor_allreduce): static and time-varying topologies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch

from shoal.group import Group, Handle
from shoal.strategies.options import CommonOptions, NeighborOptions
from shoal.strategies.parameters import ExchangeStrategy
from shoal.topology import Topology, Weights, make_topology_on

WeightsRule: TypeAlias = Callable[[int], Weights]
"""From the number of the round, counted from 0, to this worker's weights in it."""


class NeighborAverage(ExchangeStrategy):
    """`x_i ← Σ_j W_ij x_j` over the neighbours of the round; outlives lost peers.

    `topology` is a name, a function of the number of ranks, a Topology, a matrix or a networkx graph.
    `weights`, when it is set, comes before the topology, from the next round on.
    """

    name = "neighbor"
    survives_loss = True
    Options: ClassVar[type[CommonOptions]] = NeighborOptions
    options: NeighborOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.topology = self._make_topology()
        self._weights: Weights | WeightsRule | None = None

    @property
    def is_overlapped(self) -> bool:
        """Adapt while combine."""
        return self.options.order == "adapt-while-combine"

    @property
    def weights(self) -> Weights | WeightsRule | None:
        """Of this worker, for every round until they are set again, or a function of the round.

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
        """Of this worker in the topology."""
        return self.group.rank

    def _make_topology(self) -> Topology:
        return make_topology_on(self.options.topology, self.group.size, self.group.num_machines)

    def _round_weights(self) -> Weights:
        weights = self._weights
        if weights is None:
            return self.topology.weights(self._place, self.rounds)
        return weights if isinstance(weights, Weights) else weights(self.rounds)

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        return self.group.exchange(live, self._round_weights(), out=spare)
