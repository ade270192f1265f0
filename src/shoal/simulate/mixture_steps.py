"""What forward and backward leave of training steps: losses, gradients, and where the experts' share lies."""

from __future__ import annotations

import msgspec
import torch


class StepGradients(msgspec.Struct, kw_only=True):
    """Of one trainer's step, on their way."""

    loss: torch.Tensor
    trunk: list[torch.Tensor]
    """Of everything but experts; matrices, as they are few."""
    rows: list[int]
    """In the bank's pool, one for each expert of each sample in each layer."""
    experts: torch.Tensor
    """Of the rows; −1 where the gradient was lost."""
    num_layers: int
    _listed: list[int] = []

    def of_layer(self, layer: int) -> tuple[list[int], list[int]]:
        """Rows and their experts."""
        if not self._listed:
            self._listed = self.experts.tolist()
        size = len(self.rows) // self.num_layers
        span = slice(layer * size, (layer + 1) * size)
        return self.rows[span], self._listed[span]


class Pass(msgspec.Struct):
    """Of some trainers at once."""

    losses: torch.Tensor
    trunk: tuple[torch.Tensor, ...]
    """Gradients, `[trainers, …]`."""
    experts: torch.Tensor
    """`[trainers, layers · rows]`."""
    rows: list[list[int]]
    """By layer, in the order of trainers, samples and their experts."""
