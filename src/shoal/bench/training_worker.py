"""A worker of `shoal bench training`: a model for each strategy, all attached at once, trained in blocks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import SGD

from shoal.bench.children import Parent
from shoal.bench.crew import Answers, Place
from shoal.bench.seat import Seat, seat_of
from shoal.bench.training import NONE, ServerRole, TrainingConfig, needs_servers
from shoal.group.base import Group
from shoal.models import model_named
from shoal.strategies import make_strategy

_NUM_BATCHES = 4


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Train what is ordered."""
    seat = seat_of(place)
    seat.take()
    school = School(seat, msgspec.convert(arguments, TrainingConfig), stack)
    return {"attach": school.attach, "block": school.block}


def serve_parameters(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one strategy until the workers are done."""
    seat = seat_of(msgspec.convert(arguments["place"], Place))
    seat.take()
    role = msgspec.convert(arguments["arguments"], ServerRole)
    config = role.config
    with seat.open_as_server(role.strategy, config.num_servers, role.server) as group:
        trainee = Trainee(config, 0, torch.device("cpu"))
        made = make_strategy(group, role.strategy, **config.options.get(role.strategy, {}))
        with contextlib.suppress(SystemExit):
            made.attach(trainee.model, trainee.optimizer)


class Trainee:
    """One model with its optimizer and its batches; `step` is the user's own loop."""

    def __init__(self, config: TrainingConfig, rank: int, device: torch.device) -> None:
        entry = model_named(config.model).at(config.image_size)
        torch.manual_seed(config.seed)
        self._device = device
        self.model = entry.build().to(device)
        self.optimizer = SGD(self.model.parameters(), lr=config.learning_rate, momentum=config.momentum)
        seeds = range(rank * _NUM_BATCHES, (rank + 1) * _NUM_BATCHES)
        batches = [entry.random_batch(config.seed + seed, config.batch_size) for seed in seeds]
        self._batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = itertools.cycle(
            [(x.to(device), y.to(device)) for x, y in batches]
        )
        self._loss = nn.CrossEntropyLoss()
        self.group: Group | None = None

    def step(self) -> None:
        """One iteration, until the device has done it."""
        x, y = next(self._batches)
        self.optimizer.zero_grad()
        self._loss(self.model(x), y).backward()
        self.optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def waited_s(self) -> list[float]:
        """Seconds that this worker has waited for each rank."""
        return list(self.group.waited_s) if self.group is not None else []


class School:
    """All trainees of one worker."""

    def __init__(self, seat: Seat, config: TrainingConfig, stack: contextlib.ExitStack) -> None:
        self._seat = seat
        self._config = config
        self._stack = stack
        self._device = seat.device(config.device)
        self._trainees: dict[str, Trainee] = {}

    def attach(self, strategy: str) -> None:
        """Make a model, and attach the strategy to it; `none` attaches nothing."""
        trainee = self._trainees[strategy] = Trainee(self._config, self._seat.rank, self._device)
        if strategy == NONE:
            return
        # a group for each strategy: who waits for whom is counted apart, and each may leave its own
        if needs_servers(strategy):
            opened = self._seat.open_with_servers(strategy, self._config.num_servers)
        else:
            is_on_gpus = self._device.type == "cuda" and self._seat.size > 1
            opened = self._seat.open_group(
                strategy,
                workers_per_machine=self._config.workers_per_machine,
                backend="nccl" if is_on_gpus else None,
            )
        trainee.group = self._stack.enter_context(opened)
        made = make_strategy(trainee.group, strategy, **self._config.options.get(strategy, {}))
        self._stack.enter_context(made.attach(trainee.model, trainee.optimizer))

    def block(
        self, strategy: str, iterations: int | None, seconds: float, sleep_s: float
    ) -> dict[str, list[float]]:
        """Iterate so often, or else for so long; the time of each iteration, and the waits of the block."""
        trainee = self._trainees[strategy]
        sleep_s = sleep_s if self._seat.rank == self._config.slow_rank else 0.0
        waited_s = trainee.waited_s
        times_s: list[float] = []
        began_s = last_s = time.perf_counter()
        while len(times_s) < iterations if iterations is not None else last_s - began_s < seconds:
            if sleep_s:
                time.sleep(sleep_s)
            trainee.step()
            now_s = time.perf_counter()
            times_s.append(now_s - last_s)
            last_s = now_s
        waits_s = [after - before for before, after in zip(waited_s, trainee.waited_s, strict=True)]
        return {"times_s": times_s, "waited_s": waits_s}
