"""A model of torch as members of a run see it: one vector of what they share, and the rates of steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.core import UsageError

log = logging.getLogger(__name__)

MakeScheduler = Callable[[Optimizer], LRScheduler]


class SharedVector:
    """What members share of a model as one vector of float32: trained parameters, then floating buffers."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Takes the trained `parameters`, and of all `tensors` of the model the floating-point buffers."""
        self._parameters = parameters
        buffers = {name: each for name, each in tensors.items() if not isinstance(each, nn.Parameter)}
        self._buffers = {name: tensor for name, tensor in buffers.items() if tensor.is_floating_point()}
        for name, tensor in self._parameters.items():
            if not tensor.is_floating_point():
                raise UsageError(
                    f"{name} is {tensor.dtype}, and a swarm shares real numbers.",
                    next_step="train it as two real parameters.",
                )
        self._tensors = [tensor.detach() for tensor in (*self._parameters.values(), *self._buffers.values())]
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters.values())
        self.num_elements = sum(tensor.numel() for tensor in self._tensors)
        self.described = tuple(
            (name, tuple(tensor.shape))
            for name, tensor in (*self._parameters.items(), *self._buffers.items())
        )
        self._is_pinned = device.type == "cuda"
        self._is_plain = all(tensor.dtype == torch.float32 for tensor in self._tensors)

    def empty(self) -> torch.Tensor:
        """Makes memory for such a vector on the CPU, pinned where the model is on a GPU."""
        return torch.empty(self.num_elements, pin_memory=self._is_pinned)

    def group_ends(self, optimizer: Optimizer) -> list[tuple[int, int]]:
        """Lists the ranges of parameters that are in one group of the optimizer: its number, and the end."""
        number_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        ends: list[tuple[int, int]] = []
        end = 0
        for parameter in self._parameters.values():
            number, end = number_of[id(parameter)], end + parameter.numel()
            if ends and ends[-1][0] == number:
                ends.pop()
            ends.append((number, end))
        return ends

    @torch.no_grad()
    def read(self, out: torch.Tensor) -> torch.Tensor:
        """Copies the model into a vector."""
        for view, tensor in self._pairs(out):
            view.copy_(tensor, non_blocking=True)
        self._synchronize()
        return out

    @torch.no_grad()
    def read_gradients(
        self, out: torch.Tensor, scale: torch.Tensor | None, reference: torch.Tensor
    ) -> torch.Tensor:
        """Copies the gradients, and of buffers how far they are below the reference; zeros where none are."""
        gradients = [parameter.grad for parameter in self._parameters.values()]
        for (view, _), gradient in zip(self._pairs(out), gradients, strict=False):
            if gradient is None:
                view.zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                view.copy_(dense, non_blocking=True)
        for view, tensor in self._pairs(out)[len(gradients) :]:
            view.copy_(tensor, non_blocking=True)
        self._synchronize()
        if scale is not None:  # a GradScaler leaves the division to a fused optimizer
            out[: self.num_parameters] /= float(scale)
        rest = slice(self.num_parameters, None)
        torch.sub(reference[rest], out[rest], out=out[rest])
        return out

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Copies a vector into the model."""
        for view, tensor in self._pairs(values):
            tensor.copy_(view)

    @torch.no_grad()
    def shift(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Moves the model from one vector to another, and keeps what it has learned since the old one."""
        for (before, tensor), (after, _) in zip(self._pairs(old), self._pairs(new), strict=True):
            device = tensor.device
            own = tensor.float() - before.to(device)
            tensor.copy_(own.add_(after.to(device)))

    def as_written(self, values: torch.Tensor) -> torch.Tensor:
        """Gives the values as the model's types hold them: what is learned is measured from there."""
        if self._is_plain:
            return values
        rounded = torch.empty_like(values)
        for (out, tensor), (view, _) in zip(self._pairs(rounded), self._pairs(values), strict=True):
            out.copy_(view.to(tensor.dtype))
        return rounded

    def _pairs(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        views = torch.split(vector, [tensor.numel() for tensor in self._tensors])
        return [(view.view(tensor.shape), tensor) for view, tensor in zip(views, self._tensors, strict=True)]

    def _synchronize(self) -> None:
        if self._is_pinned:
            torch.cuda.current_stream(self._tensors[0].device).synchronize()


class RoundRates:
    """The factors on the learning rates after so many steps of the run, the same on all members.

    The factor is `factor(step)`, that of warm-up and decay, times that of the user's scheduler, which is
    stepped once for each step of the run on a stand-in for the optimizer. For any thread.
    """

    def __init__(
        self, optimizer: Optimizer, make: MakeScheduler | None, factor: Callable[[int], float]
    ) -> None:
        self.groups: Sequence[int] = ()
        """The optimizer's group of each part of the committed parameters."""
        self._optimizer = optimizer
        self._make = make
        self._factor = factor
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._shown = list(self._base)
        self._lock = threading.Lock()
        self._step = 0
        self._scheduler: LRScheduler | None = None
        self._has_warned = False

    def __call__(self, step: int) -> list[float]:
        """Gives the factor for each part of the committed parameters, in the step after so many."""
        factor = self._factor(step)
        scheduled = self._scheduled(step)
        return [factor * scheduled[group] for group in self.groups]

    def apply(self, step: int) -> None:
        """Shows the rates of the scheduler in the user's optimizer, which steps by them in DiLoCo rounds."""
        if self._make is None:
            return
        for number, factor in enumerate(self._scheduled(step)):
            self._shown[number] = self._base[number] * factor
            self._optimizer.param_groups[number]["lr"] = self._shown[number]

    def warn_of_other(self, optimizer: Optimizer) -> None:
        """Warns once when the program itself has changed a rate, which the run does not follow."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._shown and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the learning rate of the optimizer was changed to %g: all members of the run go on with %g. "
                "Give SwarmTraining(scheduler=lambda optimizer: ...) instead, which counts the run's steps.",
                rates[0], self._shown[0],
            )  # fmt: skip

    def _scheduled(self, step: int) -> list[float]:
        if self._make is None:
            return [1.0] * len(self._base)
        with self._lock:
            if self._scheduler is None or step < self._step:
                groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in self._base]
                self._stand_in = torch.optim.SGD(groups, lr=self._base[0])
                self._scheduler, self._step = self._make(self._stand_in), 0
                self._stand_in.step()  # torch warns of a scheduler that is stepped first
            while self._step < step:
                self._scheduler.step()
                self._step += 1
            rates = [float(group["lr"]) for group in self._stand_in.param_groups]
        return [rate / base if base else 1.0 for rate, base in zip(rates, self._base, strict=True)]
