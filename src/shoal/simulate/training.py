"""One worker's training in a contest, whatever group it is in: virtual or real, the same steps.

Nobody waits for anybody so that models can be compared: a worker keeps copies of its own model as it goes,
and `course` puts them together afterwards. What a step costs is left to whoever `charged` the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD

from shoal.core import ShoalError
from shoal.core.clock import Clock
from shoal.group import Group
from shoal.group.elastic import elastic_of
from shoal.group.observed import Metered
from shoal.simulate.job import ModelSnapshot, WorkerLog
from shoal.simulate.task import Task
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.parameter_server import ParameterServer
from shoal.strategies.staleness import Staleness

Charged = Callable[[nn.Module], contextlib.AbstractContextManager[object]]
"""Makes what a step of the model costs count; entered before a strategy is attached."""
_ONE_SIDED = ("fetch", "read")
"""What only the receiver counts."""


def _nothing() -> None:
    pass


class Trainer:
    """A worker of a job; `log` has all that is known of it, also when it ends in the middle."""

    def __init__(self, task: Task, rank: int) -> None:
        self.log = WorkerLog(rank=rank, snapshots=[], waited_s=[], is_joining=rank >= task.job.num_workers)
        self._task = task

    def train(
        self, group: Group, clock: Clock, charged: Charged, begin: Callable[[], None] = _nothing
    ) -> None:
        """All steps of the job; an error of Shoal's ends them, and the others find this worker lost.

        Collective: they begin together, but for one that joins. `begin` is called right before the first
        step.
        """
        metered = Metered(group, clock)
        try:
            self._train(metered, clock, charged, begin)
        except ShoalError as error:
            self.log.ended = first_line(error)
            group.close(error)
        except SystemExit:
            self.log.ended = "it has left."
            raise
        finally:
            if not self.log.is_done(self._task.job.steps):
                self.log.ended_at_s = clock.now_s()

    def _train(self, group: Metered, clock: Clock, charged: Charged, begin: Callable[[], None]) -> None:
        job, log = self._task.job, self.log
        model, optimizer = beginner(self._task)
        batches = self._task.batches(log.rank)
        strategy = make_strategy(group, job.strategy, **job.options)
        with charged(model), strategy.attach(model, optimizer, stays=True):
            if not log.is_joining:
                group.barrier().wait()
            group.reset()
            waited_before_s = list(group.stats.waited_s)
            self._look(strategy.steps, model, group, clock)
            begin()
            # where workers come and go a step may have to be done again, or others have done some before
            while strategy.steps < job.steps:
                inputs, labels = next(batches)
                optimizer.zero_grad()
                self._task.loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step = strategy.steps
                is_due = step % job.eval_every == 0 or step == job.steps
                if is_due and step > log.snapshots[-1].step:
                    if elastic_of(group) is None:  # ranks are others in each generation
                        pairs = zip(group.stats.waited_s, waited_before_s, strict=True)
                        log.waited_s = [now_s - before_s for now_s, before_s in pairs]
                    log.staleness = staleness_of(strategy)
                    self._look(step, model, group, clock)

    def _look(self, step: int, model: nn.Module, group: Metered, clock: Clock) -> None:
        traffic = group.totals()
        one_sided = [traffic[name].received_bytes for name in _ONE_SIDED if name in traffic]
        snapshot = ModelSnapshot(
            step=step,
            at_s=clock.now_s(),
            sent_bytes=sum(each.sent_bytes for each in traffic.values()),
            received_bytes=sum(one_sided),
            tensors=[tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
        )
        self.log.snapshots.append(snapshot)


def first_line(error: ShoalError) -> str:
    """What happened, without why and what next."""
    return str(error).splitlines()[0]


def serve(task: Task, group: Group) -> dict[int, int]:
    """What a parameter server does until all workers are done with it; how far behind their pushes were."""
    strategy = make_strategy(group, task.job.strategy, **task.job.options)
    assert isinstance(strategy, ParameterServer)
    strategy.serve(*beginner(task))
    return staleness_of(strategy)


def beginner(task: Task) -> tuple[nn.Module, SGD]:
    """A model that has learned nothing, and its optimizer."""
    model = task.model()
    return model, SGD(model.parameters(), lr=task.job.learning_rate, momentum=task.job.momentum)


def staleness_of(strategy: Strategy) -> dict[int, int]:
    """Rounds by how far behind the models were that this member has mixed; empty where it counts none."""
    counted = getattr(strategy, "staleness", None)
    return counted.counts if isinstance(counted, Staleness) else {}


def load_tensors(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """What a snapshot has, into a model."""
    with torch.no_grad():
        for mine, given in zip((*model.parameters(), *model.buffers()), tensors, strict=True):
            mine.copy_(given)
