"""`sgp`: stochastic gradient push, synchronous, on directed graphs (Assran et al. 2019, algorithm 1).

Every worker sends equal shares of its parameters, times its weight, to whom the topology says, and shares of
the weight with them; it keeps one share. The shares that a worker gives away sum to 1 (a column-stochastic
matrix), those that come need not: so the sum of all stays, and what comes divided by its weight has no bias,
however many send to whom. The asynchronous form is `push_sum`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from shoal.group import Group
from shoal.strategies.masses import MassStrategy
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import ParameterStrategy
from shoal.strategies.research_options import SgpOptions
from shoal.topology import Weights, make_topology_on


class StochasticGradientPush(MassStrategy, ParameterStrategy):
    """`w_i ← Σ_j p_ij w_j`, `z_i ← Σ_j p_ij w_j z_j / w_i` after the step, with `p_ij = 1/(d_j + 1)`.

    z are the parameters that train, and d_j is to how many j sends in this round. The optimizer's learning
    rate is divided by w_i, so that every worker's gradient counts alike in the sum: with plain SGD that is
    the algorithm of the paper, with another optimizer its step takes the gradient's place. Outlives lost
    peers: one that is missing counts as one with a weight of 1 and the parameters of who should hear from it.
    """

    name = "sgp"
    survives_loss = True
    Options: ClassVar[type[CommonOptions]] = SgpOptions
    options: SgpOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.topology = make_topology_on(self.options.topology, group.size, group.num_machines)

    @property
    def stats(self) -> dict[str, Any]:
        """The weight."""
        return {"weight": self.weight}

    def _before_step(self) -> None:
        self._look_for_losses()

    def _after_step(self) -> None:
        if self.is_round:
            self._push()

    def _skipped_step(self) -> None:
        self._after_step()

    def _push(self) -> None:
        rank = self.group.rank
        sources = {source: self._share(source) for source in self.topology.sources(rank, self.rounds)}
        destinations = self.topology.destinations(rank, self.rounds)
        own = self._share(rank) * self.weight
        self.weight = self._mix(Weights(own, sources, dict.fromkeys(destinations, self.weight)))

    def _share(self, rank: int) -> float:
        """What a worker gives of itself to each destination, and keeps, in this round."""
        return 1 / (len(self.topology.destinations(rank, self.rounds)) + 1)

    def _average_all(self) -> None:
        """The mean over the weights, which are 1 afterwards."""
        factor, size = self._mass_factor(), len(self.group.members)
        others = self._others
        self._mix(Weights(factor / size, dict.fromkeys(others, 1 / size), dict.fromkeys(others, factor)))
        self.weight = 1.0

    def _mix(self, weights: Weights) -> float:
        """The parameters become what comes, divided by its weight, which is returned.

        Who is lost meanwhile may be in one of the sums and not in another: then the parameters stay. One that
        leaves in order does so between two rounds.
        """
        num_lost = len(self.group.lost)
        self._twins.adopt()
        mass = torch.ones(1, dtype=torch.float64)
        handles = [self.group.exchange(live, weights, out=spare) for live, spare in self._twins.pairs]
        handles.append(self.group.exchange(mass, weights))
        for handle in handles:
            handle.wait()
        is_whole = len(self.group.lost) == num_lost
        if is_whole:
            for pair in self._twins.pairs:
                pair.spare.mul_(1 / mass.item())
        self._finish((), should_keep=not is_whole)
        return mass.item() if is_whole else self.weight
