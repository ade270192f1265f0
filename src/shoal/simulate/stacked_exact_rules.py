"""The steps of strategies that remember something from round to round, for all workers at once.

As `stacked_rules`, whose files these are in the strategies' room: momentum that is mixed too, trackers of the
mean gradient, and corrections.
"""

from __future__ import annotations

import sys

import torch

from shoal.simulate.stacked_mixing import Mix
from shoal.simulate.stacked_rules import NeighborRule, Stage
from shoal.strategies.all_reduce import flagged_bytes


class MomentumRule(NeighborRule):
    """Momentum takes the parameters' ways, with a flag for each parameter."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._momentum_bytes = sum(map(flagged_bytes, stage.model.layouts(sys.maxsize)))

    def after_step(self) -> None:
        """Mixes parameters and momenta at once."""
        if self.is_round:
            self._share_all(self._mix())

    def average_all(self) -> None:
        """Averages parameters and momenta over all workers."""
        self._share_all(self._everybody)

    def _share_all(self, mix: Mix) -> None:
        momentum = self._optimizer.momentum_buffer
        assert momentum is not None, "an optimizer with momentum that has stepped"
        sizes = (self._size_bytes, self._momentum_bytes)
        for number in [self._tape.exchange(mix.edges, size_bytes) for size_bytes in sizes]:
            self._tape.wait(number)
        self._model.values = mix(self._model.values)
        self._optimizer.momentum_buffer = mix(momentum)


class TrackingRule(NeighborRule):
    """Gradient tracking: trackers take the gradients' place."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._tracker = torch.zeros_like(self._model.values)
        self._last = torch.zeros_like(self._model.values)

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """Mixes the trackers, and lets the optimizer step along them."""
        self._tracker = self._tracker + (gradients - self._last)
        self._last = gradients
        if self.is_round:
            self._tracker = self._exchange(self._mix(), self._tracker)
        return self._tracker

    def average_all(self) -> None:
        """Afterwards each tracker is the mean of the last gradients."""
        super().average_all()
        self._tracker = self._exchange(self._everybody, self._last)


class CorrectedRule(NeighborRule):
    """Corrections that sum to zero over the workers; each step gets its share of them."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._correction = torch.zeros_like(self._model.values)
        self._share = 1 / stage.strategy.options.local_steps

    def average_all(self) -> None:
        """Afterwards they sum to zero again."""
        super().average_all()
        self._correction = self._correction - self._exchange(self._everybody, self._correction)

    def _keep(self, correction: torch.Tensor) -> None:
        """Without what rounding adds to their sum: products round otherwise than differences."""
        self._correction = correction - correction.mean(0)


class DiffusionRule(CorrectedRule):
    """Exact diffusion, and D² with other weights."""

    def after_step(self) -> None:
        """Corrects the parameters, then combines them with the neighbours'."""
        stepped = self._model.values.add_(self._correction, alpha=self._share)
        if self.is_round:
            self._model.values = self._exchange(self._mix(), stepped)
            self._keep(self._correction + (self._model.values - stepped))


class ExtraRule(CorrectedRule):
    """The mix of the parameters at which the gradient was taken, less the correction."""

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """Combines the parameters with the neighbours', then corrects them."""
        old = self._model.values
        gradients = super().before_step(gradients)
        is_mixed = self._model.values is not old
        mixed = self._model.values
        self._model.values = mixed - self._share * self._correction
        if is_mixed:
            self._keep(self._correction + (old - mixed) / 2)
        return gradients
