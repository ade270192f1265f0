"""`extra`: an exact first-order algorithm (Shi, Ling, Wu, Yin 2015, algorithm 1 with W̃ = (I + W)/2)."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import UsageError
from shoal.strategies.corrected import CorrectedStrategy
from shoal.strategies.exact_options import ExtraOptions
from shoal.strategies.fitting import SYMMETRIC, smallest_eigenvalue
from shoal.strategies.options import CommonOptions
from shoal.topology import Topology


class Extra(CorrectedStrategy):
    """`x_i ← opt(x_i + d_i − e_i, g_i)` and `e_i ← e_i − d_i/2`, at first 0; `d_i = Σ_j W_ij (x_j − x_i)`.

    On the right are the old parameters, and g_i is taken there; the exchange goes on during backward. With
    plain SGD that is `x ← (I + W)x − (I + W)/2·x' − lr·(g − g')`, where a dash means the step before. With
    another optimizer `lr·g` is what its step does. In a step that was skipped a worker mixes its parameters
    as they are; where they are written between forward and step, they win over the mix, and the correction
    counts what was sent.
    """

    name = "extra"
    Options: ClassVar[type[CommonOptions]] = ExtraOptions
    options: ExtraOptions

    @property
    def is_overlapped(self) -> bool:
        """Always: the exchange comes before the step."""
        return True

    def _make_topology(self) -> Topology:
        topology = super()._make_topology()
        if smallest_eigenvalue(topology) < -1 + 1e-6:
            raise UsageError(
                f"extra needs eigenvalues above −1, and '{topology.name}' has −1.",
                cause="its workers keep nothing of their own parameters, and swap for ever.",
                next_step=f"give them weights of their own, or take {SYMMETRIC}.",
            )
        return topology

    def _before_step(self) -> None:
        self._look_for_losses()
        if self.attachment.is_void:
            self._skipped_step()
            return
        if self.is_round:
            self._mix(self._share)
            return
        self._twins.adopt()
        for pair, correction in zip(self._twins.pairs, self._correction.flats, strict=True):
            pair.live.sub_(correction, alpha=self._share)

    def _skipped_step(self) -> None:
        if self.is_round:
            self._mix(0.0)

    def _mix(self, share: float) -> None:
        """`x + d − share·e` with the old e, and e − d/2."""
        is_written = self._receive()
        for pair, correction in zip(self._twins.pairs, self._correction.flats, strict=True):
            correction.sub_(pair.spare, alpha=0.5)
            pair.spare.mul_(1 - share / 2).sub_(correction, alpha=share).add_(pair.live)
        if is_written:
            self._twins.keep()
        self._twins.swap()
