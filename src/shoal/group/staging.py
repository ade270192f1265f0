"""Tensors that are not the group's own: they pass through two halves of shared memory, piece by piece.

While one piece is worked on, the next is copied into the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.core import Deadline
from shoal.group.arena import Segment
from shoal.group.base import Handle, Reduction, T
from shoal.group.control import code_of
from shoal.group.engine import Engine, Span, Task
from shoal.group.kernels import reduce_into, share

STAGE_BYTES = 1 << 22
"""One half of the staging memory: a step's overhead does not count any more, and caches still hold it."""
Step = Callable[[Task, torch.Tensor, dict[int, torch.Tensor]], None]
"""Work on one piece: the own part, and the staged parts of those who take part, by rank."""


class Staging:
    """Operations on memory that others cannot see."""

    def __init__(self, rank: int, stage: Segment, engine: Engine) -> None:
        self._rank = rank
        self._stage = stage
        self._engine = engine

    def run(
        self,
        tensor: torch.Tensor,
        words: list[int],
        step: Step,
        address: Callable[[Task], None] | None = None,
        *,
        should_give: bool = True,
    ) -> Handle[torch.Tensor]:
        """Copy in, if there is something to give, and do a step; `address` completes the tasks."""
        flat = _flat(tensor)
        tasks = []
        for start, part in _pieces(flat):
            task = self._task(part, [*words, -1 - start], step)
            if should_give:
                task.prepare = self._copy_in(part)
            if address is not None:
                address(task)
            tasks.append(self._engine.issue(task))
        return TasksHandle(self._engine, tasks, lambda: put_back(flat, tensor))

    def reduce_in_shares(self, tensor: torch.Tensor, words: list[int], op: Reduction) -> Handle[torch.Tensor]:
        """Each worker reduces its share in the staging memory, then all copy all shares out.

        From three workers on this moves fewer bytes than if each reduced everything for itself.
        """
        flat = _flat(tensor)
        tasks = []
        for start, part in _pieces(flat):
            first = self._task(part, [*words, -1 - start], self._reduce_own_share(op))
            first.prepare = self._copy_in(part)
            first.needs_shares = True
            first.num_holding = 1
            first.half = (self._engine.issued + 1 >> 1) & 1
            self._engine.issue(first)
            second = Task([*words, -1 - start], self._copy_out(part, first), span_of(part))
            second.follows = first
            second.after = first.seq
            tasks += [first, self._engine.issue(second)]
        return TasksHandle(self._engine, tasks, lambda: put_back(flat, tensor))

    def gather_step(self, kind: int, flats: dict[int, torch.Tensor], part: slice) -> Task:
        """One piece of everybody's tensor, of whatever length."""
        own = flats[self._rank][part]

        def take(task: Task, own: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
            for rank in stages:
                if rank != self._rank:
                    theirs = flats[rank][part]
                    place = task.half * STAGE_BYTES
                    theirs.copy_(self._stage.region(rank, place, theirs.numel(), theirs.dtype))

        task = self._task(own, [kind, code_of(own.dtype), -1 - part.start, 0], take)
        task.prepare = self._copy_in(own)
        return task

    def _task(self, part: torch.Tensor, words: list[int], step: Step) -> Task:
        def work(task: Task, present: list[int]) -> None:
            step(task, part, regions(self._stage, task.half * STAGE_BYTES, part, present))

        task = Task(words, work, span_of(part))
        task.is_staged = True
        return task

    def _copy_in(self, part: torch.Tensor) -> Callable[[Task], None]:
        def prepare(task: Task) -> None:
            self._stage.region(self._rank, task.half * STAGE_BYTES, part.numel(), part.dtype).copy_(part)

        return prepare

    def _reduce_own_share(self, op: Reduction) -> Step:
        def step(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
            ranks = list(stages)
            low, high = share(ranks.index(self._rank), len(ranks), part.numel(), part.element_size())
            own = stages[self._rank][low:high]
            # what it is reduced into comes first, since it is overwritten
            reduce_into(own, [own, *(stages[rank][low:high] for rank in ranks if rank != self._rank)], op)

        return step

    def _copy_out(self, part: torch.Tensor, first: Task) -> Callable[[Task, list[int]], None]:
        def work(task: Task, present: list[int]) -> None:
            ranks = first.present or []
            stages = regions(self._stage, first.half * STAGE_BYTES, part, ranks)
            for index, rank in enumerate(ranks):
                low, high = share(index, len(ranks), part.numel(), part.element_size())
                part[low:high].copy_(stages[rank][low:high])

        return work


class TasksHandle(Handle[T]):
    """An operation of one or several tasks, which end in order."""

    def __init__(self, engine: Engine, tasks: Sequence[Task], result: Callable[[], T]) -> None:
        self._engine = engine
        self._tasks = tasks
        self._result = result

    def wait(self, deadline: Deadline | None = None) -> T:
        """The result, or the error of the first task that has one."""
        for task in self._tasks:
            self._engine.wait(task, deadline)
        return self._result()

    @property
    def present(self) -> Sequence[int]:
        """Who took part in the first of them, once it is over."""
        return (self._tasks[0].present if self._tasks else None) or ()

    def is_done(self) -> bool:
        """Whether all tasks are complete."""
        self._engine.progress()
        return all(self._engine.is_complete(task) for task in self._tasks)


def span_of(tensor: torch.Tensor) -> Span:
    """The memory of a tensor without gaps."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def regions(
    segment: Segment, offset_bytes: int, like: torch.Tensor, ranks: Sequence[int]
) -> dict[int, torch.Tensor]:
    """The same place in the regions of several ranks."""
    return {rank: segment.region(rank, offset_bytes, like.numel(), like.dtype) for rank in ranks}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension, in memory of the CPU: the tensor's own where it can be."""
    return tensor.detach().reshape(-1).cpu()


def _pieces(flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Parts that fit one half; one without elements where there are none, so that all count alike."""
    step = STAGE_BYTES // flat.element_size()
    return [(start, flat[start : start + step]) for start in range(0, max(flat.numel(), 1), step)]


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with what was reckoned in a flat copy of it, where it was one."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor
