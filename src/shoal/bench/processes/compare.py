"""A contest of `shoal compare` with real processes: the jobs of virtual time, under links held back alike.

A step takes as long as the world says: the worker sleeps what its own computing has left of that. Models go
to the parent, a `RealContest`, in files of the workers' folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.bench.workers import (
    BenchPlace,
    LocalWorkers,
    Parent,
    WorkerSettings,
    one_line,
    server_place,
    start_servers,
)
from shoal.core import SYSTEM_CLOCK, Address, BenchmarkError, Deadline, UsageError
from shoal.group.base import Group
from shoal.group.operations import ClockSleeper
from shoal.group.wrappers import Shaped
from shoal.report.storage import write_atomically
from shoal.simulate.contest import Trial, course_of
from shoal.simulate.exact import Trainer, charged, serve
from shoal.simulate.job import CourseRecord, TrainingJob, WorkerLog
from shoal.simulate.tasks import make_task
from shoal.simulate.world import StepCosts, World
from shoal.transport import Profile

# --- the parent ---

_ANSWER_S = 1800.0
_SERVED_S, _LOOK_S = 10.0, 0.01
"""How long a server may take to say goodbye after its workers, and how often one looks."""


class RealContest:
    """Processes that do one job after another; a context manager. Started by the first job."""

    def __init__(self, num_workers: int) -> None:
        settings = WorkerSettings("shoal.bench.processes.compare:RealWorker", num_workers, answer_s=_ANSWER_S)
        self._num_workers = num_workers
        self._stack = contextlib.ExitStack()
        self._crew = self._stack.enter_context(LocalWorkers(settings))
        self._num_jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, job: TrainingJob, world: World) -> CourseRecord:
        """Run a job in real seconds, as `simulate.contest.run_job` does; one whose workers fail has an error.

        UsageError for what real workers cannot be given.
        """
        self._check(job, world)
        self._num_jobs += 1
        trial = RealTrial(number=self._num_jobs, job=job, world=world)
        try:
            told = [msgspec.convert(each, StoredLog, str_keys=True) for each in self._order(trial)]
        except BenchmarkError as error:
            return CourseRecord(job=job, moments=[], error=one_line(error))
        folder = str(Path(told[0].file).parent)
        served = _served(trial.file_of_server(folder, 0)) if world.num_servers else {}
        return course_of(make_task(job), [_log(each) for each in told], served)

    def _order(self, trial: RealTrial) -> list[dict[str, Any]]:
        plain = trial.plain()
        if not self._crew.is_running:
            self._crew.ask("ready", trial=plain)
        start_servers(
            self._crew, "shoal.bench.processes.compare:serve_job", trial.world.num_servers, trial=plain
        )
        return self._crew.ask("train", trial=plain)

    def _check(self, job: TrainingJob, world: World) -> None:
        if not job.num_workers == world.num_workers == self._num_workers:
            raise UsageError(
                f"{self._num_workers} processes cannot be a job of {job.num_workers} workers in a world of "
                f"{world.num_workers}.",
                next_step="give all three as many.",
            )
        if world.faults is not None:
            raise UsageError(
                "Faults happen in virtual time alone.", next_step="leave --real or --faults out."
            )
        if world.num_servers and world.between == "machines":
            raise UsageError(
                "Servers beside real processes have no machine of their own.",
                next_step="describe the links between workers, or leave --real out.",
            )


def _served(file: Path) -> dict[int, int]:
    """What a server has counted; nothing where it does not come to tell."""
    until_s = time.monotonic() + _SERVED_S
    while not file.exists():
        if time.monotonic() > until_s:
            return {}
        time.sleep(_LOOK_S)
    return msgspec.json.decode(file.read_bytes(), type=dict[int, int])


def _log(told: StoredLog) -> WorkerLog:
    file = Path(told.file)
    tensors = load_file(file)
    file.unlink()
    for index, snapshot in enumerate(told.log.snapshots):
        snapshot.tensors = _numbered(tensors, f"{index}.")
        snapshot.at_round = _numbered(tensors, f"{index} at round.")
    return told.log


def _numbered(tensors: Mapping[str, torch.Tensor], prefix: str) -> list[torch.Tensor]:
    count = sum(1 for name in tensors if name.startswith(prefix))
    return [tensors[f"{prefix}{number}"] for number in range(count)]


# --- a worker ---


class RealTrial(Trial, frozen=True, kw_only=True):
    """One job of the workers; `number` tells it from all others."""

    number: int

    @property
    def group_name(self) -> str:
        """The name of the group that its workers open."""
        return f"contest-{self.number}"

    def file_of_server(self, folder: str, server: int) -> Path:
        """Where a server's staleness is found when it is done."""
        return Path(folder) / f"{self.group_name}-server-{server}.json"

    @classmethod
    def read(cls, values: dict[str, Any]) -> RealTrial:
        """The trial of which `plain` gave these values."""
        return msgspec.convert(values, cls, str_keys=True)


