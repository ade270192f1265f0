"""Tasks whose examples have labels: digits, MNIST, and the next character of a text."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from shoal.data import digits, mnist
from shoal.data.seeds import mix, seeded
from shoal.data.splits import divide
from shoal.data.text_set import NUM_CHARACTERS, next_characters, pages
from shoal.models import mlp, small_mlp
from shoal.simulate.examples import accuracy_of, batches_of
from shoal.simulate.job import Job
from shoal.simulate.task import Batch, Score, Task

MNIST_WIDTHS = (784, 64, 10)
_TESTED_OF_MNIST = 5  # each so-manyth image: 2,000, as many models are evaluated
_TESTED_OF_TEXT = 8
_TEXT_WINDOW, _TEXT_FEATURES, _TEXT_HIDDEN = 16, 8, 64


class _Classified(Task):
    """Each worker has its part of the examples, by the split of the job."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._train, self._labels = self._training()
        self._test = self._tests()
        parts = divide(self._labels.numpy(), job.num_parts, job.split, job.seed)
        self._parts = [torch.from_numpy(part) for part in parts]

    def _training(self) -> tuple[Batch, torch.Tensor]:
        """Examples, and the classes by which a split gives each worker others."""
        raise NotImplementedError

    def _tests(self) -> Batch:
        raise NotImplementedError

    def _build(self) -> nn.Module:
        raise NotImplementedError

    def model(self) -> nn.Module:
        """One that has learned nothing; equal for equal seeds."""
        with seeded(self.job.seed):
            return self._build()

    def batches(self, rank: int) -> Iterator[Batch]:
        """Of its own part, in an order of its own."""
        seed = mix(self.job.seed, rank)
        return batches_of(self._train, self.job.batch_size, seed, self._parts[rank])

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Computes the mean cross-entropy of a batch."""
        return functional.cross_entropy(outputs, labels)

    def evaluate(self, model: nn.Module) -> Score:
        """Accuracy on what nobody trains on."""
        return accuracy_of(model, self._test)


class Digits(_Classified):
    """A small network on 8×8 pixels."""

    name: ClassVar[str] = "digits"

    def _training(self) -> tuple[Batch, torch.Tensor]:
        examples = _digits(train=True)
        return examples, examples[1]

    def _tests(self) -> Batch:
        return _digits(train=False)

    def _build(self) -> nn.Module:
        return small_mlp()


class Mnist(_Classified):
    """Two layers on 28×28 pixels."""

    name: ClassVar[str] = "mnist"

    def _training(self) -> tuple[Batch, torch.Tensor]:
        examples = _mnist(train=True, folder=self.job.data_dir)
        return examples, examples[1]

    def _tests(self) -> Batch:
        x, y = _mnist(train=False, folder=self.job.data_dir)
        return x[::_TESTED_OF_MNIST], y[::_TESTED_OF_MNIST]

    def _build(self) -> nn.Module:
        return mlp(MNIST_WIDTHS)


class Text(_Classified):
    """The character that follows sixteen others; a split by classes gives each worker other pages."""

    name: ClassVar[str] = "text"

    def _training(self) -> tuple[Batch, torch.Tensor]:
        return _text(train=True), pages(_TEXT_WINDOW)

    def _tests(self) -> Batch:
        x, y = _text(train=False)
        return x[::_TESTED_OF_TEXT], y[::_TESTED_OF_TEXT]

    def _build(self) -> nn.Module:
        return NextCharacter()


class NextCharacter(nn.Module):
    """Features of each character of a window, and two layers on all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Embedding(NUM_CHARACTERS, _TEXT_FEATURES)
        self.layers = nn.Sequential(
            nn.Linear(_TEXT_WINDOW * _TEXT_FEATURES, _TEXT_HIDDEN),
            nn.ReLU(),
            nn.Linear(_TEXT_HIDDEN, NUM_CHARACTERS),
        )

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits of the next character."""
        logits: torch.Tensor = self.layers(self.features(characters.long()).flatten(1))
        return logits


@functools.cache
def _digits(train: bool) -> Batch:
    return digits(train=train)


@functools.cache
def _mnist(train: bool, folder: str | None) -> Batch:
    return mnist(train=train, folder=folder)


@functools.cache
def _text(train: bool) -> Batch:
    return next_characters(_TEXT_WINDOW, train=train)
