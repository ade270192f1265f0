"""How an expert learns: its optimizer, the schedule of its learning rate, the norm of its gradients."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.core import UsageError
from shoal.experts.clipping import DEFAULT_FACTOR, GradientClip

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "none": None,
}
"""By name; `none` serves an expert without training it."""

SCHEDULERS: tuple[str, ...] = ("none", "linear")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of the experts that are made by name; a step is one backward batch."""

    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    scheduler: str = "none"
    """`linear` goes up from 0 for `num_warmup_steps`, then down to 0 at `num_training_steps`."""
    num_warmup_steps: int = 0
    num_training_steps: int | None = None
    max_grad_norm: float | None = None
    """Gradients of all parameters together are scaled down to this norm; None never does."""
    clip_gradients: float = DEFAULT_FACTOR
    """They are also scaled down to so many times the usual norm of the expert's gradients; 0 never does."""

    def __post_init__(self) -> None:
        _check_name("optimizer", self.optimizer, OPTIMIZERS)
        _check_name("scheduler", self.scheduler, SCHEDULERS)
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} must be a number of at least 0, not {value}.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UsageError(
                f"max_grad_norm must be above 0, not {self.max_grad_norm}.",
                next_step="leave it out to never clip gradients.",
            )
        GradientClip(self.clip_gradients)  # refuses what is no factor
        if self.scheduler == "none":
            return
        if self.num_training_steps is None or not 0 <= self.num_warmup_steps <= self.num_training_steps:
            raise UsageError(
                f"{self.num_warmup_steps} warm-up steps do not fit into {self.num_training_steps} steps.",
                next_step="give num_training_steps, at least as many as num_warmup_steps.",
            )


def make_optimizer(module: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer | None:
    """One over all parameters that learn; None when there are none, or nothing is to be trained."""
    kind = OPTIMIZERS[settings.optimizer]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if kind is None or not parameters:
        return None
    # torch has fused kernels of these optimizers for every device, but not for complex numbers.
    is_fused = all(parameter.is_floating_point() for parameter in parameters)
    return kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=is_fused)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> LRScheduler | None:
    """The schedule of the optimizer's learning rate, if it has one."""
    if settings.scheduler == "none":
        return None
    num_warmup, num_steps = settings.num_warmup_steps, settings.num_training_steps or 0

    def factor(step: int) -> float:
        if step < num_warmup:
            return step / num_warmup
        return max(0.0, (num_steps - step) / max(1, num_steps - num_warmup))

    return LambdaLR(optimizer, factor)


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name[:32], known, n=1)
        raise UsageError(
            f"The {what} {name!r} is not known.",
            cause=f"did you mean {near[0]!r}?" if near else "",
            next_step=f"use one of {', '.join(known)}.",
        )
