"""What a worker is to do in a contest, and what it tells of it; the same in virtual time and in real."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from shoal.core import UsageError
from shoal.data.splits import IID, check_split


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One strategy on one task with one seed; every worker does `steps` steps of its own."""

    task: str
    """A name of `tasks.TASKS`."""
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
