"""The stacked executor: all workers in one tensor, for strategies that mix linearly and in lockstep.

What a strategy asks of its group before the first step is found by a rehearsal with one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.core import UsageError
from shoal.group import Handle
from shoal.group.base import Done, GroupStats
from shoal.group.solo import SoloGroup
from shoal.simulate.exact import beginner
from shoal.simulate.job import ModelSnapshot, TrainingJob, WorkerLog
from shoal.simulate.stacked.model import EXACT, StackedModel, all_edges, edges_from
from shoal.simulate.stacked.replay import Tape, times_of
from shoal.simulate.stacked.rules import (
    AllReduceRule,
    DiffusionRule,
    ExtraRule,
    HierarchicalRule,
    LocalSGDRule,
    MomentumRule,
    NeighborRule,
    Rule,
    RuleContext,
    SmaRule,
    StackedSGD,
    TrackingRule,
)
from shoal.simulate.tasks import TrainingTask, make_task
from shoal.simulate.world import World
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.options import read_options
from shoal.strategies.registry import canonical, find

_MOST_STARTED = 127
"""What workers say of themselves at the start is equally long up to this rank. In a larger world, which the
exact executor is not for, a start of all with all would cost more than the training: they begin at once."""


@dataclass(frozen=True, slots=True)
class _Call:
    size_bytes: int
    root: int | None = None
    """Who sends to all; None where everybody does."""


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


def rehearse(task: TrainingTask, world: World, tape: Tape) -> Strategy:
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


RULES: dict[str, type[Rule]] = {
    "all-reduce": AllReduceRule,
    "neighbor": NeighborRule,
    "hierarchical": HierarchicalRule,
    "sma": SmaRule,
    "local-sgd": LocalSGDRule,
    "gradient-tracking": TrackingRule,
    "exact-diffusion": DiffusionRule,
    "extra": ExtraRule,
    "d2": DiffusionRule,
    "momentum": MomentumRule,
}
"""The rules by the strategy's own name."""


def run_stacked(job: TrainingJob, world: World) -> list[WorkerLog]:
    """What each worker tells, by rank; UsageError for what only the exact executor can do."""
    return StackedRun(job, world).run()


class StackedRun:
    """One job; `model.values` may be changed before it runs, so that workers begin with unequal models."""

    def __init__(self, job: TrainingJob, world: World) -> None:
        refuse_unfit(job, world)
        task = make_task(job)
        self.model = StackedModel(task, world.num_workers)
        self._job = job
        self._world = world
        self._tape = Tape(world.num_workers)
        strategy = rehearse(task, world, self._tape)
        self._options = strategy.options
        self._optimizer = StackedSGD(job.learning_rate, job.momentum)
        rule = Rule if world.num_workers == 1 else RULES[canonical(job.strategy)]
        self._rule = rule(RuleContext(self.model, self._optimizer, strategy, world, self._tape))
        self._batches = [task.batches(rank) for rank in range(world.num_workers)]

    def run(self) -> list[WorkerLog]:
        """Runs all steps, once, and returns what each worker tells, by rank."""
        job, has_local_steps = self._job, self._options.local_steps > 1
        at_round = self.model.values.clone()
        kept = {0: (at_round, at_round)}
        self._tape.mark()
        for step in range(1, job.steps + 1):
            self._step(step)
            is_due = step % job.eval_every == 0 or step == job.steps
            if self._rule.is_round and (is_due or has_local_steps):
                at_round = self.model.values.clone()
            if is_due:
                kept[step] = at_round if self._rule.is_round else self.model.values.clone(), at_round
                self._tape.mark()
        return self._logs(kept)

    def _step(self, step: int) -> None:
        rule, options = self._rule, self._options
        rule.is_round = step % options.local_steps == 0
        self._tape.forward()
        rule.after_forward()
        gradients = self.model.gradients([next(batches) for batches in self._batches])
        gradients = rule.before_step(rule.after_backward(gradients))
        self._optimizer.step(self.model, gradients, options.rate_factor(step - 1))
        rule.after_step()
        if rule.is_round:
            rule.rounds += 1
            every = options.global_average_every
            if every and rule.rounds % every == 0:
                rule.average_all()

    def _logs(self, kept: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> list[WorkerLog]:
        """Makes the logs from all models by step: as they were then, and when the last round had ended."""
        times = times_of(self._tape, self._world, self._world.addresses())
        logs = []
        for rank in range(self._world.num_workers):
            snapshots = [
                ModelSnapshot(
                    step=step,
                    at_s=float(times.marks_s[mark, rank]),
                    sent_bytes=int(self._tape.marked_bytes[mark][rank]),
                    received_bytes=0,
                    tensors=self.model.tensors(values[rank]),
                    at_round=[] if values is at_round else self.model.tensors(at_round[rank]),
                )
                for mark, (step, (values, at_round)) in enumerate(kept.items())
            ]
            logs.append(WorkerLog(rank=rank, snapshots=snapshots, waited_s=times.waited_s[rank].tolist()))
        return logs


def refuse_unfit(job: TrainingJob, world: World) -> None:
    """UsageError for what only the exact executor can do."""
    strategy = canonical(job.strategy)
    if strategy not in RULES:
        raise UsageError(
            f"The stacked executor has no {strategy}.",
            cause=f"it knows strategies that mix linearly and in lockstep: {', '.join(RULES)}.",
            next_step=EXACT,
        )
    if world.is_elastic:
        raise UsageError("The stacked executor knows no workers that come and go.", next_step=EXACT)
    if world.faults is not None or world.num_servers:
        what = "faults" if world.faults is not None else "servers"
        raise UsageError(f"The stacked executor knows no {what}.", next_step=EXACT)
    info, implied = find(job.strategy)
    options = read_options(info.options, {**implied, **job.options}, strategy)
    for name, plain in (("codec", "none"), ("monitor", False)):
        if getattr(options, name, plain) != plain:
            raise UsageError(f"The stacked executor has no {name}.", next_step=EXACT)
