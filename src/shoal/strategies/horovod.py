"""`horovod`: gradients averaged by Horovod itself, where it is installed, to compare with.

While attached, every gradient goes to Horovod as soon as backward has it, and `backward()` returns when all
are back. The group is used for the start alone; `all-reduce` computes the same without Horovod.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from shoal.core.errors import UsageError
from shoal.group import Group
from shoal.strategies.all_reduce import GradientStrategy
from shoal.strategies.hooks import at_end_of_backward
from shoal.strategies.options import HorovodOptions
from shoal.strategies.session import TrainingSession


class HorovodAllReduce(GradientStrategy):
    """When `backward()` returns, `.grad` is the mean over all workers; unused parameters have zeros there.

    With `local_steps` above 1, parameters are averaged after so many local steps instead. A worker that
    leaves waits in Horovod's join for the others. Its errors are Horovod's own.
    """

    name = "horovod"
    Options = HorovodOptions
    options: HorovodOptions
    _names: dict[torch.Tensor, str]
    _under_way: dict[torch.Tensor, tuple[Any, Any]]
    """For each parameter, Horovod's handle and what decompression needs."""

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        if self.options.monitor:
            raise UsageError(
                "horovod cannot be monitored: local gradients are gone when backward returns.",
                next_step="monitor under all-reduce, whose gradients are the same.",
            )
        self._horovod: Any = None if self.is_alone else load_horovod()

    def start(self, session: TrainingSession) -> None:
        """Asks Horovod for the same workers."""
        horovod = self._horovod
        horovod.init()
        if (horovod.rank(), horovod.size()) != (self.group.rank, self.group.size):
            raise UsageError(
                f"rank {self.group.rank} of {self.group.size} is rank {horovod.rank()} of "
                f"{horovod.size()} in Horovod.",
                cause="Horovod does not know of the other workers: it takes them from MPI or horovodrun.",
                next_step="start with `horovodrun -np N` or `mpirun -np N` instead of `shoal run`.",
            )
        self._names = {parameter: name for name, parameter in session.named_parameters.items()}
        self._under_way = {}

    def gradient_ready(self, session: TrainingSession, parameter: torch.Tensor) -> None:
        """Gives a gradient to Horovod."""
        if self.is_accumulating or not self.shares_gradients:
            return
        if not self._under_way:
            at_end_of_backward(self._end_backward)
        if parameter in self._under_way:
            raise UsageError(
                "a parameter's gradient was ready twice in one backward pass.",
                cause="a reentrant checkpoint, or an earlier backward pass that raised.",
                next_step="checkpoint with use_reentrant=False; after an exception, leave the loop.",
            )
        self._share(parameter)

    def _share(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        compressed, context = self._compression.compress(parameter.grad.detach())
        name = f"shoal.{self._names[parameter]}"
        handle = self._horovod.allreduce_async_(compressed, name=name, op=self._horovod.Average)
        self._under_way[parameter] = (handle, context)

    def _end_backward(self) -> None:
        """All have all gradients; those that this pass did not compute go along as they are, or as zeros."""
        for parameter in self._names:
            if parameter not in self._under_way:
                self._share(parameter)
        under_way, self._under_way = self._under_way, {}
        for parameter, (handle, context) in under_way.items():
            mean = self._compression.decompress(self._horovod.synchronize(handle), context)
            if parameter.grad is not None and mean.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(mean)

    def last_round(self, session: TrainingSession) -> None:
        """Averages the parameters by Horovod."""
        self.average_all(session)

    def average_all(self, session: TrainingSession) -> None:
        """Averages parameters by Horovod."""
        horovod = self._horovod
        handles = [
            horovod.allreduce_async_(parameter.data, name=f"shoal.{name}", op=horovod.Average)
            for parameter, name in self._names.items()
        ]
        for handle in handles:
            horovod.synchronize(handle)

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Joins when it leaves: the others' rounds go on without its gradients, until all have."""
        if should_leave:
            self._horovod.join()

    @property
    def _compression(self) -> Any:
        return getattr(self._horovod.Compression, self.options.compression)


def load_horovod() -> Any:
    """Imports Horovod's part for torch; UsageError where it is not installed."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise UsageError(
            f"Horovod is not there: {error}.",
            cause="it is no dependency of Shoal, and is built for each machine.",
            next_step="HOROVOD_WITH_PYTORCH=1 pip install 'horovod[pytorch]', or take all-reduce: it is the "
            "same rule.",
        ) from None
