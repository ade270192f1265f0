"""Networks that train in seconds, for the digits set, examples and tests."""

from __future__ import annotations

from torch import nn

NUM_DIGITS = 10


def small_mlp() -> nn.Sequential:
    """Two layers for 8×8 images, 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, NUM_DIGITS))


def small_cnn() -> nn.Sequential:
    """Two convolutions with BatchNorm for 8×8 images, 3,842 parameters: it has buffers to share, too."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, NUM_DIGITS),
    )
