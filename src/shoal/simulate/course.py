"""From what each worker tells to how they all went: the mean of their models, and the worst, over time.

Workers keep their own pace, so a moment is when they have done so many steps on average; each is then taken
with the model that it had last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.simulate.job import ModelSnapshot, WorkerLog
from shoal.simulate.record import DIVERGED, CourseRecord, Moment
from shoal.simulate.task import Score, Task
from shoal.simulate.training import load_tensors


def course_of(
    task: Task, logs: Sequence[WorkerLog], served: Mapping[int, int] | None = None, broken: str = ""
) -> CourseRecord:
    """How the workers of a job went.

    `served` is the staleness that a server has counted, `broken` why all of them came to a standstill.
    """
    examiner = _Examiner(task)
    moments: list[Moment] = []
    error = broken or _why_none(logs)
    for state in states_of(logs, task.job.eval_every):
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
class State:
    """All workers at one time."""

    at_s: float
    mean_step: float
    moved_bytes: int
    latest: dict[int, ModelSnapshot]
    """By rank, of those that have not ended before."""


def states_of(logs: Sequence[WorkerLog], eval_every: int) -> Iterator[State]:
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
    num_due = 0
    for index, (at_s, rank, snapshot) in enumerate(events):
        last[rank] = snapshot
        latest = {rank: last[rank] for rank in sorted(last) if at_s <= ends_s[rank]} or dict(last)
        mean_step = sum(each.step for each in latest.values()) / len(latest)
        is_last = index == len(events) - 1
        if any(log.rank not in last for log in first) or (mean_step < num_due * eval_every and not is_last):
            continue
        num_due = math.floor(mean_step / eval_every) + 1
        moved_bytes = sum(each.sent_bytes + each.received_bytes for each in last.values())
        yield State(at_s, mean_step, moved_bytes, latest)


class _Examiner:
    """Scores of models; a snapshot that is looked at again is not evaluated again."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._probe = task.model()
        self._num_parameters = sum(1 for _ in self._probe.parameters())
        self._values: dict[int, float] = {}

    def judge(self, state: State) -> Moment | None:
        """None where a model is not finite."""
        models = [snapshot.tensors for snapshot in state.latest.values()]
        stacks = [torch.stack(tensors) for tensors in zip(*models, strict=True)]
        means = [_mean(stack) for stack in stacks]
        squared = sum(
            float((stack.double() - stack.double().mean(0)).square().sum()) / len(models)
            for stack in stacks[: self._num_parameters]
        )
        score = self._score(means)
        if not all(map(math.isfinite, (squared, score.value, score.loss))):
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
            consensus_distance=math.sqrt(squared),
        )

    def _value(self, snapshot: ModelSnapshot) -> float:
        known = self._values.get(id(snapshot))
        if known is None:
            known = self._values[id(snapshot)] = self._score(snapshot.tensors).value
        return known

    def _score(self, tensors: list[torch.Tensor]) -> Score:
        load_tensors(self._probe, tensors)
        return self._task.evaluate(self._probe)


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
