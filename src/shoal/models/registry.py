"""The networks by name, each with what a benchmark must know to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal.models.dense import mlp
from shoal.models.resnet import resnet18
from shoal.models.small import small_cnn, small_mlp


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """How to build a network, and the inputs that it takes."""

    build: Callable[[], nn.Module]
    """Draws the parameters from torch's global generator: seed it for equal ones."""
    input_shape: tuple[int, ...]
    """Of one example."""
    num_classes: int
    batch_size: int
    """That it is measured with."""

    def random_batch(self, seed: int = 0, batch_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels without meaning, alike for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        num_examples = self.batch_size if batch_size is None else batch_size
        x = torch.randn(num_examples, *self.input_shape, generator=generator)
        y = torch.randint(self.num_classes, (num_examples,), generator=generator)
        return x, y


MODELS = {
    "mlp": ModelEntry(mlp, (784,), num_classes=10, batch_size=64),
    "resnet18": ModelEntry(resnet18, (3, 32, 32), num_classes=10, batch_size=32),
    "small-mlp": ModelEntry(small_mlp, (1, 8, 8), num_classes=10, batch_size=32),
    "small-cnn": ModelEntry(small_cnn, (1, 8, 8), num_classes=10, batch_size=32),
}
