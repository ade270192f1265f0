"""`sgp`: stochastic gradient push, synchronous, on directed graphs (Assran et al. 2019, algorithm 1).

Every worker sends equal shares of its parameters, times its weight, to whom the topology says, and shares of
the weight with them; it keeps one share. The shares that a worker gives away sum to 1 (a column-stochastic
matrix), those that come need not: so the sum of all stays, and what comes divided by its weight has no bias,
however many send to whom. The asynchronous form is `push_sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.group import Group, share
from shoal.strategies.averaging import mean_over
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import SgpOptions
from shoal.strategies.session import TrainingSession
from shoal.topology import Weights


class StochasticGradientPush(ExchangeStrategy):
    """`w_i ← Σ_j p_ij w_j`, `z_i ← Σ_j p_ij w_j z_j / w_i` after the step, with `p_ij = 1/(d_j + 1)`.

    z are the parameters that train, and d_j is to how many j sends in this round. The optimizer's learning
    rate is divided by w_i, so that every worker's gradient counts alike in the sum: with plain SGD that is
    the algorithm of the paper, with another optimizer its step takes the gradient's place. Outlives lost
    peers: one that is missing counts as one with a weight of 1 and the parameters of who should hear from it.
    """

    name = "sgp"
    survives_loss = True
    Options = SgpOptions
    options: SgpOptions

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.weight = 1.0
        """This worker's mass: 1 on average over all."""

    @property
    def rate_divisor(self) -> float:
        """The weight: the optimizer works on the parameters, but steps in the sum."""
        return self.weight

    @property
    def stats(self) -> dict[str, Any]:
        """The weight, for reports."""
        return {"weight": self.weight}

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives shares of what others have, and of this worker's own weight."""
        rank = self.group.rank
        sources = {source: self._share(source) for source in self.topology.sources(rank, self.rounds)}
        destinations = self.topology.destinations(rank, self.rounds)
        own = self._share(rank) * self.weight
        return Weights(own, sources, dict.fromkeys(destinations, self.weight))

    def _finish_round(self, session: TrainingSession) -> None:
        self.weight = self._mix(session, self.round_weights(session))

    def _share(self, rank: int) -> float:
        """What a worker gives of itself to each destination, and keeps, in this round."""
        return 1 / (len(self.topology.destinations(rank, self.rounds)) + 1)

    def average_all(self, session: TrainingSession) -> None:
        """Takes the mean over the weights, which are 1 afterwards."""
        factor, size = mass_factor(self.group, self.weight), len(self.group.members)
        others = session.others
        self._mix(
            session, Weights(factor / size, dict.fromkeys(others, 1 / size), dict.fromkeys(others, factor))
        )
        self.weight = 1.0

    def _mix(self, session: TrainingSession, weights: Weights) -> float:
        """Makes the parameters what comes, divided by its weight, which is returned.

        Who is lost meanwhile may be in one of the sums and not in another: then the parameters stay. One that
        leaves in order does so between two rounds.
        """
        num_lost = len(self.group.lost)
        self._buffers.adopt()
        mass = torch.ones(1, dtype=torch.float64)
        handles = [self.group.exchange(live, weights, out=spare) for live, spare in self._buffers.pairs]
        handles.append(self.group.exchange(mass, weights))
        for handle in handles:
            handle.wait()
        is_whole = len(self.group.lost) == num_lost
        if is_whole:
            self._buffers.spare.mul_(1 / mass.item())
        session.finish_exchange((), should_keep=not is_whole)
        return mass.item() if is_whole else self.weight

    def common_model(self, session: TrainingSession) -> dict[str, torch.Tensor]:
        """Gives the mean over the weights, not over the workers."""
        return mass_model(session, super().common_model(session), self.weight)

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Begins with a weight of 1."""
        super().load_common_state(state)
        self.weight = 1.0


def mass_factor(group: Group, weight: float) -> float:
    """Computes by how much this worker counts in a mean over the members. Collective."""
    masses = share(group, weight)
    return float(weight * len(masses) / sum(masses))


def mass_model(
    session: TrainingSession, common: dict[str, torch.Tensor], weight: float
) -> dict[str, torch.Tensor]:
    """Gives the one model of workers that count by a mass each: the mean over the masses. Collective."""
    if session.is_alone:
        return common
    factor = mass_factor(session.group, weight)
    parameters = dict(session.model.named_parameters(remove_duplicate=False))
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    means = mean_over(session.group, [parameters[name].detach() * factor for name in names])
    return {**common, **dict(zip(names, means, strict=True))}
