"""What contests train, by name: a model, each worker's batches, a loss, and how good a model is.

Digits, MNIST and the next character of a text are labelled examples, as are those of a user's own function.
The quadratic task is least squares with a solution in closed form: each worker has rows of its own, and so
an optimum of its own.
"""

from __future__ import annotations

import abc
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

from shoal.core import UsageError
from shoal.core.run_options import load_named
from shoal.data import digits, mnist
from shoal.data.seeds import mix, seeded
from shoal.data.splits import check_split, divide
from shoal.data.text_set import NUM_CHARACTERS, next_characters, pages
from shoal.models import mlp, small_mlp
from shoal.simulate.job import TrainingJob
from shoal.simulate.task_facts import TaskFacts, facts_of

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels; of equal shapes in all batches of all workers, where all have enough examples."""


class Score(msgspec.Struct, frozen=True):
    """How good a model is."""

    value: float
    """The score that `TaskFacts.score` names."""
    loss: float
    """Mean, over the examples of the evaluation."""


class TrainingTask(abc.ABC):
    """What one job trains; what is loaded is shared by all workers of a process."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    @property
    def facts(self) -> TaskFacts:
        """Names, sizes and directions."""
        return facts_of(self.job.task)

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """Makes a model that has learned nothing; equal for equal seeds."""

    @abc.abstractmethod
    def batches(self, rank: int) -> Iterator[Batch]:
        """Yields one worker's batches, without end."""

    @abc.abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of what `model(inputs)` gave, a scalar."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> Score:
        """Scores a model on what nobody trains on."""


_EVALUATED_AT_ONCE = 2000


def batches_of(
    examples: Batch, batch_size: int, seed: int, own: torch.Tensor | None = None
) -> Iterator[Batch]:
    """Yields batches without end: epoch after epoch in an order of its own, whole batches alone.

    `own` are the indices of those to draw from; all of them without. Who has fewer examples than a batch
    takes all of them each time.
    """
    x, y = examples
    num_examples = len(x) if own is None else len(own)
    size = min(batch_size, num_examples)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_examples, generator=generator)
        if own is not None:
            order = own[order]
        for start in range(0, num_examples - size + 1, size):
            chosen = order[start : start + size]
            yield x[chosen], y[chosen]


def accuracy_of(model: nn.Module, examples: Batch) -> Score:
    """Share of the examples whose largest output is at the label, and mean cross-entropy."""
    num_right, loss = 0, 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(examples[0]), _EVALUATED_AT_ONCE):
            x, y = (tensor[start : start + _EVALUATED_AT_ONCE] for tensor in examples)
            logits = model(x)
            num_right += int((logits.argmax(1) == y).sum())
            loss += float(functional.cross_entropy(logits, y, reduction="sum"))
    model.train()
    return Score(num_right / len(examples[0]), loss / len(examples[0]))


MNIST_WIDTHS = (784, 64, 10)
_TESTED_OF_MNIST = 5  # each so-manyth image: 2,000, as many models are evaluated
_TESTED_OF_TEXT = 8
_TEXT_WINDOW, _TEXT_FEATURES, _TEXT_HIDDEN = 16, 8, 64


class _Classified(TrainingTask):
    """Each worker has its part of the examples, by the split of the job."""

    def __init__(self, job: TrainingJob) -> None:
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
        """Makes a model that has learned nothing; equal for equal seeds."""
        with seeded(self.job.seed):
            return self._build()

    def batches(self, rank: int) -> Iterator[Batch]:
        """Yields batches of its own part, in an order of its own."""
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

    def _training(self) -> tuple[Batch, torch.Tensor]:
        examples = _digits(train=True)
        return examples, examples[1]

    def _tests(self) -> Batch:
        return _digits(train=False)

    def _build(self) -> nn.Module:
        return small_mlp()


class Mnist(_Classified):
    """Two layers on 28×28 pixels."""

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

    def _training(self) -> tuple[Batch, torch.Tensor]:
        return _text(train=True), pages(_TEXT_WINDOW)

    def _tests(self) -> Batch:
        x, y = _text(train=False)
        return x[::_TESTED_OF_TEXT], y[::_TESTED_OF_TEXT]

    def _build(self) -> nn.Module:
        return NextCharacter()


