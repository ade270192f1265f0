"""A worker of `shoal bench scaling`: one model under the strategy that is measured, and one under none."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.bench.contenders import NONE
from shoal.bench.scaling import Point, ScalingConfig
from shoal.bench.scaling_options import options_for
from shoal.bench.trainee import Recipe, Trainee, make_contender
from shoal.bench.workers import Answers, Place
from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.group.base import Group
from shoal.group.conditions import Shaped
from shoal.models import model_named
from shoal.strategies import Strategy

_NUM_MIXINGS = 5


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Train what is ordered."""
    place.set_up_process()
    bench = Bench(place, msgspec.convert(arguments, ScalingConfig), stack)
    return {
        "open": bench.open,
        "attach": bench.attach,
        "warm_up": bench.warm_up,
        "iterate": bench.iterate,
        "trace": bench.trace,
        "close": bench.close,
        "mix": bench.mix,
        "machine": bench.machine,
    }


class Opened:
    """A trainee, and what it was opened with."""

    def __init__(self, trainee: Trainee, batch_size: int) -> None:
        self.trainee = trainee
        self.batch_size = batch_size
        self.strategy: Strategy | None = None
        self.is_warm = False


class Bench:
    """The trainees of one worker."""

    def __init__(self, place: Place, config: ScalingConfig, stack: contextlib.ExitStack) -> None:
        self._place = place
        self._config = config
        self._stack = stack
        self._entry = model_named(config.model).at(config.image_size, config.num_classes)
        self._opened: dict[str, Opened] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def open(self, number: int, point: dict[str, Any]) -> str | None:
        """Make a model, and a strategy for it; `none` has none. Why that cannot be, where it can't."""
        where = msgspec.convert(point, Point)
        there = self._opened.get(where.strategy)
        if where.strategy == NONE and there is not None and there.batch_size == where.batch_size:
            return None
        stack = self._stacks[where.strategy] = self._stack.enter_context(contextlib.ExitStack())
        try:
            opened = Opened(self._trainee(where.batch_size), where.batch_size)
            if where.strategy != NONE:
                group = stack.enter_context(self._open_group(number, where))
                opened.strategy = self._make_strategy(where.strategy, group)
        except UsageError as error:
            return " ".join(error.what.split())
        self._opened[where.strategy] = opened
        return None

    def attach(self, strategy: str) -> None:
        """Collective."""
        opened = self._opened[strategy]
        assert opened.strategy is not None, "nothing attaches to none"
        attachment = opened.strategy.attach(opened.trainee.model, opened.trainee.optimizer)
        self._stacks[strategy].enter_context(attachment)

    def warm_up(self, strategy: str) -> None:
        """Batches that do not count, once for each model."""
        opened = self._opened[strategy]
        if not opened.is_warm:
            opened.trainee.seconds_of(opened.trainee.step, self._config.num_warmup_batches)
            opened.is_warm = True

    def iterate(self, strategy: str) -> float:
        """The seconds of one iteration of several batches."""
        trainee = self._opened[strategy].trainee
        return trainee.seconds_of(trainee.step, self._config.num_batches_per_iter)

    def trace(self, strategy: str, file: str) -> None:
        """One iteration more, of which the first worker writes what torch's profiler saw."""
        if self._place.rank != 0:
            self.iterate(strategy)
            return
        with torch.profiler.profile() as profiler:
            self.iterate(strategy)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(file)

    def mix(self) -> list[float]:
        """The seconds of adding half of one model to half of another, several times."""
        own, other = torch.zeros(2, self._entry.num_parameters())
        times_s = []
        for _ in range(_NUM_MIXINGS + 1):
            began_s = time.perf_counter()
            own.lerp_(other, 0.5)
            times_s.append(time.perf_counter() - began_s)
        return times_s[1:]

    def machine(self) -> list[Any]:
        """The name of this machine, and the cores or GPUs that it has for its workers."""
        number = num_cores() if self._config.device == "cpu" else torch.cuda.device_count()
        return [socket.gethostname(), number]

    def close(self, strategy: str) -> None:
        """Detach it, leave its group, and let its memory go."""
        self._opened.pop(strategy, None)
        self._stacks.pop(strategy, contextlib.ExitStack()).close()

    def _trainee(self, batch_size: int) -> Trainee:
        config = self._config
        recipe = Recipe(
            entry=self._entry,
            batch_size=batch_size,
            learning_rate=config.learning_rate,
            seed=config.seed,
        )
        return recipe.trainee(self._place.rank, self._place.device(config.device))

    def _open_group(self, number: int, point: Point) -> Group:
        config = self._config
        group = self._place.open_group(
            f"{number}-{point.num_workers}",
            among=point.num_workers,
            workers_per_machine=config.workers_per_machine,
        )
        if config.profile is None:
            return group
        return Shaped(group, config.profile, between=config.between, seed=config.seed)

    def _make_strategy(self, strategy: str, group: Group) -> Strategy:
        workers = Counter(group.machines)
        local_sizes = [workers[machine] for machine in sorted(workers)]
        return make_contender(group, strategy, options_for(strategy, self._config, local_sizes))
