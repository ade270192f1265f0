"""Synchronous model averaging (KungFu's SMA; the elastic averaging family, Zhang et al. 2015)."""

from __future__ import annotations

from typing import ClassVar

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
