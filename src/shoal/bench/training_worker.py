"""A worker of `shoal bench training`: a model for each strategy, all attached at once, trained in blocks."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import torch

from shoal.bench.contenders import NONE, needs_servers
from shoal.bench.trainee import Laps, Recipe, Trainee, make_contender
from shoal.bench.training import ServerRole, TrainingConfig
from shoal.bench.workers import Answers, Parent, Place
from shoal.group.base import Group
from shoal.models import model_named


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Train what is ordered."""
    place.set_up_process()
    school = School(place, msgspec.convert(arguments, TrainingConfig), stack)
    return {"attach": school.attach, "block": school.block}


def serve_parameters(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one strategy until the workers are done."""
    place = msgspec.convert(arguments["place"], Place)
    place.set_up_process()
    role = msgspec.convert(arguments["arguments"], ServerRole)
    config = role.config
    with place.open_as_server(role.strategy, config.num_servers, role.server) as group:
        trainee = trainee_of(config, 0, place.device(config.device))
        made = make_contender(group, role.strategy, config.options.get(role.strategy, {}))
        with contextlib.suppress(SystemExit):
            made.attach(trainee.model, trainee.optimizer)


def trainee_of(config: TrainingConfig, rank: int, device: torch.device) -> Trainee:
    """What one worker trains."""
    recipe = Recipe(
        entry=model_named(config.model).at(config.image_size),
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        seed=config.seed,
    )
    return recipe.trainee(rank, device)


class School:
    """All trainees of one worker."""

    def __init__(self, place: Place, config: TrainingConfig, stack: contextlib.ExitStack) -> None:
        self._place = place
        self._config = config
        self._stack = stack
        self._device = place.device(config.device)
        self._trainees: dict[str, Trainee] = {}
        self._groups: dict[str, Group] = {}

    def attach(self, strategy: str) -> None:
        """Make a model, and attach the strategy to it; `none` attaches nothing."""
        trainee = self._trainees[strategy] = trainee_of(self._config, self._place.rank, self._device)
        if strategy == NONE:
            return
        # a group for each strategy: who waits for whom is counted apart, and each may leave its own
        if needs_servers(strategy):
            opened = self._place.open_with_servers(strategy, self._config.num_servers)
        else:
            machines = self._config.workers_per_machine
            opened = self._place.open_group(strategy, workers_per_machine=machines)
        group = self._groups[strategy] = self._stack.enter_context(opened)
        made = make_contender(group, strategy, self._config.options.get(strategy, {}))
        self._stack.enter_context(made.attach(trainee.model, trainee.optimizer))

    def block(
        self, strategy: str, iterations: int | None, seconds: float, sleep_s: float
    ) -> dict[str, list[float]]:
        """Iterate so often, or else for so long; the time of each iteration, and the waits of the block."""
        trainee = self._trainees[strategy]
        sleep_s = sleep_s if self._place.rank == self._config.slow_rank else 0.0
        waited_s = self._waited_s(strategy)
        laps = Laps(self._device)
        until_s = time.perf_counter() + seconds
        while len(laps) < iterations if iterations is not None else time.perf_counter() < until_s:
            if sleep_s:
                trainee.synchronize()  # a GPU would go on with the last iteration while this process sleeps
                time.sleep(sleep_s)
            trainee.step()
            laps.end()
        times_s = laps.seconds()
        waits_s = [after - before for before, after in zip(waited_s, self._waited_s(strategy), strict=True)]
        return {"times_s": times_s, "waited_s": waits_s}

    def _waited_s(self, strategy: str) -> list[float]:
        """Seconds that this worker has waited for each rank."""
        group = self._groups.get(strategy)
        return [] if group is None else list(group.stats.waited_s)
