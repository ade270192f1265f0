"""What a parameter server or worker does that was started by hand; who it is, `training_roles` says."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from shoal.bench.contenders import Trainee
from shoal.bench.frame import Receive, RowKey, Version
from shoal.bench.training import TrainingConfig
from shoal.bench.training_roles import STRATEGY, Role
from shoal.bench.training_rows import ITERATION, OWN_SPEED, row
from shoal.bench.training_worker import trainee_of
from shoal.core import BenchmarkError, PeerLost
from shoal.group import Group, init
from shoal.strategies import ParameterServer

Say = Callable[[str], None]


class WorkerByHand:
    """One start of a worker in this very process: how `run_benchmark` runs it."""

    def __init__(self, role: Role, say: Say) -> None:
        self._role = role
        self._say = say

    def __call__(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """Meet the others, train, and tell this worker's rows: those so far, where another one is lost."""
        config = msgspec.convert(arguments["config"], TrainingConfig)
        config = msgspec.structs.replace(config, seed=arguments["seed"])
        times_s: list[float] = []
        try:
            for number, time_s in enumerate(train(self._role, config, self._say)):
                times_s.append(time_s)
                self._say(f"Iter #{number}: {config.batch_size / time_s:.1f} img/sec per worker")
        except PeerLost as error:
            raise BenchmarkError(error.what, cause=error.cause, next_step=error.next_step) from error
        finally:
            if times_s:
                self._tell_rows(config.batch_size, times_s, receive)

    def _tell_rows(self, batch_size: int, times_s: list[float], receive: Receive) -> None:
        key: RowKey = {"strategy": STRATEGY, "rank": self._role.index}
        speeds = [batch_size / time_s for time_s in times_s]
        for told in (row(OWN_SPEED, key, speeds), row(ITERATION, key, times_s)):
            receive({"row": msgspec.to_builtins(told)})


def train(role: Role, config: TrainingConfig, say: Say) -> Iterator[float]:
    """So many iterations as `config` asks of each worker, after its warm-up; the seconds of each."""
    say(f"Model: {config.model}")
    say(f"Batch size: {config.batch_size}")
    say(f"Device: {config.device}")
    say(f"Worker {role.index} of {role.num_workers}, servers: {role.num_servers}, met at {role.meeting}")
    with _taking(role) as group:
        trainee = trainee_of(config, role.index, torch.device(config.device))
        with _strategy(group, config).attach(trainee.model, trainee.optimizer):
            say("Running warmup...")
            warm_s = statistics.median(_timed(trainee, 0.0) for _ in range(config.num_warmup))
            sleep_s = warm_s * (config.slow_factor - 1) if role.index == config.slow_rank else 0.0
            say("Running benchmark...")
            for _ in range(config.iterations or 0):
                yield _timed(trainee, sleep_s)


def serve(role: Role, config: TrainingConfig, say: Say) -> dict[str, Any]:
    """Hold parameters until the last worker has left; what the server has counted."""
    with _taking(role) as group:
        trainee = trainee_of(config, 0, torch.device(config.device))
        strategy = _strategy(group, config)
        say(
            f"Server {role.index} of {role.num_servers}, for {role.num_workers} workers, met at "
            f"{role.meeting}; it ends after them."
        )
        with contextlib.suppress(SystemExit):
            strategy.attach(trainee.model, trainee.optimizer)
        return strategy.stats


@contextlib.contextmanager
def _taking(role: Role) -> Iterator[Group]:
    """The group of all roles, with this process in its own."""
    os.environ.update(role.variables)
    with init(num_servers=role.num_servers) as group:
        yield group


def _strategy(group: Group, config: TrainingConfig) -> ParameterServer:
    return ParameterServer(group, **config.options.get(STRATEGY, {}))


def _timed(trainee: Trainee, sleep_s: float) -> float:
    began_s = time.perf_counter()
    if sleep_s:
        time.sleep(sleep_s)
    trainee.step()
    trainee.synchronize()
    return time.perf_counter() - began_s
