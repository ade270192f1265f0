"""Synchronous model averaging (KungFu's SMA; the elastic averaging family, Zhang et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core import Deadline
from shoal.group import Handle
from shoal.strategies.exchange import ExchangeStrategy
from shoal.strategies.options import SmaOptions, StrategyOptions
from shoal.strategies.session import TrainingSession
from shoal.topology import Weights


class SynchronousModelAverage(ExchangeStrategy):
    """`w ← (1 − α)·w + α·mean(w)`, then the local gradient, taken at the old w; overlapped with backward."""

    name = "sma"
    Options: ClassVar[type[StrategyOptions]] = SmaOptions
    options: SmaOptions

    @property
    def is_overlapped(self) -> bool:
        """Always: the average comes before the step."""
        return True

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives α of the mean's weight to each."""
        others = session.others
        share = self.options.alpha / (len(others) + 1)
        own = 1 - self.options.alpha + share
        return Weights(own, dict.fromkeys(others, share), dict.fromkeys(others, 1.0))

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Mixes with the mean; over several machines that is an all-reduce, which sends once a machine."""
        if session.group.num_machines == 1:
            return super().exchange(session, live, spare)
        session.group.settle(spare)
        spare.copy_(live)
        return _Mixed(session.group.all_reduce(spare), live, spare, self.options.alpha)


@dataclass(eq=False, slots=True)
class _Mixed(Handle[torch.Tensor]):
    """Has `spare` become a mix of `live` and the mean that comes into it."""

    mean: Handle[torch.Tensor] | None
    live: torch.Tensor
    spare: torch.Tensor
    alpha: float

    def wait(self, deadline: Deadline | None = None) -> torch.Tensor:
        if self.mean is not None:
            self.mean.wait(deadline)
            self.mean = None
            torch.lerp(self.live, self.spare, self.alpha, out=self.spare)
        return self.spare

    def is_done(self) -> bool:
        return self.mean is None or self.mean.is_done()
