"""What gradients tell about the batch size: noise scale and variance, from local and averaged gradients.

With B_small the batch of one worker, B_big that of all, and the squared norms of a local gradient (averaged
over workers) and of the averaged one:

    |G|² = (B_big · |g_big|² − B_small · |g_small|²) / (B_big − B_small)
    S    = (|g_small|² − |g_big|²) / (1 / B_small − 1 / B_big)

and the noise scale is EMA(S) / EMA(|G|²) (McCandlish et al. 2018, appendix A.1). The variance is the sum,
over tensors, of ‖E[g²] − E[g]²‖, E over workers. A GradScaler's factor cancels in the first, not in the
second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.group import Group
from shoal.group.functions import start_mean
from shoal.tensors.buckets import as_real, packed

EMA = 0.9
"""What is kept of the old value at each step."""


class Monitors:
    """Running estimates of one worker; they are equal on all."""

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = 1 if batch_size is None else batch_size
        self._noise: float | None = None
        self._signal: float | None = None
        self._variance: float | None = None

    def values(self) -> dict[str, float]:
        """Gives the estimates that are known by now."""
        known = {}
        if self._noise is not None and self._signal:
            known["gradient_noise_scale"] = self._noise / self._signal
        if self._variance is not None:
            known["gradient_variance"] = self._variance
        return known

    def observe(self, small: float, big: float, variance: float, num_workers: int) -> None:
        """Takes in a step's squared norms: of local gradients (mean over workers), of the averaged one."""
        if num_workers < 2 or not all(map(math.isfinite, (small, big, variance))):
            return  # nobody to compare with, or an inf under a GradScaler
        b_small, b_big = self._batch_size, self._batch_size * num_workers
        signal = (b_big * big - b_small * small) / (b_big - b_small)
        noise = (small - big) / (1 / b_small - 1 / b_big)
        self._signal = _blend(self._signal, signal)
        self._noise = _blend(self._noise, noise)
        self._variance = variance

    def observe_buckets(
        self, buckets: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]], num_workers: int
    ) -> None:
        """Takes in a step's E[g] and E[g²], tensor by tensor; of complex ones, the squares of both parts."""
        norms = []
        for means, squares in buckets:
            for mean, square in zip(map(as_real, means), map(as_real, squares), strict=True):
                norms.append(square.sum(dtype=torch.float64))
                norms.append(torch.linalg.vector_norm(mean, dtype=torch.float64))
                norms.append(torch.linalg.vector_norm(square - mean.square(), dtype=torch.float64))
        # one look at all of them: each one alone would wait for a GPU
        known = torch.stack(norms).tolist() if norms else []
        small = big = variance = 0.0
        for square_sum, mean_norm, spread in zip(known[::3], known[1::3], known[2::3], strict=True):
            small += square_sum
            big += mean_norm**2
            variance += spread
        self.observe(small, big, variance, num_workers)

    def observe_locally(
        self, group: Group, parameters: Sequence[torch.Tensor], *, is_skipped: bool = False
    ) -> None:
        """Takes in a step whose gradients stay local, and are averaged for this alone. Collective."""
        nothing = torch.nan if is_skipped else 0.0  # then all leave the step out
        gradients = [
            torch.full_like(parameter, nothing)
            if is_skipped or parameter.grad is None
            else parameter.grad.detach().to_dense()
            for parameter in parameters
        ]
        num_workers = len(group.members)  # before one is lost
        buckets = []
        for mean, members in packed(gradients):
            ((square, _),) = packed([member.square() for member in members])
            start_mean(group, mean.flat).wait()
            start_mean(group, square.flat).wait()
            buckets.append((mean.views, square.views))
        self.observe_buckets(buckets, num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Gives the running estimates, for a checkpoint."""
        return {"noise": self._noise, "signal": self._signal, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the estimates of a checkpoint."""
        self._noise, self._signal, self._variance = (state[key] for key in ("noise", "signal", "variance"))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else EMA * old + (1 - EMA) * new
