"""A worker of `shoal bench ddp`: trains one model at a time, alone or in a group that it opens for that."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgspec
import torch
from torch import distributed
from torch.optim import SGD

from shoal.bench.contenders import Trainee, make_contender, new_model
from shoal.bench.ddp import NUM_CLASSES, DdpConfig
from shoal.bench.workers import Answers, Backend, Place
from shoal.core import UsageError
from shoal.doctor.machine import describe_machine
from shoal.group.base import Group
from shoal.group.cluster.rendezvous import host_id
from shoal.group.solo import SoloGroup
from shoal.models import model_named
from shoal.strategies.ddp import open_process_group, wrap
from shoal.strategies.options import DDPOptions

_WARM_ITERATIONS = 2


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Measure what is ordered."""
    place.set_up_process()
    bench = Bench(place, msgspec.convert(arguments, DdpConfig))
    return {
        "place": bench.place,
        "machine": bench.machine,
        "warm_up": bench.warm_up,
        "measure": bench.measure,
    }


class Bench:
    """What one worker does."""

    def __init__(self, place: Place, config: DdpConfig) -> None:
        self._place = place
        self._config = config

    def place(self) -> dict[str, Any]:
        """The machine that this worker counts as being on, and the one that it is on."""
        machines, per_machine = self._place.machines, self._config.workers_per_machine
        machine = machines[self._place.rank] if machines else 0
        part = self._place.local_rank // per_machine if per_machine else 0
        return {"machine": [machine, part], "host_id": host_id()}

    def machine(self) -> dict[str, Any] | None:
        """All about the machine, by the first worker of each."""
        return describe_machine() if self._place.local_rank == 0 else None

    def warm_up(self, model: str) -> None:
        """Iterate alone, for nobody to see."""
        trainee = self._trainee(model)
        for _ in range(_WARM_ITERATIONS):
            iteration_s(trainee)

    def measure(self, model: str, num_ranks: int, group_name: str | None) -> list[float]:
        """The seconds of each iteration, in a group of so many ranks, or with nothing around the model."""
        config = self._config
        with contextlib.ExitStack() as stack:
            group: Group = SoloGroup()
            if group_name is not None:
                group = stack.enter_context(self._open_group(group_name, num_ranks))
            trainee = self._trainee(model)
            if group_name is not None:
                self._share(group, trainee, stack)
            for _ in range(config.num_warmup):
                iteration_s(trainee)
            group.barrier().wait()
            times_s = [iteration_s(trainee) for _ in range(config.num_iters)]
            group.barrier().wait()  # nobody takes apart what another still needs
            return times_s

    def _trainee(self, model: str) -> Trainee:
        config = self._config
        entry = model_named(model).at(image_side=config.image_size, num_classes=NUM_CLASSES)
        device = self._place.device(config.device)
        seed = config.seed + self._place.rank
        network = new_model(entry, seed, device)
        # the document's settings, and its labels
        optimizer = SGD(network.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
        x, y = (tensor.to(device) for tensor in entry.random_batch(seed, config.batch_size))
        return Trainee(network, optimizer, itertools.repeat((x, torch.ones_like(y))), device)

    def _open_group(self, name: str, num_ranks: int) -> Group:
        config = self._config
        backend: Backend | None = None
        # torch's wrapper opens gloo on the CPU, and NCCL where each worker has a GPU, by itself
        if config.distributed_backend != "shoal" and not (config.is_ddp and self._is_usual):
            backend = config.distributed_backend
        return self._place.open_group(
            name, among=num_ranks, workers_per_machine=config.workers_per_machine, backend=backend
        )

    @property
    def _is_usual(self) -> bool:
        """Whether the backend is the device's own."""
        return self._config.distributed_backend == ("gloo" if self._config.device == "cpu" else "nccl")

    def _check_backend(self, opened: str) -> None:
        """UsageError where torch's wrapper talks by another backend than the report would say."""
        if opened != self._config.distributed_backend:
            raise UsageError(
                f"Workers were to talk by {self._config.distributed_backend}, and {opened} was opened.",
                cause="NCCL refuses workers that share a GPU.",
                next_step=f"give --distributed-backend {opened}.",
            )

    def _share(self, group: Group, trainee: Trainee, stack: contextlib.ExitStack) -> None:
        """Torch's wrapper is taken as it is, for a lone worker too: as a strategy it has hooks of ours."""
        config = self._config
        if config.is_ddp:
            open_process_group(group, trainee.device, stack)
            self._check_backend(distributed.get_backend())
            options = msgspec.convert(config.options, DDPOptions)
            trainee.model = wrap(trainee.model, options, should_start_equal=True)
        else:
            strategy = make_contender(group, config.strategy, config.options)
            stack.enter_context(strategy.attach(trainee.model, trainee.optimizer, stays=True))


def iteration_s(trainee: Trainee) -> float:
    """The seconds of one iteration: forward, loss, backward and the optimizer's step, all done."""
    trainee.optimizer.zero_grad()
    return trainee.seconds_of(trainee.learn)
