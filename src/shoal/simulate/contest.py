"""One job in a simulated world, from the first step to its record; what is compared is left to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from shoal.core import UsageError
from shoal.simulate.course import course_of
from shoal.simulate.exact import Worker, run_exact
from shoal.simulate.job import Job, WorkerLog
from shoal.simulate.record import CourseRecord
from shoal.simulate.stacked import run_stacked
from shoal.simulate.task import Task
from shoal.simulate.tasks import make_task
from shoal.simulate.training import Trainer, serve
from shoal.simulate.world import World

Executor = Literal["exact", "stacked"]


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of the pool is given."""

    job: Job
    world: World
    executor: Executor = "exact"

    def plain(self) -> dict[str, Any]:
        """For `run_task`."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values


def run_task(errand: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """For `bench.pool`: a plain Errand, and a plain CourseRecord of it."""
    given = msgspec.convert(errand, Errand, str_keys=True)
    return run_job(given.job, given.world, given.executor).plain()


def run_job(job: Job, world: World, executor: Executor = "exact") -> CourseRecord:
    """Equal to the bit for equal arguments; a strategy that diverges or cannot start is a record too.

    UsageError where job, world and executor don't fit each other.
    """
    if job.num_workers != world.num_workers:
        raise UsageError(
            f"A job of {job.num_workers} workers does not fit a world of {world.num_workers}.",
            next_step="give both as many.",
        )
    task = make_task(job)
    return course_of(task, run_stacked(job, world) if executor == "stacked" else run_workers(task, world))


def run_workers(task: Task, world: World) -> list[WorkerLog]:
    """What workers tell, each of which has a thread of its own."""
    trainers = [Trainer(task, rank) for rank in range(world.num_workers)]

    def work(worker: Worker) -> None:
        trainers[worker.rank].train(worker.group, worker.clock, worker.charged)

    for outcome in run_exact(world, work, lambda worker: serve(task, worker.group)):
        if outcome.role == "worker" and outcome.error is not None:
            trainers[outcome.rank].log.ended = str(outcome.error).splitlines()[0]
    return [trainer.log for trainer in trainers]
