"""`gradient-tracking`: every worker steps along an estimate of the mean gradient, which it shares as well.

Trackers and parameters adapt, then combine: Aug-DGM (Xu, Zhu, Soh and Xie 2015), also known as ATC-DIGing
(Nedić, Olshevsky, Shi and Uribe 2017), with one rate for all. DIGing itself (Nedić, Olshevsky and Shi 2017,
algorithm 1) combines both first: `x ← Wx − lr·y`, `y ← Wy + g − g'`; NEXT (Di Lorenzo and Scutari 2016) so
combines y alone. In the papers y begins as g; here it is mixed before its first step too, and begins as Wg.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from shoal.core.errors import UsageError
from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.exact_options import GradientTrackingOptions
from shoal.strategies.fitting import require_doubly_stochastic
from shoal.strategies.mixing import MixStrategy
from shoal.strategies.options import CommonOptions
from shoal.topology import Topology


class GradientTracking(MixStrategy):
    """`y_i ← Σ_j W_ij (y_j + g_j − g'_j)`, `x_i ← Σ_j W_ij opt(x_j, y_j)`; a dash means the step before.

    The tracker y takes the place of `.grad` before the optimizer steps; its mean over the workers is that of
    the gradients. Two exchanges a round, one before the step and one after it. Between rounds W is I. The
    topology may change from round to round; it is doubly stochastic. In a step that was skipped, or whose
    gradients are not finite, a worker's last gradient still counts.

    PeerLost when a peer is lost: what was on its way to it is missing in the trackers' mean for ever. So is,
    until the next global average (`global_average_every`), what a worker that leaves in order takes along.
    """

    name = "gradient-tracking"
    Options: ClassVar[type[CommonOptions]] = GradientTrackingOptions
    options: GradientTrackingOptions

    def _make_topology(self) -> Topology:
        topology = super()._make_topology()
        require_doubly_stochastic(topology, self.name)
        return topology

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        self._scratch["mixed"] = self._shared(attachment)
        return {"tracker": self._shared(attachment), "gradient": self._private(attachment)}

    def _before_step(self) -> None:
        self._look_for_losses()
        if self.attachment.has_closure:
            raise UsageError(
                "gradient-tracking does not see gradients that optimizer.step(closure) computes.",
                next_step="call backward() and then step() without a closure, or take exact-diffusion or d2.",
            )
        scale = self._scale()
        if self._are_gradients_finite():
            self._follow_gradients(scale)
        elif not self.attachment.is_void:
            self._check.refused(self.steps, "Its last gradient counts instead.")
        if self.is_round:
            self._mix_trackers()
        self._hand_out(scale)

    def _skipped_step(self) -> None:
        if self.is_round:
            self._mix_trackers()
        super()._skipped_step()

    def _average_all(self) -> None:
        """Afterwards each tracker is the mean of the last gradients."""
        super()._average_all()
        means = self._kept["gradient"].mean(self.group)
        for tracker, mean in zip(self._kept["tracker"].flats, means, strict=True):
            tracker.copy_(mean)

    def _scale(self) -> torch.Tensor | None:
        """By what gradients are multiplied still, where a GradScaler leaves that to a fused optimizer."""
        scale: torch.Tensor | None = getattr(self.attachment.optimizer, "grad_scale", None)
        return scale

    def _are_gradients_finite(self) -> bool:
        if self.attachment.is_void:
            return False
        gradients = [parameter.grad for parameter in self.attachment.parameters if parameter.grad is not None]
        return all(bool(_dense(gradient).isfinite().all()) for gradient in gradients)

    def _follow_gradients(self, scale: torch.Tensor | None) -> None:
        """`y + (g − g')`, before any mixing: also what is right where the mixing fails."""
        with torch.no_grad():
            for (parameter, tracker), (_, last) in zip(
                self._kept["tracker"], self._kept["gradient"], strict=True
            ):
                last.neg_()
                if parameter.grad is None:
                    tracker.add_(last)
                    last.zero_()
                    continue
                gradient = _dense(parameter.grad)
                if scale is not None:
                    gradient = gradient / scale
                tracker.add_(last.add_(gradient))
                last.copy_(gradient)

    def _mix_trackers(self) -> None:
        tracker, mixed = self._kept["tracker"], self._scratch["mixed"]
        flats = zip(tracker.flats, mixed.flats, strict=True)
        for handle in [self._exchange(own, out) for own, out in flats]:
            handle.wait()
        self._look_for_losses()
        self._kept["tracker"], self._scratch["mixed"] = mixed, tracker

    def _hand_out(self, scale: torch.Tensor | None) -> None:
        """A parameter that no worker has used stays without a gradient."""
        with torch.no_grad():
            for parameter, tracker in self._kept["tracker"]:
                gradient = parameter.grad
                if gradient is not None and not gradient.is_sparse:
                    gradient.copy_(tracker)
                elif gradient is not None or bool(tracker.any()):
                    gradient = parameter.grad = tracker.clone()
                if gradient is not None and scale is not None:
                    gradient.mul_(scale)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
