"""`relay`: models passed on along a tree, RelaySum (Vogels et al. 2021, section 3, algorithm 1, RelaySGD).

Every worker gets the sum of all others' models through its neighbours in a spanning tree, each model once and
as many rounds old as it has edges to come over. So all workers count alike in every average, though nobody
speaks with more than its neighbours, and where workers' data differ the limit is that of their sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.group import Group, Handle
from shoal.group.kernels import add_differences
from shoal.strategies.options import RelayOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import Flat, ParameterBuffers
from shoal.topology import Weights
from shoal.topology.graphs import branches, num_colors

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Edge:
    """What goes to and comes from the neighbour over the edge of one color.

    Workers without such an edge have the memory, too: an exchange takes all along.
    """

    sent: Flat
    come: Flat
    partner: int | None = None
    count: int = 0
    """Of how many models what has come is the mean; 0 once the neighbour has left."""


class RelayedModels:
    """The means of models that have come to one place of a tree, over its edges, and are to be passed on."""

    def __init__(self, place: Mapping[str, Any], edges: Sequence[_Edge]) -> None:
        self._place = place
        self.edges = edges
        """One for each color."""
        self.own = [edge for edge in edges if edge.partner is not None]
        """Those at which there is, or was, a neighbour."""

    def state_dict(self) -> dict[str, Any]:
        """Gives copies of the means, with the number of models in each."""
        means = [edge.come.state_dict() for edge in self.own]
        return {**self._place, "counts": [edge.count for edge in self.own], "means": means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the means; those of another rank, tree or size don't count."""
        if all(state.get(name) == value for name, value in self._place.items()):
            for edge, count, mean in zip(self.own, state["counts"], state["means"], strict=True):
                edge.count = int(count)
                edge.come.load_state_dict(mean)


class RelaySGD(Strategy):
    """`x_i ← (x_i + Σ_j m_ji) / n` after the step, over the neighbours j in the tree.

    `m_ij = x_i + Σ_{k ≠ j} m_ki` is sent to j, with what k sent the round before; as a mean, with the number
    of models in it, so that equal models stay what they are. What has not come yet counts as the model of the
    start, so that everything has the weight 1/n from the first round on. With
    plain SGD that is the algorithm of the paper; other optimizers step in its place. A lost peer ends it, as
    nothing passes where the tree is broken; where a worker leaves in order, each part goes on by itself.
    """

    name = "relay"
    Options = RelayOptions
    options: RelayOptions

    _buffers: ParameterBuffers

    def set_group(self, group: Group) -> None:
        """Finds this worker's edges in the tree of the group's workers."""
        super().set_group(group)
        tree = branches(self.options.tree, group.size)
        self._branches = tree[group.rank]
        self._num_colors = num_colors(tree)

    def start(self, session: TrainingSession) -> None:
        """Counts what has not come yet as this worker's own model."""
        self._buffers = session.hold_parameters(2)
        like = self._buffers.live
        edges = [
            _Edge(like.zeros_like(session.empty), like.zeros_like(session.empty))
            for _ in range(self._num_colors)
        ]
        for branch in self._branches:
            edges[branch.color].partner, edges[branch.color].count = branch.partner, branch.size
        place = {"tree": self.options.tree, "rank": self.group.rank, "size": self.group.size}
        self.relayed = RelayedModels(place, edges)
        self._start_anew()

    def stop(self, session: TrainingSession) -> None:
        """Remembers what was to be passed on."""
        relayed: RelayedModels | None = vars(self).pop("relayed", None)
        if relayed is not None:
            self._ended = {"relayed": relayed.state_dict()}

    def after_step(self, session: TrainingSession) -> None:
        """Passes models on along the tree."""
        if not session.is_round:
            return
        self._buffers.adopt()
        edges = self.relayed.edges
        for edge in self.relayed.own:
            self._mean_into(edge.sent.flats, [other for other in edges if other is not edge])
        heads, handles = self._start_exchanges()
        session.wait_for(handles)
        for edge, head in zip(edges, heads, strict=True):
            self._take_count(edge, head)
        self._mean_into(self._buffers.spare.flats, edges)
        self._buffers.swap()

    def _mean_into(self, out: Sequence[torch.Tensor], edges: Sequence[_Edge]) -> None:
        """Computes the mean of this worker's own model and what has come over some edges."""
        num_models = 1 + sum(edge.count for edge in edges)
        for index, (mean, live) in enumerate(zip(out, self._buffers.live.flats, strict=True)):
            self.group.settle(mean)
            mean.copy_(live)
            come = [(edge.come.flats[index], edge.count / num_models) for edge in edges if edge.count]
            add_differences(mean, live, come)

    def _start_exchanges(self) -> tuple[list[torch.Tensor], list[Handle[torch.Tensor]]]:
        """Starts the exchanges of a round, one for each color, which all members issue alike.

        The head of each says of whom it is and how many models are in the mean. It goes after the mean: what
        comes with the partner's name is whole.
        """
        heads, handles = [], []
        total = 1 + sum(edge.count for edge in self.relayed.edges)
        for edge in self.relayed.edges:
            if edge.partner is None:
                weights = Weights(1.0, {}, {})
            else:
                weights = Weights(0.0, {edge.partner: 1.0}, {edge.partner: 1.0})
            heads.append(torch.tensor([self.group.rank, total - edge.count], dtype=torch.float64))
            for sent, come in zip(edge.sent.flats, edge.come.flats, strict=True):
                handles.append(self.group.exchange(sent, weights, out=come))
            handles.append(self.group.exchange(heads[-1], weights))
        return heads, handles

    def _take_count(self, edge: _Edge, head: torch.Tensor) -> None:
        rank, count = head.tolist()
        if rank == edge.partner:
            edge.count = int(count)
        elif edge.count:
            edge.count = 0
            log.warning(
                "rank %d has left, and with it what lies beyond it in the tree: %s on rank %d goes on "
                "without it, from round %d on.",
                edge.partner, self.name, self.group.rank, self.rounds,
            )  # fmt: skip

    def average_all(self, session: TrainingSession) -> None:
        """Averages all members; what was under way before it is void."""
        session.average_parameters()
        self._start_anew()

    def _start_anew(self) -> None:
        """What has not come yet counts as this worker's own model."""
        for edge in self.relayed.own:
            edge.come.copy_(self._buffers.live)
