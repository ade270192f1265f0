"""Strategies that average parameters with neighbours by one exchange a round, in lockstep.

`neighbor` is BlueFog's neighbor_allreduce, over static and time-varying topologies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, Handle, exchange_machines
from shoal.group.elastic import elastic_of
from shoal.strategies.options import HierarchicalOptions, MixOptions, NeighborOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import ParameterBuffers
from shoal.topology import Topology, Weights, make_topology, make_topology_on

WeightsRule: TypeAlias = Callable[[int], Weights]
"""From the number of the round, counted from 0, to this worker's weights in it."""


class ExchangeStrategy(Strategy):
    """`w ← Mix(w)` once a round, by default with the neighbours in the topology that the options name.

    Adapt-then-combine: `w ← Mix(w − lr·g(w))`, after the step. Adapt-while-combine (`is_overlapped`): the
    exchange starts after the forward and goes on during loss and backward; before the step, `w ← Mix(w)`, and
    the optimizer steps from there with the gradient taken at the old w. Parameters that are written in
    between (a forward that no step follows, then `load_state_dict`) win over the mix: this worker leaves out
    what it receives, once.
    """

    topology: Topology
    _place: int
    """The place of this worker in the topology."""
    _buffers: ParameterBuffers
    _under_way: list[Handle[torch.Tensor]] | None = None

    @property
    def is_overlapped(self) -> bool:
        """Whether it adapts while it combines."""
        return False

    def set_group(self, group: Group) -> None:
        """Makes the topology of the group's workers, where the options name one."""
        super().set_group(group)
        self._place = group.rank
        if isinstance(self.options, MixOptions):
            topology = make_topology_on(self.options.topology, group.size, group.num_machines)
            self.topology = self.fit(topology)

    def fit(self, topology: Topology) -> Topology:
        """Gives the topology as the method needs it; UsageError where that is not possible."""
        return topology

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives the weights of this worker in the round that comes."""
        return self.topology.weights(self._place, self.rounds)

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Starts this round's exchange of one buffer into another."""
        return session.group.exchange(live, self.round_weights(session), out=spare)

    def hears(self, method: str) -> bool:
        """Listens to forward passes, and acts before a step, only where rounds start with them."""
        is_own = method == "before_step" and type(self).before_step is ExchangeStrategy.before_step
        return self.is_overlapped if is_own or method == "after_forward" else super().hears(method)

    def start(self, session: TrainingSession) -> None:
        """Moves the parameters into two buffers of the group."""
        self._buffers = session.hold_parameters(2)
        self._under_way = None

    def after_forward(self, session: TrainingSession) -> None:
        """Starts a round that is overlapped with backward."""
        is_early = session.is_accumulating or self._under_way is not None
        if self.is_overlapped and session.is_round and not is_early:
            self._under_way = self._start_round(session)
            self._buffers.mark()

    def before_step(self, session: TrainingSession) -> None:
        """Finishes an overlapped round."""
        super().before_step(session)
        if self.is_overlapped and session.is_round:
            self._finish_round(session)

    def after_step(self, session: TrainingSession) -> None:
        """Makes the round, unless it is overlapped."""
        if session.is_round and not self.is_overlapped:
            self._finish_round(session)

    def _start_round(self, session: TrainingSession) -> list[Handle[torch.Tensor]]:
        self._buffers.adopt()
        return [self.exchange(session, live, spare) for live, spare in self._buffers.pairs]

    def _finish_round(self, session: TrainingSession) -> None:
        handles, self._under_way = self._under_way, None
        if handles is None:
            session.finish_exchange(self._start_round(session))
        else:
            session.finish_exchange(handles, should_keep=self._buffers.is_written())


class NeighborAverage(ExchangeStrategy):
    """`x_i ← Σ_j W_ij x_j` over the neighbours of the round; outlives lost peers.

    `topology` is a name, a function of the number of ranks, a Topology, a matrix or a networkx graph.
    `weights`, when it is set, comes before the topology, from the next round on.
    """

    name = "neighbor"
    survives_loss = True
    Options = NeighborOptions
    options: NeighborOptions
    _weights: Weights | WeightsRule | None = None

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

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives those that were set, or the topology's."""
        if self._weights is None:
            return super().round_weights(session)
        return self._weights if isinstance(self._weights, Weights) else self._weights(self.rounds)


class HierarchicalAverage(NeighborAverage):
    """`x_i ← Σ_m W_{m(i) m} · mean of machine m`: `topology` and `weights` are over machines.

    The documents' hierarchical_neighbor_allreduce. On a single machine it averages all workers' parameters.
    Where workers come and go, machines may have unequal numbers of them, whose weights are unequal then.
    """

    name = "hierarchical"
    survives_loss = False
    Options = HierarchicalOptions
    options: HierarchicalOptions

    def set_group(self, group: Group) -> None:
        """Makes the topology of the group's machines."""
        self.group, self._place = group, group.machine
        workers = Counter(group.machines)
        if len(set(workers.values())) > 1 and elastic_of(group) is None:
            raise UsageError(
                "hierarchical averaging needs as many workers on every machine; there are "
                f"{', '.join(str(workers[machine]) for machine in sorted(workers))}.",
                cause="a mean of unequal machines gives their workers unequal weights.",
                next_step="start equally many on each (--workers-per-machine), or take `neighbor`.",
            )
        self.topology = make_topology(self.options.topology, group.num_machines)

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Averages inside each machine first."""
        return exchange_machines(session.group, live, self.round_weights(session), out=spare)
