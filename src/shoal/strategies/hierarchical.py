"""Parameters averaged inside each machine and with neighbour machines (hierarchical_neighbor_allreduce)."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch

from shoal.core.errors import UsageError
from shoal.group import Handle, exchange_machines
from shoal.strategies.neighbor import NeighborAverage
from shoal.strategies.options import CommonOptions, HierarchicalOptions
from shoal.topology import Topology, make_topology


class HierarchicalAverage(NeighborAverage):
    """`x_i ← Σ_m W_{m(i) m} · mean of machine m`: `topology` and `weights` are over machines.

    On a single machine it averages the parameters of all workers.
    """

    name = "hierarchical"
    survives_loss = False
    Options: ClassVar[type[CommonOptions]] = HierarchicalOptions
    options: HierarchicalOptions

    @property
    def _place(self) -> int:
        return self.group.machine

    def _make_topology(self) -> Topology:
        workers = Counter(self.group.machines)
        if len(set(workers.values())) > 1:
            raise UsageError(
                "hierarchical averaging needs as many workers on every machine; there are "
                f"{', '.join(str(workers[machine]) for machine in sorted(workers))}.",
                cause="a mean of unequal machines gives their workers unequal weights.",
                next_step="start equally many on each (--workers-per-machine), or take `neighbor`.",
            )
        return make_topology(self.options.topology, self.group.num_machines)

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        return exchange_machines(self.group, live, self._round_weights(), out=spare)
