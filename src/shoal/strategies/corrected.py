"""What EXTRA, exact diffusion and D² share: corrections of parameters that sum to zero over the workers.

A worker whose gradient is not zero at the common optimum would be drawn away from it in each step, and its
neighbours with it: the bias of plain averaging. The correction is what neighbours have disagreed by until
now; it comes to cancel the step that a worker would make at the optimum. Since it sums to zero, the mean of
all parameters moves by the steps alone.

Sums of many rounds keep what each of them is rounded by. So what is exchanged are differences, of which two
neighbours have the same but for the sign, and not the mix, whose rounding does not cancel.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shoal.group import Handle
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

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        """`Σ_j W_ij (x_j − x_i)`: what mixing would change."""
        weights = self.topology.weights(self.group.rank, self.rounds)
        return self.group.exchange(live, weights.differences(), out=spare)

    def _receive(self) -> bool:
        """Fill the spare buffers with the differences; whether parameters were written since they were sent.

        Started here unless it was before. What fails leaves all as it was.
        """
        handles, self._under_way = self._under_way, None
        is_written = handles is not None and self._twins.is_written()
        for handle in self._start_round() if handles is None else handles:
            handle.wait()
        self._look_for_losses()
        return is_written

    def _average_all(self) -> None:
        """Afterwards the corrections sum to zero, whatever rounding and losses have made of them."""
        super()._average_all()
        for own, mean in zip(self._correction.flats, self._correction.mean(self.group), strict=True):
            own.sub_(mean)


class DiffusionStrategy(CorrectedStrategy):
    """`φ_i = opt(x_i, g_i) + c_i`, then `x_i ← φ_i + d_i`, `c_i ← c_i + d_i`, from c_i = 0 on.

    `d_i = Σ_j W_ij (φ_j − φ_i)`. With plain SGD and one step a round that is `x ← W(2x − x' − lr·(g − g'))`,
    where a dash means the step before. With another optimizer `lr·g` is what its step does. In a step that
    was skipped a worker mixes its parameters as they are.
    """

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        self._scratch["stepped"] = self._private(attachment)
        return super()._make_kept(attachment)

    def _after_step(self) -> None:
        if self.attachment.is_void:
            self._skipped_step()
            return
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
        self._receive()
        for pair, correction in zip(self._twins.pairs, self._correction.flats, strict=True):
            correction.add_(pair.spare)
            pair.spare.add_(pair.live)
        self._twins.swap()

    def _undo_correction(self) -> None:
        """Elsewhere: others may still read what was sent."""
        with torch.no_grad():
            for parameter, stepped in self._scratch["stepped"]:
                parameter.data = stepped.clone()
