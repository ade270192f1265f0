"""What a contest trains: a model, each worker's batches, a loss, and how good a model is.

The same for workers in virtual time, stacked in one tensor, and real ones: all of them draw the same model
and the same batches from a job's seed.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import torch
from torch import nn

from shoal.simulate.job import Job
from shoal.simulate.task_facts import TaskFacts, facts_of

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels; of equal shapes in all batches of all workers, where all have enough examples."""


class Score(msgspec.Struct, frozen=True):
    """How good a model is."""

    value: float
    """What `TaskFacts.score` names."""
    loss: float
    """Mean, over the examples of the evaluation."""


class Task(abc.ABC):
    """For one job; what is loaded is shared by all workers of a process."""

    name: ClassVar[str]

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def facts(self) -> TaskFacts:
        """Names, sizes and directions."""
        return facts_of(self.name)

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """One that has learned nothing; equal for equal seeds."""

    @abc.abstractmethod
    def batches(self, rank: int) -> Iterator[Batch]:
        """One worker's, without end."""

    @abc.abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of what `model(inputs)` gave; a scalar."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> Score:
        """On what nobody trains on."""
