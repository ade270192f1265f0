"""Residual networks (He et al., Deep Residual Learning for Image Recognition, 2015, section 4.1, table 1)
and ResNeXt (Xie et al., Aggregated Residual Transformations, 2017, section 3.3).

Parameters are named, counted and drawn as in torchvision, so that its weights can be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn

Stem = Literal["small", "large"]
"""How images come in: 'small' (32×32) by a 3×3 convolution that keeps their size, as the paper's section 4.2;
'large' (224×224) by a 7×7 one and a pooling that together quarter each side.
"""


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """What tells one network of the family from another."""

    num_blocks: tuple[int, int, int, int]
    """Of each stage."""
    is_deep: bool = False
    """Whether blocks are bottlenecks of three convolutions instead of two full ones."""
    num_groups: int = 1
    """Of a bottleneck's 3×3 convolution; more than one makes a ResNeXt."""
    group_width: int = 64
    """Channels of each such group in the first stage."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is projected where the shape changes."""

    expansion = 1

    def __init__(self, shape: ResNetShape, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(num_inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output of the block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return cast(torch.Tensor, self.relu(x + shortcut))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two of 1×1 that narrow and widen, beside a shortcut; the 3×3 one strides."""

    expansion = 4

    def __init__(self, shape: ResNetShape, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = width * self.expansion
        inner = width * shape.group_width // 64 * shape.num_groups
        self.conv1 = nn.Conv2d(num_inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=shape.num_groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, num_outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(num_inputs, num_outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output of the block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return cast(torch.Tensor, self.relu(x + shortcut))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks that halve the image and double the channels, and one layer."""

    def __init__(self, shape: ResNetShape, num_classes: int = 1000, stem: Stem = "large") -> None:
        super().__init__()
        is_large = stem == "large"
        side, stride, padding = (7, 2, 3) if is_large else (3, 1, 1)
        self.conv1 = nn.Conv2d(3, 64, side, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if is_large else nn.Identity()
        expansion = (Bottleneck if shape.is_deep else BasicBlock).expansion
        self.layer1 = _stage(shape, 0, 64)
        self.layer2 = _stage(shape, 1, 64 * expansion)
        self.layer3 = _stage(shape, 2, 128 * expansion)
        self.layer4 = _stage(shape, 3, 256 * expansion)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(torch.Tensor, self.fc(torch.flatten(self.avgpool(x), 1)))


def resnet18(num_classes: int = 10, stem: Stem = "small") -> ResNet:
    """11.2 million parameters with ten classes, 11.7 million with a thousand."""
    return ResNet(ResNetShape((2, 2, 2, 2)), num_classes, stem)


def resnet34(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNet-34, of 21.8 million parameters."""
    return ResNet(ResNetShape((3, 4, 6, 3)), num_classes, stem)


def resnet50(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNet-50, of 25.6 million parameters."""
    return ResNet(ResNetShape((3, 4, 6, 3), is_deep=True), num_classes, stem)


def resnet101(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNet-101, of 44.5 million parameters."""
    return ResNet(ResNetShape((3, 4, 23, 3), is_deep=True), num_classes, stem)


def resnet152(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNet-152, of 60.2 million parameters."""
    return ResNet(ResNetShape((3, 8, 36, 3), is_deep=True), num_classes, stem)


def resnext50_32x4d(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNeXt-50 32×4d, of 25.0 million parameters."""
    return ResNet(ResNetShape((3, 4, 6, 3), is_deep=True, num_groups=32, group_width=4), num_classes, stem)


def resnext101_32x8d(num_classes: int = 1000, stem: Stem = "large") -> ResNet:
    """Builds ResNeXt-101 32×8d, of 88.8 million parameters."""
    return ResNet(ResNetShape((3, 4, 23, 3), is_deep=True, num_groups=32, group_width=8), num_classes, stem)


def _projection(num_inputs: int, num_outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and num_inputs == num_outputs:
        return None
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
    )


def _stage(shape: ResNetShape, index: int, num_inputs: int) -> nn.Sequential:
    block = Bottleneck if shape.is_deep else BasicBlock
    width = 64 << index
    first = block(shape, num_inputs, width, stride=1 if index == 0 else 2)
    num_more = shape.num_blocks[index] - 1
    return nn.Sequential(first, *(block(shape, width * block.expansion, width, 1) for _ in range(num_more)))
