"""Parameter servers and workers that are started by hand, one command each, as with TensorFlow's of old.

Who is who follows from the lists of hosts, which all of them are given alike: servers first, then workers.
They meet at the first server's address; the other ports are not used.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shoal.bench.contenders import Spread, Trainee, device_of, options_of, tokens_of
from shoal.bench.frame import BenchmarkPlan, Receive, RowKey, RunFlags, Version, measured
from shoal.bench.ranks import HostFlags
from shoal.bench.training import (
    ITERATION,
    OWN_SPEED,
    TrainingConfig,
    TrainingFlags,
    one_of,
    slow_worker,
    trained_config,
    trainee_of,
)
from shoal.core import Address, BenchmarkError, PeerLost, UsageError
from shoal.core.run_options import RUN_ID_VARIABLE, RunOptions
from shoal.report import DEFAULT_FOLDER, Report, default_path
from shoal.report.schema import rows_of, with_failed
from shoal.report.tables import emit, tell_result
from shoal.report.views import Items
from shoal.strategies.registry import canonical

if TYPE_CHECKING:
    import torch

    from shoal.group import Group
    from shoal.strategies import ParameterServer

Say = Callable[[str], None]
JobName = Literal["ps", "worker"]
STRATEGY = "parameter-server"
DEFAULT_ITERATIONS, DEFAULT_BATCH_SIZE, DEFAULT_WARMUP = 3000, 64, 10
BY_HAND = (
    *("model", "image_size", "strategies", "option", "batch_size", "device", "no_cuda", "fuse", "num_warmup"),
    *("eager", "xla", "optimizer", "sequence_length"),
    *("pairs", "iterations", "slow_worker", "ps_hosts", "worker_hosts", "job_name", "task_index", "seed"),
    *("network_interface", "report", "json_file"),
)
"""Flags that mean something to a process that is started by hand."""
_OF_WORKERS = ("report", "json_file")
FROM_WORKERS = ""
"""The model of a server that was told none: it takes that of the workers."""


class Role(msgspec.Struct, frozen=True):
    """One process of those that were started by hand."""

    job: JobName
    index: int
    """Among those of the same job."""
    num_servers: int
    num_workers: int
    meeting: Address
    """The address of the first server, where all meet."""
    network_interface: str | None = None
    """Through which this process talks to other machines."""

    @property
    def is_server(self) -> bool:
        """Whether it holds parameters, and trains nothing."""
        return self.job == "ps"

    @property
    def variables(self) -> dict[str, str]:
        """How a launcher would have placed this process."""
        rank = self.index if self.is_server else self.num_servers + self.index
        run_id = os.environ.get(RUN_ID_VARIABLE, "")
        options = RunOptions(run_id=run_id, network_interface=self.network_interface)
        return {
            **options.to_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_servers + self.num_workers),
            "MASTER_ADDR": self.meeting.host,
            "MASTER_PORT": str(self.meeting.port),
        }


def by_hand_plan(
    flags: TrainingFlags, hosts: HostFlags, run: RunFlags, typed: Mapping[str, str]
) -> BenchmarkPlan | None:
    """Be a parameter server until all workers have left, or say what a worker measures for its report."""
    role = role_of(flags, hosts)
    config = by_hand_config(role, flags, hosts, run, typed)

    def say(text: str) -> None:
        emit(text, run.out)
        run.out.flush()

    if role.is_server:
        tell_result(serve_by_hand(role, config, say), run.out)
        return None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # workers that share a folder end at the same time: each has a name of its own
    report = run.report or default_path(DEFAULT_FOLDER, f"training-worker-{role.index}", now)
    run = msgspec.structs.replace(run, starts=1, against=None, report=report)
    return BenchmarkPlan(config, run, summarize_worker, worker_items, where=WorkerByHand(role, say))


def role_of(flags: TrainingFlags, hosts: HostFlags) -> Role:
    """Return the role that the flags give this process; UsageError where they do not suffice."""
    job, index = flags.job_name, flags.task_index
    if flags.ps_hosts is None or flags.worker_hosts is None or job is None:
        raise UsageError(
            "A process that is started by hand has to know the others, and what it is itself.",
            next_step="give --ps-hosts HOST:PORT,… --worker-hosts HOST:PORT,… --job-name ps|worker "
            "--task-index N.",
        )
    servers = _addresses("--ps-hosts", flags.ps_hosts)
    workers = _addresses("--worker-hosts", flags.worker_hosts)
    peers = servers if job == "ps" else workers
    if not 0 <= index < len(peers):
        raise UsageError(
            f"There is no {job} {index} among {len(peers)}.",
            next_step=f"give --task-index 0 to {len(peers) - 1}, or name more hosts.",
        )
    return Role(job, index, len(servers), len(workers), servers[0], hosts.network_interface)


def _addresses(flag: str, text: str) -> list[Address]:
    addresses = [Address.parse(part.strip()) for part in text.split(",") if part.strip()]
    if not addresses:
        raise UsageError(f"{flag} names nobody.", next_step=f"say {flag} HOST:PORT,HOST:PORT.")
    return addresses


def by_hand_config(
    role: Role, flags: TrainingFlags, hosts: HostFlags, run: RunFlags, typed: Mapping[str, str]
) -> TrainingConfig:
    """Make of the flags what a process trains that is started by hand.

    `typed` has the flags as typed, by parameter; UsageError for one that is of no meaning to it.
    """
    if hosts.launched_size is not None:
        raise UsageError(
            "A launcher has started this process, which is to be started by hand.",
            next_step="start it without one, or leave --job-name out.",
        )
    if flags.kungfu is not None or any(canonical(name) != STRATEGY for name in flags.strategies or ()):
        raise UsageError(
            "Servers and workers that are started by hand train with parameter-server.",
            next_step="leave --strategies and --kungfu out.",
        )
    check_by_hand(typed, is_server=role.is_server)
    device = device_of(flags.device, no_cuda=flags.no_cuda)
    config = config_of(
        role,
        trained_config(flags, run.seed, device, DEFAULT_BATCH_SIZE),
        num_iterations=one_of({"--num-iters": flags.pairs, "--iterations": flags.iterations}),
        num_warmup=flags.num_warmup,
    )
    if role.is_server and "model" not in typed:
        config = msgspec.structs.replace(config, model=FROM_WORKERS, image_size=None)
    options = options_of((STRATEGY,), flags.option)
    return msgspec.structs.replace(config, options=options, **slow_worker(flags.slow_worker))


def check_by_hand(typed: Mapping[str, str], *, is_server: bool) -> None:
    """Raise UsageError for a flag that means nothing by hand."""
    for name, shown in typed.items():
        if name not in BY_HAND:
            raise UsageError(
                f"{shown} means nothing to a process that is started by hand, which --job-name is for.",
                next_step="leave one of them out.",
            )
        if is_server and name in _OF_WORKERS:
            raise UsageError(
                f"A server measures nothing that {shown} could hold.", next_step="give it to the workers."
            )


def config_of(
    role: Role, config: TrainingConfig, *, num_iterations: int | None, num_warmup: int | None
) -> TrainingConfig:
    """What a process that is started by hand trains: the same, with plain SGD, iteration by iteration."""
    return msgspec.structs.replace(
        config,
        strategies=(STRATEGY,),
        num_workers=role.num_workers,
        num_servers=role.num_servers,
        num_warmup=num_warmup or DEFAULT_WARMUP,
        iterations=num_iterations or DEFAULT_ITERATIONS,
        momentum=0.0,
    )


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
                speed = config.batch_size * (config.sequence_length or 1) / time_s
                what = "img" if config.sequence_length is None else "tok"
                self._say(f"Iter #{number}: {speed:.1f} {what}/sec per worker")
        except PeerLost as error:
            raise BenchmarkError(error.what, cause=error.cause, next_step=error.next_step) from error
        finally:
            if times_s:
                key: RowKey = {"strategy": STRATEGY, "rank": self._role.index}
                speeds = [config.batch_size / time_s for time_s in times_s]
                for told in (measured(OWN_SPEED, key, speeds), measured(ITERATION, key, times_s)):
                    receive({"row": msgspec.to_builtins(told)})


def train(role: Role, config: TrainingConfig, say: Say) -> Iterator[float]:
    """So many iterations as `config` asks of each worker, after its warm-up; the seconds of each."""
    say(f"Model: {config.model}")
    say(f"Batch size: {config.batch_size}")
    say(f"Device: {config.device}")
    say(f"Worker {role.index} of {role.num_workers}, servers: {role.num_servers}, met at {role.meeting}")
    with _taking(role) as group:
        _agree_on_model(group, config)
        trainee = trainee_of(config, role.index, _device(config))
        with _strategy(group, config).attach(trainee.model, trainee.optimizer):
            say("Running warmup...")
            warm_s = statistics.median(_timed(trainee, 0.0) for _ in range(config.num_warmup))
            sleep_s = warm_s * (config.slow_factor - 1) if role.index == config.slow_rank else 0.0
            say("Running benchmark...")
            for _ in range(config.iterations or 0):
                yield _timed(trainee, sleep_s)


def serve_by_hand(role: Role, config: TrainingConfig, say: Say) -> dict[str, Any]:
    """Be a parameter server until all workers have left; its RESULT has what it has counted."""
    counted = serve(role, config, say)
    say(f"All workers have left: {counted['num_applied']} gradients of {counted['num_pushes']} applied.")
    return {"strategy": STRATEGY, "job_name": role.job, "task_index": role.index, **counted}


def serve(role: Role, config: TrainingConfig, say: Say) -> dict[str, Any]:
    """Hold parameters until the last worker has left; what the server has counted."""
    with _taking(role) as group:
        config = _agree_on_model(group, config)
        say(f"Model: {config.model}")
        trainee = trainee_of(config, 0, _device(config))
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
    """Open the group of all roles, with this process in its own."""
    from shoal.group import init

    os.environ.update(role.variables)
    with init(num_servers=role.num_servers) as group:
        yield group


def _agree_on_model(group: Group, config: TrainingConfig) -> TrainingConfig:
    """Tell the servers what the workers train, collectively; a server that was told no model gets theirs.

    UsageError on all where they were told different ones.
    """
    from shoal.group import share

    everybody = group.everybody
    assert everybody is not None, "there are servers"
    names = ("model", "image_size", "sequence_length")
    told = share(everybody, {name: getattr(config, name) for name in names})
    trained = told[group.num_servers]
    for other in told:
        if other["model"] not in (FROM_WORKERS, trained["model"]):
            raise UsageError(
                f"The first worker trains {trained['model']}, and another process was told {other['model']}.",
                next_step="give all workers the same --model, and servers the same or none.",
            )
    return msgspec.structs.replace(config, **trained) if config.model == FROM_WORKERS else config


def _strategy(group: Group, config: TrainingConfig) -> ParameterServer:
    from shoal.strategies import ParameterServer

    return ParameterServer(group, **config.options.get(STRATEGY, {}))


def _device(config: TrainingConfig) -> torch.device:
    import torch

    return torch.device(config.device)


def _timed(trainee: Trainee, sleep_s: float) -> float:
    began_s = time.perf_counter()
    if sleep_s:
        time.sleep(sleep_s)
    trainee.step()
    trainee.synchronize()
    return time.perf_counter() - began_s


# --- results ---


def summarize_worker(report: Report) -> dict[str, Any]:
    """The RESULT of one worker."""
    config, speeds = msgspec.convert(report.config, TrainingConfig), rows_of(report, OWN_SPEED)
    result: dict[str, Any] = {
        "strategy": STRATEGY,
        "model": config.model,
        "num_workers": config.num_workers,
        "num_servers": config.num_servers,
        "batch_size": config.batch_size,
        "num_iterations": 0,
    }
    for speed in speeds:
        spread = Spread.of(speed.samples)
        result |= {
            "rank": speed.key["rank"],
            "num_iterations": len(speed.samples),
            "examples_per_s": round(spread.mean, 1),
            "error": round(spread.error, 1),
        }
    return with_failed(report, result)


def worker_items(report: Report) -> Items:
    """What is printed of one worker's report, in the document's words."""
    num_tokens, items = tokens_of(report.config), []
    for speed in rows_of(report, OWN_SPEED):
        speeds = [sample * (num_tokens or 1) for sample in speed.samples]
        items.append(f"{'Img' if num_tokens is None else 'Tok'}/sec per worker: {Spread.of(speeds)}")
    return [*items, *((f"failed: {row.error}", "red") for row in report.failed)]
