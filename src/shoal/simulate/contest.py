"""One job in a simulated world, from the first step to its record; what is compared is left to others.

The course of a job is the mean of the workers' models, and the worst of them, over time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from shoal.core import ShoalError, UsageError
from shoal.group.wrappers import Faulty
from shoal.simulate.elastic import ElasticWorld
from shoal.simulate.exact import SimulatedWorker, Trainer, first_line, load_tensors, run_exact, serve
from shoal.simulate.job import DIVERGED, CourseRecord, ModelSnapshot, Moment, TrainingJob, WorkerLog
from shoal.simulate.stacked.executor import refuse_unfit, run_stacked
from shoal.simulate.swarm import run_swarm
from shoal.simulate.tasks import Score, TrainingTask, make_task
from shoal.simulate.world import World
from shoal.strategies.registry import find


def course_of(
    task: TrainingTask, logs: Sequence[WorkerLog], served: Mapping[int, int] | None = None, broken: str = ""
) -> CourseRecord:
    """How the workers of a job went.

    `served` is the staleness that a server has counted, `broken` why all of them came to a standstill.
    """
    examiner = _Examiner(task)
    moments: list[Moment] = []
    error = broken or _why_none(logs)
    info, _ = find(task.job.strategy)
    for state in states_of(logs, task.job.eval_every, is_asynchronous=info.is_asynchronous):
        moment = examiner.judge(state)
        if moment is None:
            error = f"{DIVERGED}: after {state.mean_step:.0f} steps the models were no longer finite."
            break
        moments.append(moment)
    return CourseRecord(
        job=task.job,
        moments=moments,
        waited_s=[log.waited_s for log in logs],
        staleness=_added([*(log.staleness for log in logs), served or {}]),
        ended={log.rank: log.ended for log in logs if log.ended and not log.is_done(task.job.steps)},
        num_joined=sum(log.is_joining for log in logs),
        error=error,
    )


@dataclass(frozen=True, slots=True)
class ContestState:
    """All workers at one time."""

    at_s: float
    mean_step: float
    moved_bytes: int
    latest: dict[int, ModelSnapshot]
    """By rank, of those that have not ended before."""
    comparable: dict[int, ModelSnapshot]
    """The same, or of workers that wait for each other the snapshots after equally many steps: one that is
    ahead may have ended a round which is still to come for the others."""


def states_of(
    logs: Sequence[WorkerLog], eval_every: int, *, is_asynchronous: bool = False
) -> Iterator[ContestState]:
    """Whenever workers have done `eval_every` more steps on average, from the first model to the last."""
    begun = [log for log in logs if log.snapshots]
    first = [log for log in begun if not log.is_joining]
    if not first:
        return
    origin_s = max(log.snapshots[0].at_s for log in first)
    events = sorted(
        (
            (max(0.0, snapshot.at_s - origin_s), log.rank, snapshot)
            for log in begun
            for snapshot in log.snapshots
        ),
        key=lambda event: (event[0], event[1], event[2].step),
    )
    ends_s = {log.rank: math.inf if log.ended_at_s is None else log.ended_at_s - origin_s for log in begun}
    last: dict[int, ModelSnapshot] = {}
    past: dict[int, list[ModelSnapshot]] = {}
    num_due = 0
    for index, (at_s, rank, snapshot) in enumerate(events):
        last[rank] = snapshot
        past.setdefault(rank, []).append(snapshot)
        latest = {rank: last[rank] for rank in sorted(last) if at_s <= ends_s[rank]} or dict(last)
        mean_step = sum(each.step for each in latest.values()) / len(latest)
        is_last = index == len(events) - 1
        if any(log.rank not in last for log in first) or (mean_step < num_due * eval_every and not is_last):
            continue
        num_due = math.floor(mean_step / eval_every) + 1
        moved_bytes = sum(each.sent_bytes + each.received_bytes for each in last.values())
        comparable = latest if is_asynchronous else _of_the_slowest_step(latest, past)
        yield ContestState(at_s, mean_step, moved_bytes, latest, comparable)


def _of_the_slowest_step(
    latest: Mapping[int, ModelSnapshot], past: Mapping[int, Sequence[ModelSnapshot]]
) -> dict[int, ModelSnapshot]:
    """By rank: where each was after as many steps as the slowest one has done; not who has joined since."""
    step = min(snapshot.step for snapshot in latest.values())
    before = {rank: [each for each in past[rank] if each.step <= step] for rank in latest}
    return {rank: snapshots[-1] for rank, snapshots in before.items() if snapshots}


class _Examiner:
    """Scores of models; a snapshot that is looked at again is not evaluated again."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._probe = task.model()
        self._num_parameters = sum(1 for _ in self._probe.parameters())
        self._values: dict[int, float] = {}

    def judge(self, state: ContestState) -> Moment | None:
        """None where a model is not finite."""
        models = [snapshot.tensors for snapshot in state.latest.values()]
        stacks = [torch.stack(tensors) for tensors in zip(*models, strict=True)]
        means = [_mean(stack) for stack in stacks]
        squared = _spread(stacks[: self._num_parameters])
        at_rounds = [
            snapshot.at_round or snapshot.tensors[: self._num_parameters]
            for snapshot in state.comparable.values()
        ]
        distance = math.sqrt(_spread([torch.stack(tensors) for tensors in zip(*at_rounds, strict=True)]))
        score = self._score(means)
        if not all(map(math.isfinite, (squared, distance, score.value, score.loss))):
            return None
        worst = score.value
        if squared > 0:
            worst = self._task.facts.worst([self._value(each) for each in state.latest.values()])
        return Moment(
            step=state.mean_step,
            at_s=state.at_s,
            moved_bytes=state.moved_bytes,
            value=score.value,
            worst=worst,
            loss=score.loss,
            consensus_distance=distance,
        )

    def _value(self, snapshot: ModelSnapshot) -> float:
        known = self._values.get(id(snapshot))
        if known is None:
            known = self._values[id(snapshot)] = self._score(snapshot.tensors).value
        return known

    def _score(self, tensors: list[torch.Tensor]) -> Score:
        load_tensors(self._probe, tensors)
        return self._task.evaluate(self._probe)


