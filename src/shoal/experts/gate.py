"""The gate of a mixture: a score for every coordinate of every axis of a grid of experts.

An expert's logit is the sum of its coordinates' scores, so that a grid of 32 × 32 experts takes 64 scores.
Which experts are there is the directory's to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from shoal.core import UsageError


class ProductKeyGate(nn.Module):
    """One linear layer for all axes."""

    def __init__(self, in_features: int, grid: Sequence[int]) -> None:
        super().__init__()
        if not grid or any(size < 1 for size in grid):
            raise UsageError(
                f"{tuple(grid)} is no grid of experts.",
                next_step="give the number of coordinates of each axis, such as (32, 32).",
            )
        self.in_features = in_features
        self.grid = tuple(grid)
        self.projection = nn.Linear(in_features, sum(self.grid))
        starts = [sum(self.grid[:axis]) for axis in range(len(self.grid))]
        self.register_buffer("_starts", torch.tensor(starts), persistent=False)
        self._starts: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, sum(grid)] in float32 at least; what lies between batch and features is averaged."""
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise UsageError(
                f"The gate takes [batch, ..., {self.in_features}], not {list(x.shape)}.",
                next_step="give in_features of the mixture's first input.",
            )
        if x.dim() > 2:
            x = x.flatten(1, -2).mean(1)
        scores: torch.Tensor = self.projection(x.to(self.projection.weight.dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def split(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The scores of each axis."""
        return torch.split(scores, list(self.grid), dim=1)

    def logits(self, scores: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        """The sum of scores at `coordinates` [batch, k, axes]; [batch, k]."""
        columns = coordinates + self._starts
        return scores.gather(1, columns.flatten(1)).view(columns.shape).sum(-1)

    def extra_repr(self) -> str:
        """For people."""
        return f"grid={' × '.join(map(str, self.grid))}, {math.prod(self.grid)} places"
