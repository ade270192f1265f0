"""A worker of `shoal bench accuracy`: it trains one contender at a time, and evaluates when it is told to."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import SGD

from shoal.bench.accuracy import AccuracyConfig, Look, Run, ServerRole
from shoal.bench.contenders import Trainee, make_contender
from shoal.bench.workers import Answers, Parent, Place
from shoal.data import digits, mnist
from shoal.data.seeds import mix
from shoal.data.splits import divide
from shoal.group.observed import Metered
from shoal.models import mlp, small_cnn, small_mlp
from shoal.simulate.classified import MNIST_WIDTHS
from shoal.simulate.examples import accuracy_of, batches_of
from shoal.strategies.averaging import common_model
from shoal.strategies.strategy import Strategy

_WARM_STEPS = 5
_CPU = torch.device("cpu")
Batch = tuple[torch.Tensor, torch.Tensor]


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Train what is ordered."""
    place.set_up_process()
    school = School(place, msgspec.convert(arguments, AccuracyConfig))
    stack.push(school.close)
    return {"ready": school.warm_up, "begin": school.begin, "train": school.train, "finish": school.finish}


def serve_parameters(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one run until the workers are done with it."""
    place = msgspec.convert(arguments["place"], Place)
    place.set_up_process()
    role = msgspec.convert(arguments["arguments"], ServerRole)
    config, contender = role.config, role.run.contender
    with place.open_as_server(_group_name(role.run), config.num_servers, role.server) as group:
        model, optimizer = beginner(config, place.device(config.device))
        strategy = make_contender(group, contender.strategy, contender.options)
        with contextlib.suppress(SystemExit):
            strategy.attach(model, optimizer)


def pupil_of(config: AccuracyConfig, part: Batch, rank: int) -> Trainee:
    """What one worker trains, where its examples are."""
    device = part[0].device
    batches = batches_of(part, config.batch_size, mix(config.seed, rank))
    return Trainee(*beginner(config, device), batches, device)


class School:
    """What one worker has of the data, and the pupil under way, with what it is attached to."""

    def __init__(self, place: Place, config: AccuracyConfig) -> None:
        self._place = place
        self._config = config
        device = place.device(config.device)
        parts = parts_of(config, place.rank)
        self._parts = {split: _moved(part, device) for split, part in parts.items()}
        self._test = _moved(examples_of(config, train=False), device)
        self._probe, _ = beginner(config, device)
        self._attached: tuple[Trainee, Strategy, Metered] | None = None
        self._stack = contextlib.ExitStack()

    def warm_up(self) -> None:
        """What a process does for the first time takes longer."""
        pupil = pupil_of(self._config, next(iter(self._parts.values())), self._place.rank)
        for _ in range(_WARM_STEPS):
            pupil.step()
        accuracy_of(self._probe, self._test)

    def begin(self, run: dict[str, Any]) -> Look:
        """Attach the contender to a model that has learned nothing; collective, as all that follows."""
        chosen = msgspec.convert(run, Run)
        if chosen.needs_servers:
            group = self._place.open_with_servers(_group_name(chosen), self._config.num_servers)
        else:
            machines = self._config.workers_per_machine
            group = self._place.open_group(_group_name(chosen), workers_per_machine=machines)
        metered = Metered(self._stack.enter_context(group))
        pupil = pupil_of(self._config, self._parts[chosen.split], self._place.rank)
        contender = chosen.contender
        strategy = make_contender(metered, contender.strategy, contender.options)
        self._stack.enter_context(strategy.attach(pupil.model, pupil.optimizer))
        self._attached = pupil, strategy, metered
        metered.reset()
        return self._look(seconds=0.0)

    def train(self, num_steps: int) -> Look:
        """So many steps, and an evaluation."""
        assert self._attached is not None, "trained before it has begun"
        pupil, _, _ = self._attached
        return self._look(pupil.seconds_of(pupil.step, num_steps))

    def finish(self) -> None:
        """Detach, and leave the group."""
        self._attached = None
        self._stack.close()

    def close(self, *failure: Any) -> None:
        """As `finish`; after a failure without a word to the others."""
        self._stack.__exit__(*failure)

    def _look(self, seconds: float) -> Look:
        assert self._attached is not None
        pupil, strategy, metered = self._attached
        traffics = metered.totals()
        moved = {name: (traffic.sent_bytes, traffic.received_bytes) for name, traffic in traffics.items()}
        distance = strategy.consensus_distance()
        mean = common_model(metered, pupil.model, are_equal=False)
        accuracy = accuracy_of(pupil.model, self._test).value
        metered.reset()
        if self._place.rank != 0:
            return Look(seconds, moved, accuracy, distance)
        self._probe.load_state_dict(mean)
        score = accuracy_of(self._probe, self._test)
        return Look(seconds, moved, accuracy, distance, score.value, score.loss)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return batch[0].to(device), batch[1].to(device)


def beginner(config: AccuracyConfig, device: torch.device = _CPU) -> tuple[nn.Module, SGD]:
    """A model that has learned nothing, equal for equal seeds, and its optimizer."""
    torch.manual_seed(config.seed)
    if config.model == "small-cnn":
        model = small_cnn()
    else:
        model = small_mlp() if config.task == "digits" else mlp(MNIST_WIDTHS)
    model.to(device)
    return model, SGD(model.parameters(), lr=config.learning_rate, momentum=config.momentum)


def examples_of(config: AccuracyConfig, *, train: bool) -> Batch:
    """Of the task."""
    return digits(train=train) if config.task == "digits" else mnist(train=train, folder=config.data_dir)


def parts_of(config: AccuracyConfig, rank: int) -> dict[str, Batch]:
    """What one worker trains on, by split; the rest of the examples is not kept."""
    x, y = examples_of(config, train=True)
    parts = {}
    for split in config.splits:
        own = torch.from_numpy(divide(y.numpy(), config.num_workers, split, config.seed)[rank])
        parts[split] = x[own], y[own]
    return parts


def _group_name(run: Run) -> str:
    return f"accuracy-{run.number}"
