"""Fully connected networks: most of their work is moving parameters, so they show what sharing costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

WIDE = (784, 2048, 2048, 2048, 10)
"""10.0 million parameters, for MNIST's images."""


def mlp(widths: Sequence[int] = WIDE) -> nn.Sequential:
    """Linear layers of these widths, from input to output, with ReLU between them; images are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for num_inputs, num_outputs in itertools.pairwise(widths):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
