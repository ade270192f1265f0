"""What EXTRA, exact diffusion and D² share: corrections of parameters that sum to zero over the workers.

A worker whose gradient is not zero at the common optimum would be drawn away from it in each step, and its
neighbours with it: the bias of plain averaging. The correction is what neighbours have disagreed by until
now; it comes to cancel the step that a worker would make at the optimum. Since it sums to zero, the mean of
all parameters moves by the steps alone.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.exact_options import SymmetricOptions
from shoal.strategies.fitting import require_symmetric
from shoal.strategies.mixing import MixStrategy
from shoal.strategies.options import CommonOptions
from shoal.topology import Topology


class CorrectedStrategy(MixStrategy):
    """Remembers a correction. Of `local_steps` J, each step gets 1/J of it, so that the limit stays exact.

    PeerLost when a peer is lost: without its correction the others' do not sum to zero, and would pull all of
    them into one direction for ever. So does, more gently, that of a worker that leaves in order, until the
    next global average (`global_average_every`).
    """

    Options: ClassVar[type[CommonOptions]] = SymmetricOptions
    options: SymmetricOptions

    @property
    def _correction(self) -> Companion:
        return self._kept["correction"]

    @property
    def _share(self) -> float:
        """Of the correction, what one step gets."""
        return 1 / self.options.local_steps

    def _make_topology(self) -> Topology:
        topology = super()._make_topology()
        require_symmetric(topology, self.name)
        return topology

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        return {"correction": self._private(attachment)}

    def _average_all(self) -> None:
        """Afterwards the corrections sum to zero, whatever rounding and losses have made of them."""
        super()._average_all()
        for own, mean in zip(self._correction.flats, self._correction.mean(self.group), strict=True):
            own.sub_(mean)


class DiffusionStrategy(CorrectedStrategy):
    """`φ_i = opt(x_i, g_i) + c_i`, then `x_i ← Σ_j W_ij φ_j` and `c_i ← c_i + x_i − φ_i`, from c_i = 0 on.

    With plain SGD and one step a round that is `x ← W(2x − x' − lr·(g − g'))`, where a dash means the step
    before. With another optimizer `lr·g` is what its step does. In a step that was skipped a worker mixes its
    parameters as they are.
    """

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        self._scratch["stepped"] = self._private(attachment)
        return super()._make_kept(attachment)

    def _after_step(self) -> None:
        self._twins.adopt()
        if not self.is_round:
            for pair, correction in zip(self._twins.pairs, self._correction.flats, strict=True):
                pair.live.add_(correction, alpha=self._share)
            return
        places = zip(self._twins.pairs, self._correction.flats, self._scratch["stepped"].flats, strict=True)
        for pair, correction, stepped in places:
            stepped.copy_(pair.live)
            pair.live.add_(correction, alpha=self._share)
        try:
            self._finish_round()
        except BaseException:
            self._undo_correction()
            raise

    def _finish_round(self) -> None:
        super()._finish_round()
        for pair, correction in zip(self._twins.pairs, self._correction.flats, strict=True):
            correction.add_(pair.live).sub_(pair.spare)

    def _undo_correction(self) -> None:
        """Elsewhere: others may still read what was sent."""
        with torch.no_grad():
            for parameter, stepped in self._scratch["stepped"]:
                parameter.data = stepped.clone()
