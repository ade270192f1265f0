"""`momentum`: DSGD that mixes momentum with the parameters (DmSGD; Ying et al. 2021, algorithm 1).

Also Yu, Jin, Yang 2019 and Yuan et al. 2021. On the one-peer exponential graph a round costs one message of
parameters and one of momentum, and workers come to agree as fast as on the static graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.group import Handle
from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.exact_options import MomentumOptions
from shoal.strategies.mixing import MixStrategy
from shoal.strategies.options import CommonOptions
from shoal.topology import Weights


class NeighborMomentum(MixStrategy):
    """`x_i ← Σ_j W_ij x_j` and `m_i ← Σ_j W_ij m_j` after the step, over the neighbours of the round.

    m is the optimizer's own: the momentum buffers of SGD or RMSprop, the first moments of Adam and its kin.
    A worker that has none of a parameter yet (its step was skipped, or did not use it) counts as zero there,
    and leaves out what comes. Outlives lost peers, as `neighbor` does.
    """

    name = "momentum"
    survives_loss = True
    Options: ClassVar[type[CommonOptions]] = MomentumOptions
    options: MomentumOptions

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        """Nothing: momentum is part of the optimizer's state."""
        self._scratch = {"own": self._shared(attachment), "mixed": self._shared(attachment)}
        return {}

    def _started(self, attachment: Attachment) -> None:
        _require_momentum(attachment.optimizer)
        super()._started(attachment)

    def _finish_round(self) -> None:
        self._share_all(self.topology.weights(self.group.rank, self.rounds))

    def _average_all(self) -> None:
        self._share_all(Weights.uniform(self._others, self._others))

    def _share_all(self, weights: Weights) -> None:
        """Both or, when something fails, neither."""
        self._twins.adopt()
        handles = [self.group.exchange(live, weights, out=spare) for live, spare in self._twins.pairs]
        self._finish([*handles, *self._send_momentum(weights)])
        own, mixed = self._scratch["own"], self._scratch["mixed"]
        for momentum, came in self._places(mixed):
            if momentum is not None:
                momentum.copy_(came)
        # what was sent may be read by others until an exchange writes it
        self._scratch = {"own": mixed, "mixed": own}

    def _send_momentum(self, weights: Weights) -> list[Handle[torch.Tensor]]:
        own, mixed = self._scratch["own"], self._scratch["mixed"]
        for momentum, place in self._places(own):
            if momentum is None:
                place.zero_()
            else:
                place.copy_(momentum)
        flats = zip(own.flats, mixed.flats, strict=True)
        return [self.group.exchange(sent, weights, out=came) for sent, came in flats]

    def _places(self, companion: Companion) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """Each parameter's momentum in the optimizer, and its tensor in a companion."""
        state = self.attachment.optimizer.state
        for parameter, view in companion:
            entry = state.get(parameter, {})
            yield entry.get("momentum_buffer", entry.get("exp_avg")), view


def _require_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if not (group.get("momentum") or group.get("betas")):
            raise UsageError(
                f"momentum mixes momentum buffers, and this {type(optimizer).__name__} has none.",
                next_step="build it with momentum (torch.optim.SGD(…, momentum=0.9)), or take neighbor.",
            )
