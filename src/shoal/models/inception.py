"""Inception-v3 (Szegedy et al., Rethinking the Inception Architecture, 2015, section 6, table 1).

Parameters are counted as in torchvision; each block is a list of branches whose outputs are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

_Side = int | tuple[int, int]

SMALLEST_SIDE = 75
"""The last blocks have 1×1 of such an image left."""
AUXILIARY_SIDE = 299
"""Smaller images leave less than the 17×17 that the auxiliary head pools."""


class Branches(nn.Module):
    """Concatenates the channels of what several branches make of the same input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes all branches, one after another."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class InceptionV3(nn.Module):
    """Eleven inception blocks after five convolutions; while it trains, a second head half-way helps.

    With that head `forward` returns two tensors of logits in training, of which `loss_of` makes one loss.
    """

    def __init__(self, num_classes: int = 1000, has_auxiliary_head: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 32, 3, stride=2),
            _convolution(32, 32, 3),
            _convolution(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            _convolution(64, 80, 1),
            _convolution(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.middle = nn.Sequential(
            *(_square_block(num_inputs, pooled) for num_inputs, pooled in ((192, 32), (256, 64), (288, 64))),
            Branches(
                _convolution(288, 384, 3, stride=2),
                _chain(288, (64, 1), (96, 3), tail=_convolution(96, 96, 3, stride=2)),
                nn.MaxPool2d(3, stride=2),
            ),
            *(_factorized_block(width) for width in (128, 160, 160, 192)),
        )
        self.auxiliary = _auxiliary_head(num_classes) if has_auxiliary_head else None
        self.last = nn.Sequential(
            Branches(
                _chain(768, (192, 1), tail=_convolution(192, 320, 3, stride=2)),
                _chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), tail=_convolution(192, 192, 3, stride=2)),
                nn.MaxPool2d(3, stride=2),
            ),
            _widened_block(1280),
            _widened_block(2048),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(2048, num_classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.1, a=-0.2, b=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes the logits of each image; in training those of the auxiliary head, too."""
        x = self.middle(self.stem(x))
        logits = cast(torch.Tensor, self.head(self.last(x)))
        if self.training and self.auxiliary is not None:
            return logits, self.auxiliary(x)
        return logits


def inception_v3(num_classes: int = 1000, has_auxiliary_head: bool = True) -> InceptionV3:
    """Builds Inception-v3, of 27.2 million parameters, or 23.8 million without the auxiliary head."""
    return InceptionV3(num_classes, has_auxiliary_head)


def _square_block(num_inputs: int, num_pooled: int) -> Branches:
    """Builds the block of the paper's figure 5."""
    return Branches(
        _convolution(num_inputs, 64, 1),
        _chain(num_inputs, (48, 1), (64, 5)),
        _chain(num_inputs, (64, 1), (96, 3), (96, 3)),
        _pooled(num_inputs, num_pooled),
    )


def _factorized_block(width: int) -> Branches:
    """Builds the block of the paper's figure 6, with 7×7 convolutions in two factors."""
    return Branches(
        _convolution(768, 192, 1),
        _chain(768, (width, 1), (width, (1, 7)), (192, (7, 1))),
        _chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))),
        _pooled(768, 192),
    )


def _widened_block(num_inputs: int) -> Branches:
    """Builds the block of the paper's figure 7, with filters side by side instead of deeper ones."""

    def beside() -> Branches:
        return Branches(*(_convolution(384, 384, side, padding=_same(side)) for side in ((1, 3), (3, 1))))

    return Branches(
        _convolution(num_inputs, 320, 1),
        _chain(num_inputs, (384, 1), tail=beside()),
        _chain(num_inputs, (448, 1), (384, 3), tail=beside()),
        _pooled(num_inputs, 192),
    )


def _auxiliary_head(num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        _convolution(768, 128, 1),
        _convolution(128, 768, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(768, num_classes),
    )


def _pooled(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _convolution(num_inputs, num_outputs, 1))


def _chain(num_inputs: int, *steps: tuple[int, _Side], tail: nn.Module | None = None) -> nn.Sequential:
    """Builds convolutions of these outputs and sides that keep the image's size, and what ends them."""
    layers: list[nn.Module] = []
    for num_outputs, side in steps:
        layers.append(_convolution(num_inputs, num_outputs, side, padding=_same(side)))
        num_inputs = num_outputs
    return nn.Sequential(*layers, *([] if tail is None else [tail]))


def _same(side: _Side) -> _Side:
    """Computes the padding that keeps the image's size."""
    return side // 2 if isinstance(side, int) else (side[0] // 2, side[1] // 2)


def _convolution(
    num_inputs: int, num_outputs: int, side: _Side, stride: int = 1, padding: _Side = 0
) -> nn.Sequential:
    layers: Sequence[nn.Module] = (
        nn.Conv2d(num_inputs, num_outputs, side, stride, padding, bias=False),
        nn.BatchNorm2d(num_outputs, eps=0.001),
        nn.ReLU(inplace=True),
    )
    return nn.Sequential(*layers)
