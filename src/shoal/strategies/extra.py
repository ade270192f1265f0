"""`extra`: an exact first-order algorithm (Shi, Ling, Wu, Yin 2015, algorithm 1 with W̃ = (I + W)/2)."""

from __future__ import annotations

from shoal.core.errors import UsageError
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import SymmetricOptions
from shoal.strategies.session import TrainingSession
from shoal.tensors import Flat
from shoal.topology import Topology, Weights
from shoal.topology.properties import SYMMETRIC, require_symmetric, smallest_eigenvalue


class Extra(ExchangeStrategy):
    """`x_i ← opt(x_i + d_i − e_i, g_i)` and `e_i ← e_i − d_i/2`, at first 0; `d_i = Σ_j W_ij (x_j − x_i)`.

    On the right are the old parameters, and g_i is taken there; the exchange goes on during backward. With
    plain SGD that is `x ← (I + W)x − (I + W)/2·x' − lr·(g − g')`, where a dash means the step before. With
    another optimizer `lr·g` is what its step does. Of `local_steps` J, each step gets 1/J of e. In a step
    that was skipped a worker mixes its parameters as they are; where they are written between forward and
    step, they win over the mix, and the correction counts what was sent. PeerLost when a peer is lost, as
    under exact diffusion.
    """

    name = "extra"
    is_overlapped = True
    Options = SymmetricOptions
    options: SymmetricOptions
    correction: Flat
    """e, which sums to zero over the workers."""

    def fit(self, topology: Topology) -> Topology:
        """Takes a topology whose matrix fits the method's proof."""
        require_symmetric(topology, self.name)
        if smallest_eigenvalue(topology) < -1 + 1e-6:
            raise UsageError(
                f"extra needs eigenvalues above −1, and '{topology.name}' has −1.",
                cause="its workers keep nothing of their own parameters, and swap for ever.",
                next_step=f"give them weights of their own, or take {SYMMETRIC}.",
            )
        return topology

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives those of d."""
        return super().round_weights(session).differences()

    def start(self, session: TrainingSession) -> None:
        """Begins with a correction of zero."""
        super().start(session)
        self.correction = self._buffers.live.zeros_like()

    def before_step(self, session: TrainingSession) -> None:
        """Combines and corrects; the optimizer steps from there."""
        session.check_lost_peers()
        share = 0.0 if session.is_skipped or session.is_void else 1 / self.options.local_steps
        if session.is_round:
            self._combine(session, share)
        elif share:
            self._buffers.adopt()
            self._buffers.live.sub_(self.correction, alpha=share)

    def _combine(self, session: TrainingSession, share: float) -> None:
        """`x + d − share·e` with the old e, and e − d/2."""
        handles, self._under_way = self._under_way, None
        is_written = handles is not None and self._buffers.is_written()
        session.wait_for(handles or self._start_round(session))
        spare = self._buffers.spare
        self.correction.sub_(spare, alpha=0.5)
        spare.mul_(1 - share / 2).sub_(self.correction, alpha=share).add_(self._buffers.live)
        if is_written:
            self._buffers.keep()
        self._buffers.swap()

    def average_all(self, session: TrainingSession) -> None:
        """Makes corrections sum to zero, too."""
        session.average_parameters()
        self.correction -= session.average(self.correction, session.others)
