"""What a worker of a benchmark trains: a model, its optimizer and its batches on one device.

Which strategy the model is under, and what is measured, is left to the workers of each benchmark.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from shoal.group.base import Group
from shoal.models import ModelEntry
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.horovod import load_horovod
from shoal.strategies.registry import canonical

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels."""
_NUM_BATCHES = 4
CPU = torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this process has told it to; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trainee:
    """`step` is the user's own loop; `model` may get something wrapped around it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, batches: Iterator[Batch], device: torch.device = CPU
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._batches = batches
        self._loss = nn.CrossEntropyLoss()

    def step(self) -> None:
        """One iteration."""
        self.optimizer.zero_grad()
        self.learn()

    def learn(self) -> None:
        """Forward, loss, backward and the optimizer's step; gradients are added to what is there."""
        x, y = next(self._batches)
        self._loss(self.model(x), y).backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told to."""
        synchronize(self.device)

    def seconds_of(self, action: Callable[[], None], count: int = 1) -> float:
        """How long so many calls take, with all that the device has to do for them."""
        self.synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            action()
        self.synchronize()
        return time.perf_counter() - began_s


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained on synthetic batches, and by which SGD."""

    entry: ModelEntry
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    seed: int = 0

    def trainee(self, rank: int, device: torch.device) -> Trainee:
        """Models are equal on all ranks, and a rank's few batches are its own."""
        model = new_model(self.entry, self.seed, device)
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)
        seeds = range(rank * _NUM_BATCHES, (rank + 1) * _NUM_BATCHES)
        batches = [self.entry.random_batch(self.seed + seed, self.batch_size) for seed in seeds]
        on_device = [(x.to(device), y.to(device)) for x, y in batches]
        return Trainee(model, optimizer, itertools.cycle(on_device), device)


def new_model(entry: ModelEntry, seed: int, device: torch.device) -> nn.Module:
    """One that has learned nothing; equal for equal seeds."""
    torch.manual_seed(seed)
    return entry.build().to(device)


def make_contender(group: Group, strategy: str, options: Mapping[str, Any]) -> Strategy:
    """The strategy; UsageError for one that stands on a package which is not there.

    A lone worker's strategy does not ask for it, and would be plain training, measured under that name.
    """
    if canonical(strategy) == "horovod" and group.size == 1:
        load_horovod()
    return make_strategy(group, strategy, **options)


class Laps:
    """The times of one iteration after another; the device is waited for before the first and after the last.

    Between them a GPU is told of new work while it does the old: the end of an iteration is an event in its
    stream. What it still does elsewhere after the last event counts as part of the last iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[Any] = []
        synchronize(device)
        self._began_s = time.perf_counter()
        self._begin = self._now()

    def __len__(self) -> int:
        return len(self._ends)

    def end(self) -> None:
        """An iteration ends here, and the next begins."""
        self._ends.append(self._now())

    def seconds(self) -> list[float]:
        """Of each iteration, once the device has done them all."""
        synchronize(self._device)
        in_all_s = time.perf_counter() - self._began_s
        pairs = itertools.pairwise([self._begin, *self._ends])
        if self._device.type != "cuda":
            return [end_s - begin_s for begin_s, end_s in pairs]
        times_s = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        if times_s:
            times_s[-1] += max(0.0, in_all_s - sum(times_s))
        return times_s

    def _now(self) -> Any:
        """An event of the GPU's current stream, or on a CPU the time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
