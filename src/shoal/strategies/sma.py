"""Synchronous model averaging (KungFu's SMA; the elastic averaging family, Zhang et al. 2015)."""

from __future__ import annotations

import torch

from shoal.group import Handle
from shoal.group.functions import Continued
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import SmaOptions
from shoal.strategies.session import TrainingSession
from shoal.topology import Weights


class SynchronousModelAverage(ExchangeStrategy):
    """`w ← (1 − α)·w + α·mean(w)`, then the local gradient, taken at the old w; overlapped with backward."""

    name = "sma"
    is_overlapped = True
    Options = SmaOptions
    options: SmaOptions

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives α of the mean's weight to each."""
        others = session.others
        share = self.options.alpha / (len(others) + 1)
        own = 1 - self.options.alpha + share
        return Weights(own, dict.fromkeys(others, share), dict.fromkeys(others, 1.0), is_by_rule=True)

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Mixes with the mean; over several machines that is an all-reduce, which sends once a machine."""
        if session.group.num_machines == 1:
            return super().exchange(session, live, spare)
        session.group.settle(spare)
        spare.copy_(live)
        mean = session.group.all_reduce(spare)
        return Continued(mean, lambda _: torch.lerp(live, spare, self.options.alpha, out=spare))
