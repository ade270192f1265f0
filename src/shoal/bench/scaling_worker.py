"""A worker of `shoal bench scaling`: one model under the strategy that is measured, and one under none."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import SGD

from shoal.bench.crew import Answers, Place
from shoal.bench.scaling import NONE, Point, ScalingConfig
from shoal.bench.scaling_options import options_for
from shoal.bench.seat import Seat, seat_of
from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.group.base import Group
from shoal.group.shaped import Shaped
from shoal.models.registry import model_named
from shoal.strategies import Strategy, make_strategy

_NUM_BATCHES = 4


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Train what is ordered."""
    seat = seat_of(place)
    seat.take()
    bench = Bench(seat, msgspec.convert(arguments, ScalingConfig), stack)
    return {
        "open": bench.open,
        "attach": bench.attach,
        "warm_up": bench.warm_up,
        "iterate": bench.iterate,
        "trace": bench.trace,
        "close": bench.close,
        "machine": lambda: [socket.gethostname(), num_cores()],
    }


class Trainee:
    """One model with its optimizer and its batches; `step` is the user's own loop."""

    def __init__(self, config: ScalingConfig, batch_size: int, rank: int, device: torch.device) -> None:
        entry = model_named(config.model).at(config.image_size, config.num_classes)
        torch.manual_seed(config.seed)
        self.batch_size = batch_size
        self.device = device
        self.model = entry.build().to(device)
        self.optimizer = SGD(self.model.parameters(), lr=config.learning_rate)
        self.strategy: Strategy | None = None
        self.is_warm = False
        seeds = range(rank * _NUM_BATCHES, (rank + 1) * _NUM_BATCHES)
        batches = [entry.random_batch(config.seed + seed, batch_size) for seed in seeds]
        on_device = [(x.to(device), y.to(device)) for x, y in batches]
        self._batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = itertools.cycle(on_device)
        self._loss = nn.CrossEntropyLoss()

    def train(self, num_batches: int) -> float:
        """So many steps; the seconds that they took, with all that the device had to do for them."""
        self._synchronize()
        began_s = time.perf_counter()
        for _ in range(num_batches):
            self._step()
        self._synchronize()
        return time.perf_counter() - began_s

    def _step(self) -> None:
        x, y = next(self._batches)
        self.optimizer.zero_grad()
        self._loss(self.model(x), y).backward()
        self.optimizer.step()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Bench:
    """The trainees of one worker."""

    def __init__(self, seat: Seat, config: ScalingConfig, stack: contextlib.ExitStack) -> None:
        self._seat = seat
        self._config = config
        self._stack = stack
        self._trainees: dict[str, Trainee] = {}
        self._opened: dict[str, contextlib.ExitStack] = {}

    def open(self, number: int, point: dict[str, Any]) -> str | None:
        """Make a model, and a strategy for it; `none` has none. Why that cannot be, where it can't."""
        where = msgspec.convert(point, Point)
        there = self._trainees.get(where.strategy)
        if where.strategy == NONE and there is not None and there.batch_size == where.batch_size:
            return None
        opened = self._opened[where.strategy] = self._stack.enter_context(contextlib.ExitStack())
        try:
            device = self._seat.device(self._config.device)
            trainee = Trainee(self._config, where.batch_size, self._seat.rank, device)
            if where.strategy != NONE:
                group = opened.enter_context(self._open_group(number, where))
                trainee.strategy = self._make_strategy(where.strategy, group)
        except UsageError as error:
            return " ".join(error.what.split())
        self._trainees[where.strategy] = trainee
        return None

    def attach(self, strategy: str) -> None:
        """Collective."""
        trainee = self._trainees[strategy]
        assert trainee.strategy is not None, "nothing attaches to none"
        attachment = trainee.strategy.attach(trainee.model, trainee.optimizer)
        self._opened[strategy].enter_context(attachment)

    def warm_up(self, strategy: str) -> None:
        """Batches that do not count, once for each model."""
        trainee = self._trainees[strategy]
        if not trainee.is_warm:
            trainee.train(self._config.num_warmup_batches)
            trainee.is_warm = True

    def iterate(self, strategy: str) -> float:
        """The seconds of one iteration of several batches."""
        return self._trainees[strategy].train(self._config.num_batches_per_iter)

    def trace(self, strategy: str, file: str) -> None:
        """One iteration more, of which the first worker writes what torch's profiler saw."""
        if self._seat.rank != 0:
            self.iterate(strategy)
            return
        with torch.profiler.profile() as profiler:
            self.iterate(strategy)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(file)

    def close(self, strategy: str) -> None:
        """Detach it, leave its group, and let its memory go."""
        self._trainees.pop(strategy, None)
        self._opened.pop(strategy, contextlib.ExitStack()).close()

    def _open_group(self, number: int, point: Point) -> Group:
        config = self._config
        group = self._seat.open_group(
            f"{number}-{point.num_workers}",
            among=point.num_workers,
            workers_per_machine=config.workers_per_machine,
            backend="nccl" if config.device == "cuda" and point.num_workers > 1 else None,
        )
        if config.profile is None:
            return group
        return Shaped(group, config.profile, between=config.between, seed=config.seed)

    def _make_strategy(self, strategy: str, group: Group) -> Strategy:
        workers = Counter(group.machine_of(rank) for rank in range(group.size))
        local_sizes = [workers[machine] for machine in sorted(workers)]
        return make_strategy(group, strategy, **options_for(strategy, self._config, local_sizes))
