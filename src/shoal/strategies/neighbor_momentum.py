"""`momentum`: DSGD that mixes momentum with the parameters (DmSGD; Ying et al. 2021, algorithm 1).

Also Yu, Jin, Yang 2019 and Yuan et al. 2021. On the one-peer exponential graph a round costs one message of
parameters and one of momentum, and workers come to agree as fast as on the static graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.strategies.local_sgd import SteppedParameters
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import MomentumOptions
from shoal.strategies.session import TrainingSession
from shoal.tensors import BucketLayout, FlaggedBucket
from shoal.topology import Weights


class NeighborMomentum(ExchangeStrategy):
    """`x_i ← Σ_j W_ij x_j` and `m_i ← Σ_j W_ij m_j` after the step, over the neighbours of the round.

    m is the optimizer's own: the momentum buffers of SGD or RMSprop, the first moments of Adam and its kin.
    Outlives lost peers, as `neighbor` does.

    A parameter that only some workers use is mixed among those, U, that have stepped it since the last round:
    `m_i ← Σ_{j∈U} W_ij m_j + (1 − Σ_{j∈U} W_ij) m_i` for i in U, and who has not stepped it keeps what it
    has. torch moves neither a parameter without a gradient nor its momentum, so such a worker adds
    `x_j` to the mix of parameters and nothing to that of momentum. If W is symmetric, the sum over U follows
    `Σm ← β Σm + Σg`, which is how the mean of x moves. A worker outside of U that counted as zero would
    take its weight off the momentum in every round. A global average takes the mean over U.
    """

    name = "momentum"
    survives_loss = True
    Options = MomentumOptions
    options: MomentumOptions

    _stepped: SteppedParameters
    _buckets: list[_MomentumBuckets]

    def start(self, session: TrainingSession) -> None:
        """Allocates what momentum travels in; momentum itself is part of the optimizer's state."""
        if not all(group.get("momentum") or group.get("betas") for group in session.optimizer.param_groups):
            raise UsageError(
                f"momentum mixes momentum buffers, and this {type(session.optimizer).__name__} has none.",
                next_step="build it with momentum (torch.optim.SGD(…, momentum=0.9)), or take neighbor.",
            )
        super().start(session)
        self._stepped = SteppedParameters()
        self._buckets = []
        for layout in BucketLayout.plan(session.trainable, max_bytes=sys.maxsize):
            own, mixed = (FlaggedBucket(layout, session.empty) for _ in range(2))
            self._buckets.append(_MomentumBuckets(layout.pick(session.trainable), own, mixed))

    def after_step(self, session: TrainingSession) -> None:
        """Mixes parameters and momentum."""
        if not session.is_skipped:
            self._stepped.add_step(session)
        if session.is_round:
            self._share_all(session, self.round_weights(session))

    def average_all(self, session: TrainingSession) -> None:
        """Averages the momentum of all members with their parameters."""
        self._share_all(session, Weights.uniform(session.others, session.others), is_mean=True)

    def _share_all(self, session: TrainingSession, weights: Weights, *, is_mean: bool = False) -> None:
        """Both or, when something fails, neither."""
        self._buffers.adopt()
        handles = [session.group.exchange(live, weights, out=spare) for live, spare in self._buffers.pairs]
        for buckets in self._buckets:
            buckets.load([self._momentum_of(session, parameter) for parameter in buckets.parameters])
            handles.append(session.group.exchange(buckets.own.memory, weights, out=buckets.mixed.memory))
        session.finish_exchange(handles)
        for buckets in self._buckets:
            for parameter, momentum in zip(buckets.parameters, buckets.mixes(is_mean=is_mean), strict=True):
                self._take_momentum(session, parameter, momentum)
            # what was sent may be read by others until an exchange writes it
            buckets.own, buckets.mixed = buckets.mixed, buckets.own
        self._stepped.is_round_over = True

    def _momentum_of(self, session: TrainingSession, parameter: nn.Parameter) -> torch.Tensor | None:
        """Its momentum in the optimizer, dense; None where this worker has none that is new."""
        state, key = self._place_of(session, parameter)
        momentum: torch.Tensor | None = state.get(key)
        return momentum.to_dense() if momentum is not None and momentum.is_sparse else momentum

    def _take_momentum(self, session: TrainingSession, parameter: nn.Parameter, mixed: torch.Tensor) -> None:
        """Put what has come where the optimizer keeps its momentum, if it has some that is new."""
        state, key = self._place_of(session, parameter)
        momentum = state.get(key)
        if momentum is None:
            return
        if momentum.is_sparse:
            # a sparse one again: with nesterov, SGD cannot add a dense one to sparse gradients
            state[key] = mixed.to_sparse(momentum.sparse_dim())
        else:
            momentum.copy_(mixed)

    def _place_of(self, session: TrainingSession, parameter: nn.Parameter) -> tuple[dict[str, Any], str]:
        """The optimizer's state of a parameter, empty unless it was stepped, and the key of its momentum."""
        state = session.optimizer.state.get(parameter, {}) if parameter in self._stepped else {}
        return state, "momentum_buffer" if "momentum_buffer" in state else "exp_avg"


@dataclass(slots=True)
class _MomentumBuckets:
    """The momentum of one dtype's parameters as it is sent and as it comes, in two buckets of the group.

    A flag for each parameter goes with it: 1 from who has no momentum of it. So what comes in its place is
    the weight of those that have none, and exactly 0 where all have some.
    """

    parameters: Sequence[nn.Parameter]
    own: FlaggedBucket
    mixed: FlaggedBucket

    def load(self, momenta: Sequence[torch.Tensor | None]) -> None:
        """Fill what is sent."""
        for momentum, view in zip(momenta, self.own.views, strict=True):
            if momentum is None:
                view.zero_()
            else:
                view.copy_(momentum)
        self.own.flags.copy_(torch.tensor([momentum is None for momentum in momenta]))

    def mixes(self, *, is_mean: bool) -> Iterator[torch.Tensor]:
        """Give what has come for each parameter; of no meaning where this worker has no momentum."""
        missing = self.mixed.flags.real.tolist()
        for weight, own, mixed in zip(missing, self.own.views, self.mixed.views, strict=True):
            if is_mean and 0 < weight < 1:
                mixed.div_(1 - weight)
            elif weight:
                mixed.add_(own, alpha=weight)
            yield mixed
