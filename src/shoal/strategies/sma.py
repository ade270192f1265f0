"""Synchronous model averaging (KungFu's SMA; the elastic averaging family, Zhang et al. 2015)."""

from __future__ import annotations

from typing import ClassVar

import torch

from shoal.group import Handle
from shoal.strategies.options import CommonOptions, SmaOptions
from shoal.strategies.parameters import ExchangeStrategy
from shoal.topology import Weights


class SynchronousModelAverage(ExchangeStrategy):
    """`w ← (1 − α)·w + α·mean(w)`, then the local gradient, taken at the old w; overlapped with backward."""

    name = "sma"
    Options: ClassVar[type[CommonOptions]] = SmaOptions
    options: SmaOptions

    @property
    def is_overlapped(self) -> bool:
        """Always: the average comes before the step."""
        return True

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        others = self._others
        share = self.options.alpha / (len(others) + 1)
        own = 1 - self.options.alpha + share
        weights = Weights(own, dict.fromkeys(others, share), dict.fromkeys(others, 1.0))
        return self.group.exchange(live, weights, out=spare)
