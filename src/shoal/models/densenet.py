"""DenseNet (Huang et al., Densely Connected Convolutional Networks, 2016, section 3, table 1).

Parameters are counted and drawn as in torchvision; blocks have the paper's bottlenecks and compression.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

_GROWTH = 32
"""Channels that each layer adds."""
_BOTTLENECK = 4 * _GROWTH
"""Channels between a layer's two convolutions."""


class DenseLayer(nn.Module):
    """Adds new channels to those of all layers before it, which it reads."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(num_inputs),
            nn.ReLU(inplace=False),  # its input is also the output
            nn.Conv2d(num_inputs, _BOTTLENECK, 1, bias=False),
            nn.BatchNorm2d(_BOTTLENECK),
            nn.ReLU(inplace=True),
            nn.Conv2d(_BOTTLENECK, _GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the channels of the input, followed by the new ones."""
        return torch.cat([x, self.layers(x)], dim=1)


class DenseNet(nn.Module):
    """A stem, dense blocks with transitions between them that halve channels and sides, and one layer."""

    def __init__(self, num_layers: tuple[int, ...], num_classes: int = 1000) -> None:
        super().__init__()
        width = 2 * _GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for index, count in enumerate(num_layers):
            if index > 0:
                layers.append(_transition(width))
                width //= 2
            layers += [DenseLayer(width + number * _GROWTH) for number in range(count)]
            width += count * _GROWTH
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the logits of each image."""
        return cast(torch.Tensor, self.classifier(self.features(x).mean((2, 3))))


def densenet121(num_classes: int = 1000) -> DenseNet:
    """Builds DenseNet-121, of 7.98 million parameters."""
    return DenseNet((6, 12, 24, 16), num_classes)


def _transition(num_inputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(num_inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(num_inputs, num_inputs // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )
