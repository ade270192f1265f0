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
from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import ParameterStrategy
from shoal.strategies.relay_tree import Branch, branches, num_colors
from shoal.strategies.research_options import RelayOptions
from shoal.topology import Weights

log = logging.getLogger(__name__)


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
    """How many models are summed in what has come; 0 once the neighbour has left."""


class RelaySGD(ParameterStrategy):
    """`x_i ← (x_i + Σ_j m_ji) / n` after the step, over the neighbours j in the tree.

    `m_ij = x_i + Σ_{k ≠ j} m_ki` is sent to j, with what k sent the round before. What has not come yet
    counts as the model of the start, so that everything has the weight 1/n from the first round on. With
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

    def state_dict(self) -> dict[str, Any]:
        """Also the sums of models that have come, which are to be passed on."""
        state = super().state_dict()
        if self._edges:
            state["relayed"] = {
                "tree": self.options.tree,
                "counts": [edge.count for edge in self._edges],
                "sums": [edge.box.come.state_dict() for edge in self._edges],
            }
        elif self._loaded is not None:
            state["relayed"] = self._loaded
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of the same rank; before attach, the sums wait until then. Those of another tree don't count."""
        super().load_state_dict(state)
        self._loaded = state.get("relayed")
        if self._edges:
            self._take_loaded()

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
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded["tree"] != self.options.tree:
            return
        for edge, count, sums in zip(self._edges, loaded["counts"], loaded["sums"], strict=True):
            edge.count = int(count)
            edge.box.come.load(sums)

    def _stopped(self) -> None:
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
            torch.mul(live, 1 / total, out=spare)
            for edge in open_edges:
                spare.add_(edge.box.come.flats[index], alpha=1 / total)
        self._twins.swap()

    def _write_messages(self) -> list[int]:
        """To each neighbour: this worker's model, and what has come from the others. How many that are."""
        counts = []
        for edge in self._edges:
            others = [other for other in self._edges if other is not edge and other.count]
            for index, pair in enumerate(self._twins.pairs):
                message = edge.box.sent.flats[index]
                self.group.settle(message)
                message.copy_(pair.live)
                for other in others:
                    message.add_(other.box.come.flats[index])
            counts.append(1 + sum(other.count for other in others))
        return counts

    def _meet(self, counts: Sequence[int]) -> tuple[list[torch.Tensor], list[Handle[torch.Tensor]]]:
        """Start the exchanges of a round, one for each color, which all members issue alike.

        The head of each says of whom it is and how many models are in the sum. It goes after the sum: what
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
                torch.mul(pair.live, edge.count, out=tensor)
