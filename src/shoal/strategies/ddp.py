"""`ddp`: torch's own DistributedDataParallel, the baseline, attached to an unchanged loop.

The user's model stays what it is: while attached, its `forward` goes through a DDP around it. Gradients are
shared over torch.distributed, which this brings up where the user has not: NCCL where each worker has a GPU
of its own, gloo otherwise. The group is used for the start alone.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import ShoalError, UsageError
from shoal.group import Group
from shoal.group.cluster.torch_world import open_process_group
from shoal.strategies.all_reduce import GradientStrategy
from shoal.strategies.options import DDPOptions
from shoal.strategies.session import TrainingSession

_KNOWN = inspect.signature(DistributedDataParallel).parameters
# torch 2.13 has given the argument another name, and warns of the old one
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


class TorchDDP(GradientStrategy):
    """Gradients averaged by torch; its errors are torch's own, and so is what its options mean.

    Only forward passes of the model itself, in training with gradients, are followed by a round. With
    `local_steps` above 1, parameters are averaged after so many local steps instead.
    """

    name = "ddp"
    Options = DDPOptions
    options: DDPOptions

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        if self.options.monitor:
            raise UsageError(
                "ddp cannot be monitored: torch keeps local gradients to itself.",
                next_step="monitor under all-reduce, whose gradients are the same.",
            )
        if self.options.is_uneven and self.options.local_steps > 1:
            raise UsageError(
                "torch's Join knows no local steps.",
                next_step="take all-reduce, where uneven data just works.",
            )
        self._module: DistributedDataParallel | None = None
        self._exit = contextlib.ExitStack()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Does what DDP's `no_sync` does: forward and backward passes inside share nothing."""
        no_sync = contextlib.nullcontext() if self._module is None else self._module.no_sync()
        with super().accumulate(), no_sync:
            yield

    def start(self, session: TrainingSession) -> None:
        """Sends the model's forward through torch's DistributedDataParallel."""
        open_process_group(self.group, session.device, self._exit)
        if not self.shares_gradients or not session.trainable:
            return
        model = session.model
        # parameters and buffers are what they should be: equal, or each worker's own of a checkpoint
        self._module = wrap(_Shell(model), self.options, should_start_equal=False)
        self._exit.enter_context(_routed(model, self._module))
        if self.options.is_uneven:
            joining = Join([self._module], divide_by_initial_world_size=False)
            self._exit.enter_context(joining)

    @property
    def shares_buffers(self) -> bool:
        """Whether the session copies buffers, since torch does not."""
        return self._module is None

    def last_round(self, session: TrainingSession) -> None:
        """Averages the parameters by torch.distributed."""
        if len(self.group.members) < self.group.size:
            raise ShoalError("torch.distributed averages over all workers, and some have ended.")
        world = dist.group.WORLD
        assert world is not None, "attached without torch.distributed"
        average_parameters(iter(session.trainable), world)

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Waits for the others in torch's Join, where numbers of batches may differ."""
        self._module = None
        self._exit.close()

    def stop(self, session: TrainingSession) -> None:
        """Unwraps the model; after a failure nobody is waited for."""
        self._module = None
        failure = ShoalError("the loop ended with an exception.")
        self._exit.__exit__(ShoalError, failure, None)


class _Shell(nn.Module):
    """What DDP wraps: the model's own forward, without the hooks that have run by then."""

    is_wrapped_by_shoal = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Route:
    """The model's forward through DDP, which calls the model's own; a copy of the model has its own alone."""

    def __init__(self, model: nn.Module, module: DistributedDataParallel) -> None:
        self.own = model.forward
        self._model = model
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        should_share = self._model.training and torch.is_grad_enabled()
        return self._module(*args, **kwargs) if should_share else self.own(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.own,)


def _itself(value: Any) -> Any:
    return value


@contextlib.contextmanager
def _routed(model: nn.Module, module: DistributedDataParallel) -> Iterator[None]:
    """Send the model's forward through DDP."""
    was_set = "forward" in vars(model)
    route = _Route(model, module)
    model.forward = route
    try:
        yield
    finally:
        if was_set:
            model.forward = route.own
        else:
            del model.forward


def wrap(model: nn.Module, options: DDPOptions, *, should_start_equal: bool) -> DistributedDataParallel:
    """Puts torch's wrapper around a model, in the process group that is open."""
    settings: dict[str, Any] = {_BUFFERS: options.should_broadcast_buffers, "init_sync": should_start_equal}
    return DistributedDataParallel(
        model,
        bucket_cap_mb=options.bucket_mib,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **settings,
    )
