"""How workers begin: what a strategy asks of its group before the first step, as one of them sees it.

The strategy itself is asked, in a group of one that says it were many: so it also refuses what does not fit,
and its options and topology are what `stacked_rules` go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.group import Handle
from shoal.group.base import Done, GroupStats
from shoal.group.solo import SoloGroup
from shoal.simulate.stacked_mixing import all_edges, edges_from
from shoal.simulate.stacked_tape import Tape
from shoal.simulate.task import Task
from shoal.simulate.training import beginner
from shoal.simulate.world import World
from shoal.strategies import Strategy, make_strategy

_MOST_STARTED = 127
"""What workers say of themselves at the start is equally long up to this rank. In a larger world, which the
exact executor is not for, a start of all with all would cost more than the training: they begin at once."""


@dataclass(frozen=True, slots=True)
class _Call:
    size_bytes: int
    root: int | None = None
    """None: from everybody to everybody."""


class _Rehearsal(SoloGroup):
    """Rank 0 among others that all do and say the same."""

    def __init__(self, world: World) -> None:
        super().__init__(world.patience)
        self.size = world.num_workers
        self.num_machines = world.num_machines
        self.machines = [world.machine_of(rank) for rank in range(world.num_workers)]
        self.calls: list[_Call] = []

    @property
    def members(self) -> Sequence[int]:
        return range(self.size)

    @property
    def stats(self) -> GroupStats:
        return GroupStats(sent_bytes=0, received_bytes=0, waited_s=(0.0,) * self.size)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        self.calls.append(_Call(tensor.nbytes, root))
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        self.calls.append(_Call(tensor.nbytes))
        return Done([tensor] * self.size)


def rehearse(task: Task, world: World, tape: Tape) -> Strategy:
    """The strategy, detached after its start, which goes on the tape; UsageError where it does not fit."""
    group = _Rehearsal(world)
    strategy = make_strategy(group, task.job.strategy, **task.job.options)
    with strategy.attach(*beginner(task), stays=True):
        pass
    if world.num_workers <= _MOST_STARTED + 1:
        everybody = all_edges(world.num_workers)
        for call in [*group.calls, _Call(0)]:  # the last is the barrier before the first step
            is_for_all = call.root is None
            edges = everybody if call.root is None else edges_from(call.root, world.num_workers)
            tape.wait(tape.exchange(edges, call.size_bytes, is_for_all=is_for_all))
    return strategy
