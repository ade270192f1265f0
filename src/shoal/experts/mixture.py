"""A layer whose experts are elsewhere: a gate here chooses them for each sample, and weighs their answers.

Experts that do not answer are left out of the softmax; in backward they give no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.dht import Swarm
from shoal.experts.client import ExpertClient
from shoal.experts.gate import ProductKeyGate
from shoal.experts.last_call import LastCall
from shoal.experts.mixture_settings import MixtureSettings
from shoal.experts.remote_grid import Called, RemoteGrid


class MixtureOfExperts(nn.Module):
    """The `k_best` experts of each sample, found in the DHT, weighed by a product-key gate over `grid`.

    Settings are given as a struct or one by one: `MixtureOfExperts(swarm, "ffn", 512, (32, 32), k_best=4)`.
    `last_call` says of the last batch who was asked, who answered and how long it took. Its parameters are
    the gate's alone: experts are trained by their servers, once for each backward.
    """

    def __init__(
        self,
        client: ExpertClient | Swarm,
        prefix: str,
        in_features: int,
        grid: Sequence[int],
        settings: MixtureSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = (settings or MixtureSettings()).but(**options)
        self.gate = ProductKeyGate(in_features, grid)
        self.experts = RemoteGrid(client, prefix, grid, self.settings)

    @property
    def last_call(self) -> LastCall:
        """What became of the last batch, also when it ended in an error."""
        return self.experts.last_call

    def forward(self, x: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """The weighted answers of the experts, called with all of these batch-first tensors; in x's dtype.

        NotEnoughExperts when a sample has fewer than `k_min` answers after all tries.
        """
        scores = self.gate(x)
        called = self.experts.call(scores, (x, *args), kwargs)
        return called.mixed(self._weights(scores, called), x.dtype)

    def _weights(self, scores: torch.Tensor, called: Called) -> torch.Tensor:
        """Of each slot [batch, k]; zero where there is no answer, also for a sample that has none."""
        is_answered = called.is_answered
        logits = self.gate.logits(scores, called.coordinates).masked_fill(~is_answered, -torch.inf)
        logits = logits.masked_fill(~is_answered.any(1, keepdim=True), 0.0)
        return logits.softmax(1).masked_fill(~is_answered, 0.0)

    def extra_repr(self) -> str:
        """For people."""
        return f"{self.experts.directory.prefix}, k_best={self.settings.k_best}, k_min={self.settings.k_min}"
