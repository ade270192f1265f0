"""The networks by name, each with what a benchmark must know to feed it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shoal.core import UsageError
from shoal.core.errors import did_you_mean
from shoal.models import gpt
from shoal.models.dense import WIDE, mlp
from shoal.models.densenet import densenet121
from shoal.models.inception import AUXILIARY_SIDE, SMALLEST_SIDE, inception_v3
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
"""A network for a number of classes, and images of a side; those of tokens are the same for all."""

_IMAGE_DIMENSIONS = 3
_AUXILIARY_WEIGHT = 0.3
_SMALLEST_LARGE_SIDE = 64
"""A large stem leaves 2×2 of it to the last stage."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """How to build a network, and the inputs that it takes; `at` gives it for others."""

    name: str
    make: Make
    input_shape: tuple[int, ...]
    """Of one example: channels and twice the side of an image; the number of tokens; any other shape."""
    num_classes: int = 1000
    """Or tokens of the vocabulary."""
    batch_size: int = 32
    """That it is measured with."""
    smallest_side: int = 1
    max_tokens: int | None = None
    """The longest sequence that a model of text reads; None where inputs are no tokens."""
    has_fixed_classes: bool = False
    """Whether its number of classes is its own: a vocabulary, or a model of the user's."""
    is_guessed: bool = False
    """Whether nobody said what a model of the user's takes, and this shape has been found to work."""

    @property
    def image_side(self) -> int | None:
        """In pixels, of images that are squares; None for other inputs."""
        return self.input_shape[-1] if len(self.input_shape) == _IMAGE_DIMENSIONS else None

    @property
    def num_tokens(self) -> int | None:
        """Of one example; None where inputs are no tokens."""
        return None if self.max_tokens is None else self.input_shape[-1]

    def at(
        self,
        image_side: int | None = None,
        num_classes: int | None = None,
        num_tokens: int | None = None,
    ) -> ModelEntry:
        """The same for images of this side, so many classes, or so many tokens; None leaves what it has.

        A ResNet for images under 64×64 has the small stem, which keeps their size.
        """
        shape = self.input_shape
        if image_side is not None:
            shape = self._shape_of_images(image_side)
        if num_tokens is not None:
            shape = self._shape_of_tokens(num_tokens)
        classes = self.num_classes if num_classes is None else num_classes
        if classes < 1:
            raise UsageError(
                f"{self.name} cannot tell {classes} classes apart.", next_step="ask for 1 or more."
            )
        if self.has_fixed_classes and classes != self.num_classes:
            raise UsageError(
                f"{self.name} has {self.num_classes} classes of its own, and cannot have {classes}.",
                next_step="leave the number of classes out, or build the model with as many.",
            )
        return dataclasses.replace(self, input_shape=shape, num_classes=classes)

    def _shape_of_images(self, side: int) -> tuple[int, ...]:
        if self.image_side is None:
            raise UsageError(
                f"{self.name} takes no images, but inputs of shape {self.input_shape}.",
                next_step="leave the size of images out.",
            )
        if side < self.smallest_side:
            raise UsageError(
                f"{self.name} cannot take images of {side}×{side}.",
                next_step=f"give it images of {self.smallest_side}×{self.smallest_side} or more.",
            )
        return (self.input_shape[0], side, side)

    def _shape_of_tokens(self, num_tokens: int) -> tuple[int, ...]:
        if self.max_tokens is None:
            raise UsageError(
                f"{self.name} reads no tokens, but inputs of shape {self.input_shape}.",
                next_step="leave the length of sequences out, or take gpt-nano or gpt-small.",
            )
        if not 1 <= num_tokens <= self.max_tokens:
            raise UsageError(
                f"{self.name} cannot read sequences of {num_tokens} tokens.",
                next_step=f"give it 1 to {self.max_tokens}.",
            )
        return (num_tokens,)

    def build(self) -> nn.Module:
        """The network, with parameters drawn from torch's global generator: seed it for equal ones."""
        return self.make(self.num_classes, self.input_shape[-1])

    def num_parameters(self) -> int:
        """How many numbers it learns; those of Shoal's own networks take no memory for that."""
        with contextlib.nullcontext() if ":" in self.name else torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def random_batch(self, seed: int = 0, batch_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels without meaning, alike for equal seeds; the label of a token is the next one."""
        generator = torch.Generator().manual_seed(seed)
        num_examples = self.batch_size if batch_size is None else batch_size
        if self.num_tokens is not None:
            size = (num_examples, self.num_tokens + 1)
            tokens = torch.randint(self.num_classes, size, generator=generator)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        x = torch.randn(num_examples, *self.input_shape, generator=generator)
        y = torch.randint(self.num_classes, (num_examples,), generator=generator)
        return x, y


def model_named(name: str) -> ModelEntry:
    """The entry of this name in any case, with hyphens, underscores or none: 'ResNet50', 'mobilenet-v2'.

    A model of the user's own is `package.module:factory` or `file.py:factory`, as `shoal.models.own` says.
    """
    if ":" in name:
        from shoal.models.own import own_model

        return own_model(name)
    entry = _ENTRIES_BY_LETTERS.get(_letters(name))
    if entry is None:
        raise UsageError(
            f"There is no model {name!r}.{did_you_mean(name, MODELS, n=2)}",
            next_step=f"take one of {', '.join(MODELS)}, or your own as package.module:factory or "
            "file.py:factory.",
        )
    return entry


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The cross entropy of logits of shape (batch, classes) or (batch, tokens, vocabulary).

    Outputs may also be a tuple, as Inception's with its auxiliary head: what follows the first counts 0.3
    (Szegedy et al., Going Deeper with Convolutions, 2014, section 5).
    """
    main, *others = outputs if isinstance(outputs, tuple | list) else (outputs,)
    loss = functional.cross_entropy(main.flatten(0, -2), labels.flatten())
    for other in others:
        loss = loss + _AUXILIARY_WEIGHT * functional.cross_entropy(other.flatten(0, -2), labels.flatten())
    return loss


def _residual(make: Callable[[int, Stem], ResNet]) -> Make:
    return lambda num_classes, image_side: make(
        num_classes, "large" if image_side >= _SMALLEST_LARGE_SIDE else "small"
    )


def _text(name: str, make: Callable[[], nn.Module], shape: gpt.GptShape, batch_size: int) -> ModelEntry:
    return ModelEntry(
        name,
        lambda _, __: make(),
        (shape.max_tokens,),
        num_classes=shape.vocabulary_size,
        batch_size=batch_size,
        max_tokens=shape.max_tokens,
        has_fixed_classes=True,
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
    ModelEntry(
        "inception_v3",
        lambda num_classes, side: inception_v3(num_classes, has_auxiliary_head=side >= AUXILIARY_SIDE),
        (3, 299, 299),
        smallest_side=SMALLEST_SIDE,
    ),
    ModelEntry("densenet121", lambda num_classes, _: densenet121(num_classes), _PHOTO, smallest_side=32),
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
    _text("gpt-nano", gpt.gpt_nano, gpt.NANO, batch_size=32),
    _text("gpt-small", gpt.gpt_small, gpt.SMALL, batch_size=8),
)

MODELS = {entry.name: entry for entry in _ENTRIES}
"""Those of torchvision have its names; `model_named` accepts other spellings, too."""


def _letters(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


_ENTRIES_BY_LETTERS = {_letters(name): entry for name, entry in MODELS.items()}
