"""One job of a contest: what a worker is to do, what it tells of it, and the record of how it went.

A record is plain numbers, which go from a process of the pool to the report.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
import torch

from shoal.core import UsageError
from shoal.data.splits import IID, check_split
from shoal.simulate.task_facts import facts_of


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One strategy on one task with one seed; every worker does `steps` steps of its own."""

    task: str
    """The name of the task, one of `tasks.TASKS`, or `file.py:function` of the user's own."""
    strategy: str
    options: dict[str, Any] = {}
    num_workers: int
    num_joining: int = 0
    """Workers that come later, with data of their own; whoever goes takes its own along."""
    steps: int
    eval_every: int
    """Steps of a worker from one snapshot to the next; the first is before the first step."""
    batch_size: int = 16
    learning_rate: float = 0.1
    momentum: float = 0.9
    split: str = IID
    data_dir: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_workers, self.steps, self.eval_every, self.batch_size) < 1:
            raise UsageError(
                "Without workers, steps or examples nothing is trained.", next_step="give 1 or more."
            )
        check_split(self.split)

    @property
    def num_parts(self) -> int:
        """Among how many workers the data is divided: all that are there at any time."""
        return self.num_workers + self.num_joining


class ModelSnapshot(msgspec.Struct, kw_only=True):
    """One worker's model after so many of its steps."""

    step: int
    at_s: float
    """Since all began, by the worker's clock."""
    sent_bytes: int
    received_bytes: int
    """What this worker has sent, and received of what only it asked for, until then (see `Metered`)."""
    tensors: list[torch.Tensor]
    """Parameters, then buffers, in the model's order; copies."""
    at_round: list[torch.Tensor] = []
    """Parameters at the end of the last round before; empty where a round has just ended, or none has."""


class WorkerLog(msgspec.Struct, kw_only=True):
    """All that one worker tells."""

    rank: int
    snapshots: list[ModelSnapshot]
    waited_s: list[float]
    """By rank; the last to arrive each time."""
    staleness: dict[int, int] = {}
    """Rounds by how far behind the model was that was mixed; of asynchronous strategies."""
    ended: str = ""
    """Why it did not do all its steps; empty when it did."""
    is_joining: bool = False
    """Whether it came when the others trained already."""
    ended_at_s: float | None = None
    """When that was, by its clock; its model counts no longer."""

    def is_done(self, steps: int) -> bool:
        """Whether it did all of them, whatever came after."""
        return bool(self.snapshots) and self.snapshots[-1].step == steps


DIVERGED = "it diverged"
"""How the error of a run begins whose models were no longer finite."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """All workers' models, at one time."""

    step: float
    """How many steps workers have done, on average."""
    at_s: float
    """Since the first step began; virtual, or real where the workers were."""
    moved_bytes: int
    """From one member to another until then, each counted once."""
    value: float
    """The score of the mean of all models."""
    worst: float
    """The score of the worst worker's own."""
    loss: float
    """Of the mean of all models."""
    consensus_distance: float
    """Root mean square, over workers, of the distance of a worker's parameters from the mean of all, as they
    were when the last round had ended."""


class CourseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a job went, from the first model to the last; all numbers are finite."""

    job: TrainingJob
    moments: list[Moment]
    """In order of time, the first before the first step; up to where a model was no longer finite."""
    waited_s: list[list[float]] = []
    """By rank, and by the rank that it waited for."""
    staleness: dict[int, int] = {}
    """Of all workers: rounds by exactly how far behind the model was; empty for synchronous strategies."""
    ended: dict[int, str] = {}
    """Why ranks did not do all their steps."""
    num_joined: int = 0
    """How many workers came later."""
    error: str = ""
    """What was wrong with the whole of it (it diverged, it could not start); else empty."""

    def reached(self, target: float) -> Moment | None:
        """The first moment at which the mean model was as good as that."""
        facts = facts_of(self.job.task)
        return next((moment for moment in self.moments if facts.is_reached(moment.value, target)), None)

    @property
    def best(self) -> Moment | None:
        """The moment at which the mean model was best; None without moments."""
        facts = facts_of(self.job.task)
        sign = 1.0 if facts.direction == "higher" else -1.0
        return max(self.moments, key=lambda moment: sign * moment.value, default=None)

    @property
    def has_ended_early(self) -> bool:
        """Whether nobody did all its steps: what was at the end is then no result."""
        return len(self.ended) == self.job.num_workers + self.num_joined

    @property
    def has_diverged(self) -> bool:
        """Whether its models were no longer finite."""
        return self.error.startswith(DIVERGED)

    @property
    def mean_staleness(self) -> float | None:
        """The mean over all rounds, where one that is ahead counts as 0; None where nothing is counted."""
        total = sum(self.staleness.values())
        if not total:
            return None
        return sum(max(behind, 0) * count for behind, count in self.staleness.items()) / total

    def plain(self) -> dict[str, Any]:
        """Gives the record as plain values, for JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """What `plain` gave, also after JSON."""
        return msgspec.convert(values, cls, str_keys=True)
