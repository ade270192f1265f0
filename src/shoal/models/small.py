"""Networks that train in seconds, for the digits set, examples and tests."""

from __future__ import annotations

from torch import nn

NUM_DIGITS = 10


def small_mlp(num_classes: int = NUM_DIGITS, image_side: int = 8) -> nn.Sequential:
    """Two layers; 2,410 parameters for 8×8 images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(image_side * image_side, 32), nn.ReLU(), nn.Linear(32, num_classes)
    )


def small_cnn(num_classes: int = NUM_DIGITS) -> nn.Sequential:
    """Two convolutions with BatchNorm, 3,842 parameters for images of any side; it has buffers to share."""
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
        nn.Linear(16 * 4 * 4, num_classes),
    )
