"""Convolutional networks without shortcuts: LeNet-5 (LeCun et al., Gradient-Based Learning, 1998, section
II.B) and VGG-16 (Simonyan and Zisserman, Very Deep Convolutional Networks, 2014, table 1, column D).

VGG-16's parameters are named, counted and drawn as in torchvision. LeNet has today's ReLU and max-pooling.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

_VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def lenet(num_classes: int = 10, image_side: int = 28) -> nn.Sequential:
    """Two convolutions and three layers for images of one channel; 61,706 parameters for those of 28×28."""
    inner = (image_side // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * inner * inner, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


class Vgg16(nn.Module):
    """Thirteen 3×3 convolutions in five stages, and three wide layers that hold 9 of 10 parameters."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_inputs = 3
        for widths in _VGG16_STAGES:
            for width in widths:
                layers += [nn.Conv2d(num_inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                num_inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(cast(torch.Tensor, module.bias))
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        return cast(torch.Tensor, self.classifier(torch.flatten(self.avgpool(self.features(x)), 1)))


def vgg16(num_classes: int = 1000) -> Vgg16:
    """138.4 million parameters, of the same number for images of any side."""
    return Vgg16(num_classes)
