"""Jobs of a contest with real processes on this machine, one after another.

What a worker does is `contest_worker`'s.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from safetensors.torch import load_file

from shoal.bench.contest_worker import RealErrand, Told
from shoal.bench.workers import Crew, CrewSettings, Helper, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.simulate.course import course_of
from shoal.simulate.job import Job, WorkerLog
from shoal.simulate.record import CourseRecord
from shoal.simulate.tasks import make_task
from shoal.simulate.world import World

_ANSWER_S = 1800.0
_SERVED_S, _LOOK_S = 10.0, 0.01
"""How long a server may take to say goodbye after its workers, and how often one looks."""


class RealContest:
    """Processes that do one job after another; a context manager. Started by the first job."""

    def __init__(self, num_workers: int) -> None:
        settings = CrewSettings("shoal.bench.contest_worker:work", num_workers, answer_s=_ANSWER_S)
        self._num_workers = num_workers
        self._stack = contextlib.ExitStack()
        self._crew = self._stack.enter_context(Crew(settings))
        self._num_jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(self, job: Job, world: World) -> CourseRecord:
        """As `simulate.contest.run_job`, in real seconds; a job whose workers fail is a record with an error.

        UsageError for what real workers cannot be given.
        """
        self._check(job, world)
        self._num_jobs += 1
        errand = RealErrand(number=self._num_jobs, job=job, world=world)
        try:
            told = [msgspec.convert(each, Told, str_keys=True) for each in self._order(errand)]
        except BenchmarkError as error:
            return CourseRecord(job=job, moments=[], error=one_line(error))
        folder = str(Path(told[0].file).parent)
        served = _served(errand.file_of_server(folder, 0)) if world.num_servers else {}
        return course_of(make_task(job), [_log(each) for each in told], served)

    def _order(self, errand: RealErrand) -> list[dict[str, Any]]:
        plain = errand.plain()
        if not self._crew.is_running:
            self._crew.ask("ready", errand=plain)
        for server in range(errand.world.num_servers):
            role = {"errand": plain, "server": server}
            self._crew.hire(Helper("shoal.bench.contest_worker:serve_job", f"server {server}", role))
        return self._crew.ask("train", errand=plain)

    def _check(self, job: Job, world: World) -> None:
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


def _log(told: Told) -> WorkerLog:
    file = Path(told.file)
    tensors = load_file(file)
    file.unlink()
    for index, snapshot in enumerate(told.log.snapshots):
        count = sum(1 for name in tensors if name.startswith(f"{index}."))
        snapshot.tensors = [tensors[f"{index}.{number}"] for number in range(count)]
    return told.log
