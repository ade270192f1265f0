"""`gradient-tracking`: every worker steps along an estimate of the mean gradient, which it shares as well.

Trackers and parameters adapt, then combine: Aug-DGM (Xu, Zhu, Soh and Xie 2015), also known as ATC-DIGing
(Nedić, Olshevsky, Shi and Uribe 2017), with one rate for all. DIGing itself (Nedić, Olshevsky and Shi 2017,
algorithm 1) combines both first: `x ← Wx − lr·y`, `y ← Wy + g − g'`; NEXT (Di Lorenzo and Scutari 2016) so
combines y alone. In the papers y begins as g; here it is mixed before its first step too, and begins as Wg.
"""

from __future__ import annotations

import torch

from shoal.core.errors import UsageError
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import MixOptions
from shoal.strategies.session import TrainingSession
from shoal.tensors import Flat
from shoal.topology import Topology
from shoal.topology.properties import require_doubly_stochastic


class GradientTracking(ExchangeStrategy):
    """`y_i ← Σ_j W_ij (y_j + g_j − g'_j)`, `x_i ← Σ_j W_ij opt(x_j, y_j)`; a dash means the step before.

    The tracker y takes the place of `.grad` before the optimizer steps; its mean over the workers is that of
    the gradients. Two exchanges a round, one before the step and one after it. Between rounds W is I. The
    topology may change from round to round; it is doubly stochastic. In a step that was skipped, or whose
    gradients are not finite, a worker's last gradient still counts.

    PeerLost when a peer is lost: what was on its way to it is missing in the trackers' mean for ever. So is,
    until the next global average (`global_average_every`), what a worker that leaves in order takes along.
    """

    name = "gradient-tracking"
    Options = MixOptions
    options: MixOptions
    tracker: Flat
    gradient: Flat
    """The last gradient of this worker that counted."""
    _mixed: Flat

    def fit(self, topology: Topology) -> Topology:
        """Takes a topology whose matrices are doubly stochastic."""
        require_doubly_stochastic(topology, self.name)
        return topology

    def start(self, session: TrainingSession) -> None:
        """Begins with trackers of zero, in memory of the group."""
        super().start(session)
        self._mixed = self._buffers.live.zeros_like(session.empty)
        self.tracker = self._buffers.live.zeros_like(session.empty)
        self.gradient = self._buffers.live.zeros_like()

    def before_step(self, session: TrainingSession) -> None:
        """Follows the gradient, mixes the trackers, and lets the optimizer step along this worker's."""
        session.check_lost_peers()
        if session.has_closure:
            raise UsageError(
                "gradient-tracking does not see gradients that optimizer.step(closure) computes.",
                next_step="call backward() and then step() without a closure, or take exact-diffusion or d2.",
            )
        # by what gradients are multiplied still, where a GradScaler leaves that to a fused optimizer
        scale: torch.Tensor | None = getattr(session.optimizer, "grad_scale", None)
        gradients = [parameter.grad for parameter in session.trainable if parameter.grad is not None]
        dense = (each.to_dense() if each.is_sparse else each for each in gradients)
        if not session.is_void and all(bool(each.isfinite().all()) for each in dense):
            self._follow_gradients(session, scale)
        elif not session.is_void:
            session.finite.refused(self.steps, "Its last gradient counts instead.")
        if session.is_round:
            self._mix_trackers(session)
        self._hand_out(session, scale)

    def skip_step(self, session: TrainingSession) -> None:
        """Mixes both as they are."""
        if session.is_round:
            self._mix_trackers(session)
            self._finish_round(session)

    def average_all(self, session: TrainingSession) -> None:
        """Makes each tracker the mean of the last gradients, too."""
        session.average_parameters()
        self.tracker.copy_(session.average(self.gradient, session.others))

    def _follow_gradients(self, session: TrainingSession, scale: torch.Tensor | None) -> None:
        """`y + (g − g')`, before any mixing: also what is right where the mixing fails."""
        for (name, tracker), last in zip(self.tracker.items(), self.gradient.views, strict=True):
            found = session.named_parameters[name].grad
            last.neg_()
            if found is None:
                tracker.add_(last)
                last.zero_()
                continue
            gradient = found.to_dense() if found.is_sparse else found
            if scale is not None:
                gradient = gradient / scale
            tracker.add_(last.add_(gradient))
            last.copy_(gradient)

    def _mix_trackers(self, session: TrainingSession) -> None:
        flats = zip(self.tracker.flats, self._mixed.flats, strict=True)
        session.wait_for([self.exchange(session, own, out) for own, out in flats])
        self.tracker, self._mixed = self._mixed, self.tracker

    def _hand_out(self, session: TrainingSession, scale: torch.Tensor | None) -> None:
        """A parameter that no worker has used stays without a gradient."""
        for name, tracker in self.tracker.items():
            parameter = session.named_parameters[name]
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                gradient.copy_(tracker)
            elif gradient is not None or bool(tracker.any()):
                gradient = parameter.grad = tracker.clone()
            if gradient is not None and scale is not None:
                gradient.mul_(scale)
