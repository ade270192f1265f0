"""One job in a simulated world, from the first step to its record; what is compared is left to others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from shoal.core import ShoalError, UsageError
from shoal.group.conditions import Faulty
from shoal.simulate.course import course_of
from shoal.simulate.elastic import ElasticWorld
from shoal.simulate.exact import Worker, run_exact
from shoal.simulate.job import Job, WorkerLog
from shoal.simulate.record import CourseRecord
from shoal.simulate.stacked import refuse_unfit, run_stacked
from shoal.simulate.task import Task
from shoal.simulate.tasks import make_task
from shoal.simulate.training import Trainer, first_line, serve
from shoal.simulate.world import World

Executor = Literal["exact", "stacked"]


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of the pool is given."""

    job: Job
    world: World
    executor: Executor = "exact"

    def plain(self) -> dict[str, Any]:
        """Gives the settings as plain values, which `run_task` takes."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values


def run_task(errand: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """For `bench.workers.run_tasks`: a plain Errand, and a plain CourseRecord of it."""
    given = msgspec.convert(errand, Errand, str_keys=True)
    if given.world.is_elastic:  # what a real run says of each change is here said of virtual ones
        logging.getLogger("shoal.strategies.elastic").setLevel(logging.ERROR)
    return run_job(given.job, given.world, given.executor).plain()


def run_job(job: Job, world: World, executor: Executor = "exact") -> CourseRecord:
    """Equal to the bit for equal arguments; a strategy that diverges or cannot start is a record too.

    UsageError where job, world and executor don't fit each other.
    """
    theirs, ours = (job.num_workers, job.num_joining), (world.num_workers, world.num_joining)
    if theirs != ours:
        raise UsageError(
            f"A job of {theirs[0]} workers, and {theirs[1]} that join, does not fit a world of {ours[0]} "
            f"and {ours[1]}.",
            next_step="give both as many.",
        )
    task = make_task(job)
    if executor == "exact":
        ran = run_workers(task, world)
        return course_of(task, ran.logs, ran.served, ran.broken)
    refuse_unfit(job, world)
    try:
        logs = run_stacked(job, world)
    except UsageError as error:
        return CourseRecord(job=job, moments=[], error=first_line(error))
    return course_of(task, logs)


class Ran(msgspec.Struct, frozen=True):
    """What the members of a world tell."""

    logs: list[WorkerLog]
    """By rank."""
    served: dict[int, int] = {}
    """The staleness that the first server has counted of all workers' pushes."""
    broken: str = ""
    """Why nobody could go on."""


def run_workers(task: Task, world: World) -> Ran:
    """A job whose workers have a thread each; one in which all wait for each other is a result too."""
    trainers = {rank: Trainer(task, rank) for rank in range(world.num_workers)}
    start = _Start(world.num_workers)

    def live(worker: Worker) -> dict[int, int]:
        if worker.group.role == "server":
            return serve(task, worker.group)
        if worker.is_joining:
            trainers[worker.rank] = Trainer(task, worker.rank)
            trainers[worker.rank].train(worker.group, worker.clock, worker.charged)
            return {}
        start.await_with(worker)
        trainers[worker.rank].train(worker.group, worker.clock, worker.charged, start.begin)
        return {}

    broken, outcomes = "", []
    try:
        outcomes = run_exact(world, live)
    except ShoalError as error:
        broken = first_line(error)
    logs = [trainers[rank].log for rank in sorted(trainers)]
    if broken:
        return Ran(logs, broken=broken)
    for outcome in outcomes:
        if outcome.role == "worker" and outcome.error is not None:
            trainers[outcome.rank].log.ended = first_line(outcome.error)
    counted = [outcome.value for outcome in outcomes if outcome.role == "server" and outcome.value]
    return Ran(logs, counted[0] if counted else {})


class _Start:
    """Faults count from when the last worker begins its first step, as the seconds of a course do."""

    def __init__(self, num_workers: int) -> None:
        self._num_awaited = num_workers
        self._scripts: list[Faulty | ElasticWorld] = []

    def await_with(self, worker: Worker) -> None:
        """One worker gets ready: until all begin nothing happens to it."""
        self._scripts += worker.scripts
        if worker.elastic is not None and worker.elastic not in self._scripts:
            self._scripts.append(worker.elastic)
        for script in self._scripts:
            script.hold()

    def begin(self) -> None:
        """Takes note that one worker begins to train."""
        self._num_awaited -= 1
        if self._num_awaited == 0:
            for script in self._scripts:
                script.restart()
