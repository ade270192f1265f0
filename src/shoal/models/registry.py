"""The networks by name, each with what a benchmark must know to feed it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal.core import UsageError
from shoal.models.dense import WIDE, mlp
from shoal.models.mobilenet import mobilenet_v2
from shoal.models.plain import lenet, vgg16
from shoal.models.resnet import (
    ResNet,
    Stem,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
)
from shoal.models.small import small_cnn, small_mlp

Make = Callable[[int, int], nn.Module]
"""A network for a number of classes, and images of a side."""

_SMALLEST_LARGE_SIDE = 64
"""A large stem leaves 2×2 of it to the last stage."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """How to build a network, and the inputs that it takes; `at` gives it for others."""

    name: str
    make: Make
    input_shape: tuple[int, int, int]
    """Of one example: channels, and twice the side of the image."""
    num_classes: int = 1000
    batch_size: int = 32
    """That it is measured with."""
    smallest_side: int = 1

    @property
    def image_side(self) -> int:
        """In pixels; images are squares."""
        return self.input_shape[-1]

    def at(self, image_side: int | None = None, num_classes: int | None = None) -> ModelEntry:
        """The same for images of this side and so many classes; None leaves what it has.

        A ResNet for images under 64×64 has the small stem, which keeps their size.
        """
        side = self.image_side if image_side is None else image_side
        classes = self.num_classes if num_classes is None else num_classes
        if side < self.smallest_side:
            raise UsageError(
                f"{self.name} cannot take images of {side}×{side}.",
                next_step=f"give it images of {self.smallest_side}×{self.smallest_side} or more.",
            )
        if classes < 1:
            raise UsageError(
                f"{self.name} cannot tell {classes} classes apart.", next_step="ask for 1 or more."
            )
        shape = (self.input_shape[0], side, side)
        return dataclasses.replace(self, input_shape=shape, num_classes=classes)

    def build(self) -> nn.Module:
        """The network, with parameters drawn from torch's global generator: seed it for equal ones."""
        return self.make(self.num_classes, self.image_side)

    def num_parameters(self) -> int:
        """How many numbers it learns; takes no memory for them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def random_batch(self, seed: int = 0, batch_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels without meaning, alike for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        num_examples = self.batch_size if batch_size is None else batch_size
        x = torch.randn(num_examples, *self.input_shape, generator=generator)
        y = torch.randint(self.num_classes, (num_examples,), generator=generator)
        return x, y


def model_named(name: str) -> ModelEntry:
    """The entry of this name in any case, with hyphens, underscores or none: 'ResNet50', 'mobilenet-v2'."""
    entry = _ENTRIES_BY_LETTERS.get(_letters(name))
    if entry is None:
        raise UsageError(f"There is no model {name!r}.", next_step=f"take one of {', '.join(MODELS)}.")
    return entry


def _residual(make: Callable[[int, Stem], ResNet]) -> Make:
    return lambda num_classes, image_side: make(
        num_classes, "large" if image_side >= _SMALLEST_LARGE_SIDE else "small"
    )


_PHOTO = (3, 224, 224)

_ENTRIES = (
    ModelEntry("resnet18", _residual(resnet18), (3, 32, 32), num_classes=10),
    ModelEntry("resnet34", _residual(resnet34), _PHOTO),
    ModelEntry("resnet50", _residual(resnet50), _PHOTO),
    ModelEntry("resnet101", _residual(resnet101), _PHOTO),
    ModelEntry("resnet152", _residual(resnet152), _PHOTO),
    ModelEntry("resnext50_32x4d", _residual(resnext50_32x4d), _PHOTO),
    ModelEntry("resnext101_32x8d", _residual(resnext101_32x8d), _PHOTO),
    ModelEntry("vgg16", lambda num_classes, _: vgg16(num_classes), _PHOTO, smallest_side=32),
    ModelEntry("mobilenet_v2", lambda num_classes, _: mobilenet_v2(num_classes), _PHOTO),
    ModelEntry("lenet", lenet, (1, 28, 28), num_classes=10, batch_size=64, smallest_side=12),
    ModelEntry(
        "mlp",
        lambda num_classes, side: mlp((side * side, *WIDE[1:-1], num_classes)),
        (1, 28, 28),
        num_classes=10,
        batch_size=64,
    ),
    ModelEntry("small-mlp", small_mlp, (1, 8, 8), num_classes=10),
    ModelEntry("small-cnn", lambda num_classes, _: small_cnn(num_classes), (1, 8, 8), 10, smallest_side=2),
)

MODELS = {entry.name: entry for entry in _ENTRIES}
"""Those of torchvision have its names; `model_named` accepts other spellings, too."""


def _letters(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


_ENTRIES_BY_LETTERS = {_letters(name): entry for name, entry in MODELS.items()}