class Own(_Classified):
    """What a function of the user's own gives: a model, examples to train on, and examples to test with.

    It is called once for each run, with the run's seed.
    """

    def __init__(self, job: TrainingJob) -> None:
        function = load_named(job.task, "task")
        with seeded(job.seed):
            made = function()
        if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
            raise UsageError(
                f"{job.task} gives no task.",
                next_step="let it return (model, (inputs, labels), (test inputs, test labels)).",
            )
        self._made: nn.Module = made[0]
        self._examples, self._tested = (_labelled(job.task, each) for each in made[1:])
        super().__init__(job)

    def _training(self) -> tuple[Batch, torch.Tensor]:
        return self._examples, self._examples[1]

    def _tests(self) -> Batch:
        return self._tested

    def _build(self) -> nn.Module:
        return copy.deepcopy(self._made)


def _labelled(name: str, examples: Any) -> Batch:
    """Inputs with a class for each; UsageError for anything else."""
    try:
        x, y = map(torch.as_tensor, examples)
    except (TypeError, ValueError, RuntimeError):
        x = y = torch.empty(())
    if x.ndim < 1 or y.ndim != 1 or len(x) != len(y) or len(y) == 0 or y.is_floating_point() or y.min() < 0:
        raise UsageError(
            f"{name} gives examples that are no inputs with a class for each.",
            next_step="give two tensors of equal length: the inputs, and an integer from 0 for each of them.",
        )
    return x, y.long()


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


_DIM, _NUM_ROWS = 16, 64
_NOISE = 0.2
_FLATTEST = 0.5  # scale of the last coordinate of a row; that of the first is 1


class Point(nn.Module):
    """A point x, from 0; `model(A)` is A·x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(_DIM, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        return rows @ self.x


class Quadratic(TrainingTask):
    """How far workers differ is the split: by chance with 'iid', more the smaller a is in 'dirichlet:a'.

    The largest eigenvalue of every worker's Hessian is 1.
    """

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        concentration = check_split(job.split)
        self._spread = 0.0 if concentration is None else 1 / (1 + concentration)
        self._all = [self._rows_of(rank) for rank in range(job.num_parts)]
        self._hessian = torch.stack([rows.T @ rows for rows, _ in self._all]).mean(0)
        pull = torch.stack([rows.T @ values for rows, values in self._all]).mean(0)
        self.optimum = torch.linalg.solve(self._hessian, pull)

    def model(self) -> nn.Module:
        """A point at 0."""
        return Point()

    def batches(self, rank: int) -> Iterator[Batch]:
        """Yields all its rows each time; the size of a batch does not count."""
        return itertools.repeat(self._all[rank])

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Half the squared distance."""
        return (outputs - labels).square().sum() / 2

    def evaluate(self, model: nn.Module) -> Score:
        """Distance to the optimum of all workers together; the loss is what is above the least one."""
        assert isinstance(model, Point)
        off = model.x.detach() - self.optimum
        return Score(float(torch.linalg.vector_norm(off)), float(off @ self._hessian @ off) / 2)

    def _rows_of(self, rank: int) -> Batch:
        common = torch.Generator().manual_seed(mix(self.job.seed, _DIM))
        own = torch.Generator().manual_seed(mix(self.job.seed, _DIM, rank))
        goal = _normal(common, _DIM) + self._spread * _normal(own, _DIM)
        scales = torch.logspace(0, torch.log10(torch.tensor(_FLATTEST)).item(), _DIM, dtype=torch.float64)
        scales = scales * torch.exp(self._spread * _normal(own, _DIM) / 2)
        rows = _normal(own, _NUM_ROWS, _DIM) * scales
        rows /= torch.linalg.matrix_norm(rows, 2)
        noise = _NOISE * _normal(own, _NUM_ROWS) / _NUM_ROWS**0.5
        return rows, rows @ goal + noise


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


__all__ = ["TASKS", "Batch", "Score", "TrainingTask", "make_task"]

TASKS: dict[str, type[TrainingTask]] = {
    "quadratic": Quadratic,
    "digits": Digits,
    "mnist": Mnist,
    "text": Text,
}


def make_task(job: TrainingJob) -> TrainingTask:
    """What the job trains; DataError where its data is not there, UsageError for a task that there is not."""
    facts_of(job.task)
    return TASKS.get(job.task, Own)(job)
