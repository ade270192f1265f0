"""`relay`: models passed on along a tree, RelaySum (Vogels et al. 2021, section 3, algorithm 1, RelaySGD).

Every worker gets the sum of all others' models through its neighbours in a spanning tree, each model once and
as many rounds old as it has edges to come over. So all workers count alike in every average, though nobody
speaks with more than its neighbours, and where workers' data differ the limit is that of their sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from shoal.group import Group, Handle
from shoal.group.kernels import add_differences
from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import ParameterStrategy
from shoal.strategies.relay_tree import Branch, branches, num_colors
from shoal.strategies.research_options import RelayOptions
from shoal.topology import Weights

log = logging.getLogger(__name__)
_PLACE = ("tree", "rank", "size")


class _Box(NamedTuple):
    """Memory of the group for one color, on workers without such an edge too: an exchange takes all along."""

    sent: Companion
    come: Companion


@dataclass(slots=True)
class _Edge:
    """What goes to and comes from one neighbour."""

    branch: Branch
    box: _Box
    count: int
    """Of how many models what has come is the mean; 0 once the neighbour has left."""


class RelaySGD(ParameterStrategy):
    """`x_i ← (x_i + Σ_j m_ji) / n` after the step, over the neighbours j in the tree.

    `m_ij = x_i + Σ_{k ≠ j} m_ki` is sent to j, with what k sent the round before; as a mean, with the number
    of models in it, so that equal models stay what they are. What has not come yet counts as the model of the
    start, so that everything has the weight 1/n from the first round on. With
    plain SGD that is the algorithm of the paper; other optimizers step in its place. A lost peer ends it, as
    nothing passes where the tree is broken; where a worker leaves in order, each part goes on by itself.
    """

    name = "relay"
    Options: ClassVar[type[CommonOptions]] = RelayOptions
    options: RelayOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        tree = branches(self.options.tree, group.size)
        self._branches = tree[group.rank]
        self._num_colors = num_colors(tree)
        self._boxes: list[_Box] = []
        self._edges: list[_Edge] = []
        self._loaded: Mapping[str, Any] | None = None
        self._ended: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Also the means of models that have come, which are to be passed on; after the `with` block too."""
        state = super().state_dict()
        relayed = self._relayed() if self._edges else self._loaded or self._ended
        return state if relayed is None else {**state, "relayed": relayed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before attach, the means wait until then. Those of another rank, tree or size don't count."""
        super().load_state_dict(state)
        self._loaded, self._ended = state.get("relayed"), None
        if self._edges:
            self._take_loaded()

    def _relayed(self) -> dict[str, Any]:
        return {
            "tree": self.options.tree,
            "rank": self.group.rank,
            "size": self.group.size,
            "counts": [edge.count for edge in self._edges],
            "means": [edge.box.come.state_dict() for edge in self._edges],
        }

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict({name: value for name, value in state.items() if name != "relayed"})

    def _started(self, attachment: Attachment) -> None:
        super()._started(attachment)
        named = attachment.named_parameters
        self._boxes = [
            _Box(Companion(named, self._allocate), Companion(named, self._allocate))
            for _ in range(self._num_colors)
        ]
        self._edges = [_Edge(branch, self._boxes[branch.color], branch.size) for branch in self._branches]
        self._start_anew()
        self._take_loaded()

    def _take_loaded(self) -> None:
        loaded = self._loaded
        place = (self.options.tree, self.group.rank, self.group.size)
        if loaded is not None and tuple(map(loaded.get, _PLACE)) == place:
            for edge, count, mean in zip(self._edges, loaded["counts"], loaded["means"], strict=True):
                edge.count = int(count)
                edge.box.come.load(mean)
        self._loaded = None

    def _stopped(self) -> None:
        if self._edges:
            self._ended = self._relayed()
        self._boxes, self._edges = [], []
        super()._stopped()

    def _before_step(self) -> None:
        self._look_for_losses()

    def _after_step(self) -> None:
        if self.is_round:
            self._relay()

    def _skipped_step(self) -> None:
        self._after_step()

    def _relay(self) -> None:
        self._twins.adopt()
        counts = self._write_messages()
        heads, handles = self._meet(counts)
        for handle in handles:
            handle.wait()
        self._look_for_losses()
        for edge in self._edges:
            self._take_count(edge, heads[edge.branch.color])
        open_edges = [edge for edge in self._edges if edge.count]
        total = 1 + sum(edge.count for edge in open_edges)
        for index, (live, spare) in enumerate(self._twins.pairs):
            _mean_into(spare, live, open_edges, index, total)
        self._twins.swap()

    def _write_messages(self) -> list[int]:
        """To each neighbour: the mean of one's own model and what has come from the others. Of how many."""
        counts = []
        for edge in self._edges:
            others = [other for other in self._edges if other is not edge and other.count]
            counts.append(1 + sum(other.count for other in others))
            for index, pair in enumerate(self._twins.pairs):
                message = edge.box.sent.flats[index]
                self.group.settle(message)
                _mean_into(message, pair.live, others, index, counts[-1])
        return counts

    def _meet(self, counts: Sequence[int]) -> tuple[list[torch.Tensor], list[Handle[torch.Tensor]]]:
        """Start the exchanges of a round, one for each color, which all members issue alike.

        The head of each says of whom it is and how many models are in the mean. It goes after the mean: what
        comes with the partner's name is whole.
        """
        heads = [torch.zeros(2, dtype=torch.float64) for _ in range(self._num_colors)]
        handles = []
        edges = {edge.branch.color: (edge, count) for edge, count in zip(self._edges, counts, strict=True)}
        for color, head in enumerate(heads):
            head[0] = self.group.rank
            if color in edges:
                edge, count = edges[color]
                head[1] = count
                weights = Weights(0.0, {edge.branch.partner: 1.0}, {edge.branch.partner: 1.0})
            else:
                weights = Weights(1.0, {}, {})
            box = self._boxes[color]
            for sent, come in zip(box.sent.flats, box.come.flats, strict=True):
                handles.append(self.group.exchange(sent, weights, out=come))
            handles.append(self.group.exchange(head, weights))
        return heads, handles

    def _take_count(self, edge: _Edge, head: torch.Tensor) -> None:
        rank, count = head.tolist()
        if rank == edge.branch.partner:
            edge.count = int(count)
        elif edge.count:
            edge.count = 0
            log.warning(
                "rank %d has left, and with it what lies beyond it in the tree: %s on rank %d goes on "
                "without it, from round %d on.",
                edge.branch.partner, self.name, self.group.rank, self.rounds,
            )  # fmt: skip

    def _average_all(self) -> None:
        """Of all members; what was under way before it is void."""
        super()._average_all()
        self._start_anew()

    def _start_anew(self) -> None:
        """What has not come yet counts as this worker's own model."""
        for edge in self._edges:
            for tensor, pair in zip(edge.box.come.flats, self._twins.pairs, strict=True):
                tensor.copy_(pair.live)


def _mean_into(
    out: torch.Tensor, own: torch.Tensor, edges: Sequence[_Edge], index: int, num_models: int
) -> None:
    """Of a worker's own model and what has come over some edges, `num_models` in all."""
    out.copy_(own)
    add_differences(out, own, [(edge.box.come.flats[index], edge.count / num_models) for edge in edges])