def _spread(stacks: Sequence[torch.Tensor]) -> float:
    """The mean over workers, the first dimension, of their squared distances from the mean."""
    return sum(
        float((stack.double() - stack.double().mean(0)).square().sum()) / len(stack) for stack in stacks
    )


def _mean(stack: torch.Tensor) -> torch.Tensor:
    """Of workers' tensors; whole numbers are the first worker's."""
    if not stack.is_floating_point():
        return stack[0]
    return stack.double().mean(0).to(stack.dtype)


def _why_none(logs: Sequence[WorkerLog]) -> str:
    """Why there is no model at all; empty when there is one."""
    if any(log.snapshots for log in logs):
        return ""
    return next((log.ended for log in logs if log.ended), "no worker has begun.")


def _added(counts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for each in counts:
        for behind, count in each.items():
            total[behind] = total.get(behind, 0) + count
    return dict(sorted(total.items()))


Executor = Literal["exact", "stacked"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One training of a contest: a job in a world, as a process of the pool is given it."""

    job: TrainingJob
    world: World
    executor: Executor = "exact"

    def plain(self) -> dict[str, Any]:
        """Gives the settings as plain values, which `run_task` takes."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values


def run_task(trial: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run a task of `bench.workers.run_tasks`: a plain Trial, and a plain CourseRecord of it."""
    given = msgspec.convert(trial, Trial, str_keys=True)
    if given.world.is_elastic:  # what a real run says of each change is here said of virtual ones
        logging.getLogger("shoal.strategies.elastic").setLevel(logging.ERROR)
    return run_job(given.job, given.world, given.executor).plain()


def run_job(job: TrainingJob, world: World, executor: Executor = "exact") -> CourseRecord:
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
    """What each worker tells, by rank."""
    served: dict[int, int] = {}
    """The staleness that the first server has counted of all workers' pushes."""
    broken: str = ""
    """Why nobody could go on, where that was so."""


def run_workers(task: TrainingTask, world: World) -> Ran:
    """A job whose workers have a thread each; one in which all wait for each other is a result too."""
    trainers = {rank: Trainer(task, rank) for rank in range(world.num_workers)}
    start = _Start(world.num_workers)

    def live(worker: SimulatedWorker) -> dict[int, int]:
        if worker.group.role == "server":
            return serve(task, worker.group)
        if worker.is_joining:
            trainers[worker.rank] = Trainer(task, worker.rank)
            trainers[worker.rank].train(worker.group, worker.clock, worker.charged, peer=worker.peer)
            return {}
        if worker.peer is not None:
            trainers[worker.rank].train(
                worker.group, worker.clock, worker.charged, worker.peer.begin, worker.peer
            )
            return {}
        start.await_with(worker)
        trainers[worker.rank].train(worker.group, worker.clock, worker.charged, start.begin)
        return {}

    broken, outcomes = "", []
    try:
        is_swarm = find(task.job.strategy)[0].is_swarm
        outcomes = run_swarm(world, live) if is_swarm else run_exact(world, live)
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

    def await_with(self, worker: SimulatedWorker) -> None:
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
