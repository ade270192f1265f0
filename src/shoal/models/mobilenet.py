"""MobileNetV2 (Sandler et al., Inverted Residuals and Linear Bottlenecks, 2018, table 2).

Parameters are named, counted and drawn as in torchvision; the width is the paper's 1.0.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""The paper's table: expansion, channels, number of blocks, stride of the first."""
_NUM_FEATURES = 1280


class InvertedResidual(nn.Module):
    """Widens, filters each channel alone, narrows without a ReLU; has a shortcut where shapes allow it."""

    def __init__(self, num_inputs: int, num_outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = num_inputs * expansion
        widen = [_convolution(num_inputs, inner, side=1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _convolution(inner, inner, side=3, stride=stride, num_groups=inner),
            nn.Conv2d(inner, num_outputs, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.has_shortcut = stride == 1 and num_inputs == num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output of the block."""
        y = cast(torch.Tensor, self.conv(x))
        return x + y if self.has_shortcut else y


class MobileNetV2(nn.Module):
    """Seventeen inverted residuals between two convolutions, and one layer."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, side=3, stride=2)]
        num_inputs = 32
        for expansion, num_outputs, num_blocks, first_stride in _STAGES:
            for index in range(num_blocks):
                stride = first_stride if index == 0 else 1
                layers.append(InvertedResidual(num_inputs, num_outputs, expansion, stride))
                num_inputs = num_outputs
        layers.append(_convolution(num_inputs, _NUM_FEATURES, side=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(_NUM_FEATURES, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        return cast(torch.Tensor, self.classifier(self.features(x).mean((2, 3))))


def mobilenet_v2(num_classes: int = 1000) -> MobileNetV2:
    """Builds MobileNetV2, of 3.5 million parameters."""
    return MobileNetV2(num_classes)


def _convolution(
    num_inputs: int, num_outputs: int, side: int, stride: int = 1, num_groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, side, stride, side // 2, groups=num_groups, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU6(inplace=True),
    )
