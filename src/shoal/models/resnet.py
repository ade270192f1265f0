"""ResNet-18 (He et al., Deep Residual Learning for Image Recognition, 2015, section 4.1, table 1).

Parameters are named as in torchvision, so that its weights can be loaded. Leaves out all deeper variants.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn

Stem = Literal["small", "large"]
"""How images come in: 'small' (32×32) by a 3×3 convolution that keeps their size, as the paper's section 4.2;
'large' (224×224) by a 7×7 one and a pooling that together quarter each side.
"""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or num_inputs != num_outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return cast(torch.Tensor, self.relu(x + shortcut))


class ResNet18(nn.Module):
    """Four stages of two blocks, from 64 to 512 channels; 11.2 million parameters with ten classes."""

    def __init__(self, num_classes: int = 10, stem: Stem = "small") -> None:
        super().__init__()
        is_large = stem == "large"
        side, stride, padding = (7, 2, 3) if is_large else (3, 1, 1)
        self.conv1 = nn.Conv2d(3, 64, side, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if is_large else nn.Identity()
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(torch.Tensor, self.fc(torch.flatten(self.avgpool(x), 1)))


def resnet18(num_classes: int = 10, stem: Stem = "small") -> ResNet18:
    """A ResNet-18, with weights that were drawn and not learned."""
    return ResNet18(num_classes, stem)


def _stage(num_inputs: int, num_outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        ResidualBlock(num_inputs, num_outputs, stride), ResidualBlock(num_outputs, num_outputs, stride=1)
    )