class StoredLog(msgspec.Struct, frozen=True):
    """A worker's log without its models, and the file that has them.

    Their names are `SNAPSHOT.TENSOR` and, of the last round before it, `SNAPSHOT at round.TENSOR`.
    """

    log: WorkerLog
    file: str


class RealWorker:
    """One worker of a contest; its methods are the orders."""

    def __init__(self, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> None:
        place.set_up_process()
        self._place = place

    def ready(self, trial: dict[str, Any]) -> None:
        """Do what takes longer when a process does it for the first time."""
        task = make_task(RealTrial.read(trial).job)
        model, (inputs, labels) = task.model(), next(task.batches(self._place.rank))
        task.loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    def train(self, trial: dict[str, Any]) -> dict[str, Any]:
        """Do one job, from the opening of its group to its end."""
        place, given = self._place, RealTrial.read(trial)
        name, world = given.group_name, given.world
        opened = place.open_group(
            name, workers_per_machine=world.workers_per_machine, num_servers=world.num_servers
        )
        trainer = Trainer(make_task(given.job), place.rank)
        with opened:
            group = shaped(opened, world)
            pace = Pace(group, StepCosts(world, place.rank), world.compute.forward_share)
            trainer.train(group, SYSTEM_CLOCK, pace.charged)
        return _told(trainer.log, Path(place.folder) / f"{name}-{place.rank}.safetensors")


def serve_job(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one job until the workers are done with it; what it counts is a file too."""
    place, role = server_place(arguments)
    trial = RealTrial.read(role["trial"])
    with place.open_with_servers(trial.group_name, trial.world.num_servers, role["server"]) as group:
        staleness = serve(make_task(trial.job), shaped(group, trial.world))
        write_atomically(trial.file_of_server(place.folder, role["server"]), msgspec.json.encode(staleness))


def shaped(group: Group, world: World) -> Shaped:
    """Make a group as slow as the world's links; servers are called `server:0`, …, as they are there."""
    slow = Shaped(group, world.profile, between=world.between, seed=world.seed)
    if group.everybody is not None:
        profile = _with_servers(world)
        slow.everybody = Shaped(group.everybody, profile, seed=world.seed)
    return slow


class Pace:
    """Makes a model's steps take as long as they should, by sleeping; a `charging.Payer`."""

    def __init__(self, group: Group, costs: StepCosts, forward_share: float) -> None:
        self._group = group
        self._costs = costs
        self._forward_share = forward_share
        self._sleeper = ClockSleeper()
        self._due_s = 0.0

    def charged(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Pace the model while the block lasts; begun before a strategy is attached, to come first."""
        return charged(model, self._costs, self._forward_share, self)

    def begin(self, seconds: float) -> None:
        """Forward is due so long from now, whatever is really computed meanwhile."""
        self._due_s = self._sleeper.clock.now_s() + seconds

    def end_forward(self) -> None:
        """Sleep until it is over."""
        self._rest()

    def add(self, seconds: float) -> None:
        """The same for a part of backward."""
        self._due_s += seconds
        self._rest()

    def _rest(self) -> None:
        self._sleeper.until(self._due_s, self._group.progress, Deadline.never(), "a step")


def _with_servers(world: World) -> Profile:
    """Places of the first ranks of all are those of servers, of the others those of workers."""
    profile = world.profile
    if not profile.places:
        return profile
    members = [Address("server", number) for number in range(world.num_servers)]
    members += [Address("rank", rank) for rank in range(world.num_workers)]
    peers = {f"rank:{rank}": profile.place_of(peer) or "" for rank, peer in enumerate(members)}
    return msgspec.structs.replace(profile, peers={**profile.peers, **peers})


def _told(log: WorkerLog, file: Path) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    for index, snapshot in enumerate(log.snapshots):
        for prefix, kept in ((f"{index}.", snapshot.tensors), (f"{index} at round.", snapshot.at_round)):
            # of several snapshots the last round may be the same, and a file holds no tensor twice
            tensors |= {f"{prefix}{number}": tensor.clone() for number, tensor in enumerate(kept)}
    save_file(tensors, file)
    bare = [msgspec.structs.replace(snapshot, tensors=[], at_round=[]) for snapshot in log.snapshots]
    told = StoredLog(msgspec.structs.replace(log, snapshots=bare), str(file))
    values: dict[str, Any] = msgspec.to_builtins(told, str_keys=True)
    return values
