"""Expert classes: modules that Shoal knows by name, one's own by `package.module:factory`; how they learn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.core import UsageError
from shoal.core.errors import did_you_mean
from shoal.core.run_options import load_named
from shoal.experts.clipping import DEFAULT_FACTOR, GradientClip
from shoal.experts.expert import Expert
from shoal.experts.schema import Example, as_example

_NUM_HEADS = 16


class FeedForward(nn.Module):
    """Two layers, four times as wide between them, with a residual and a norm after it."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden]` to the same."""
        inner = functional.gelu(self.up(x), approximate="tanh")
        y: torch.Tensor = self.norm(x + self.down(inner))
        return y


class Transformer(nn.Module):
    """An encoder layer that normalises after each part; its mask is True where there is only padding."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.layer = _encoder_layer(hidden_dim, 4 * hidden_dim)

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """`[batch, length, hidden]` and `[batch, length]` to the shape of the first.

        A sample that is nothing but padding is attended to in full: otherwise it would become NaN, and with
        it the gradient of all samples.
        """
        padding_mask = padding_mask & ~padding_mask.all(dim=1, keepdim=True)
        y: torch.Tensor = self.layer(x, src_key_padding_mask=padding_mask)
        return y


class Nop(nn.Module):
    """Gives its input itself: all that is left is the way there and back."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives the very tensor that it is given."""
        return x


class DelayedNop(nn.Module):
    """Gives its input itself, late."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.delay_s = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same tensor, after the delay; backward, which computes forward again, is as late.

        In evaluation there is no delay, so that a server's start does not wait for each of its experts.
        """
        if self.training:
            time.sleep(self.delay_s)
        return x


class DeterministicDropout(nn.Module):
    """Two layers behind a dropout whose mask is an input, so that backward drops what forward did."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.keep_probability = 0.8
        self.up = nn.Linear(hidden_dim, 2 * hidden_dim)
        self.down = nn.Linear(2 * hidden_dim, hidden_dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mask is True where an element is kept; in evaluation all are."""
        if self.training:
            x = x * mask / self.keep_probability
        y: torch.Tensor = self.down(functional.relu(self.up(x)))
        return y


class LahFeedForward(nn.Module):
    """Learning@home's block: three layers with norms between them, and a residual."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        inner_dim = 4 * hidden_dim
        self.layers = nn.Sequential(
            nn.Linear(hidden_dim, inner_dim),
            nn.LayerNorm(inner_dim),
            nn.ReLU(),
            nn.Linear(inner_dim, inner_dim),
            nn.LayerNorm(inner_dim),
            nn.ReLU(),
            nn.Linear(inner_dim, hidden_dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden]` to the same."""
        y: torch.Tensor = x + self.layers(x)
        return y


class LahTransformer(nn.Module):
    """Learning@home's encoder layer: no mask, and an inner width that does not grow with the hidden one."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.layer = _encoder_layer(hidden_dim, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, length, hidden]` to the same."""
        y: torch.Tensor = self.layer(x)
        return y


def _encoder_layer(hidden_dim: int, inner_dim: int) -> nn.TransformerEncoderLayer:
    if hidden_dim % _NUM_HEADS:
        raise UsageError(
            f"A transformer's hidden dimension must be a multiple of {_NUM_HEADS}, its number of heads, "
            f"not {hidden_dim}."
        )
    return nn.TransformerEncoderLayer(
        hidden_dim, _NUM_HEADS, inner_dim, dropout=0.1, activation="gelu", batch_first=True
    )


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
        raise UsageError(
            f"The {what} {name!r} is not known.{did_you_mean(name, known)}",
            next_step=f"use one of {', '.join(known)}.",
        )


_EXAMPLE_BATCH_SIZE = 3


@dataclass(frozen=True, slots=True)
class ExpertClass:
    """How experts of one kind are made."""

    name: str
    make: Callable[[int], nn.Module]
    """From the hidden dimension."""
    example: Callable[[int, int], Example]
    """Inputs for a hidden dimension and a batch size."""


def make_expert(
    uid: str, class_: ExpertClass, hidden_dim: int, training: TrainingSettings, seed: int
) -> Expert:
    """A new expert; equal seeds give equal weights, and torch's own generator is left as it was."""
    if hidden_dim < 1:
        raise UsageError(f"The hidden dimension must be at least 1, not {hidden_dim}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = class_.make(hidden_dim)
        example = class_.example(hidden_dim, _EXAMPLE_BATCH_SIZE)
    optimizer = make_optimizer(module, training)
    return Expert(
        uid,
        module,
        example,
        optimizer=optimizer,
        scheduler=None if optimizer is None else make_scheduler(optimizer, training),
        max_grad_norm=training.max_grad_norm,
        clip_gradients=training.clip_gradients,
    )


def expert_class(name: str) -> ExpertClass:
    """The class of this name, hyphens and underscores being the same.

    `package.module:factory` and `path/file.py:factory` name one's own: an `ExpertClass`, or what gives a
    module for a hidden dimension, such as a subclass of `nn.Module`. Its inputs are what its attribute
    `example_inputs(hidden_dim, batch_size)`, or the module's, gives (a tensor, a tuple of them, or arguments
    and keyword arguments); without one, a tensor `[batch, hidden]`. Whoever may choose the name may run any
    code.
    """
    if ":" in name:
        return _own_class(name)
    known = {_plain(key): class_ for key, class_ in EXPERT_CLASSES.items()}
    found = known.get(_plain(name))
    if found is None:
        raise UsageError(
            f"The expert class {name!r} is not known.{did_you_mean(name, EXPERT_CLASSES)}",
            next_step=f"use one of {', '.join(EXPERT_CLASSES)}, or package.module:factory for your own.",
        )
    return found


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def _row(hidden_dim: int, batch_size: int) -> Example:
    return (torch.randn(batch_size, hidden_dim),), {}


def _masked_sequence(hidden_dim: int, batch_size: int) -> Example:
    mask = torch.zeros(batch_size, 128, dtype=torch.bool)
    return (torch.randn(batch_size, 128, hidden_dim), mask), {}


def _long_sequence(hidden_dim: int, batch_size: int) -> Example:
    return (torch.randn(batch_size, 512, hidden_dim),), {}


def _masked_row(hidden_dim: int, batch_size: int) -> Example:
    mask = torch.rand(batch_size, hidden_dim) < 0.8
    return (torch.randn(batch_size, hidden_dim), mask), {}


EXPERT_CLASSES: dict[str, ExpertClass] = {
    class_.name: class_
    for class_ in (
        ExpertClass("ffn", FeedForward, _row),
        ExpertClass("transformer", Transformer, _masked_sequence),
        ExpertClass("nop", Nop, _row),
        ExpertClass("nop_delay", DelayedNop, _row),
        ExpertClass("det_dropout", DeterministicDropout, _masked_row),
        ExpertClass("lah-ffn", LahFeedForward, _row),
        ExpertClass("lah-transformer", LahTransformer, _long_sequence),
    )
}


def _own_class(name: str) -> ExpertClass:
    factory = load_named(name, "expert class")
    if isinstance(factory, ExpertClass):
        return factory
    if not callable(factory):
        raise UsageError(
            f"{name} is a {type(factory).__name__}, which cannot be called.",
            next_step="name a function that gives a module for a hidden dimension, or a class of modules.",
        )
    made: Callable[[int], Any] = factory

    def make(hidden_dim: int) -> nn.Module:
        expert = made(hidden_dim)
        if not isinstance(expert, nn.Module):
            raise UsageError(f"{name} gave {type(expert).__name__}, not a torch.nn.Module.")
        return expert

    def example(hidden_dim: int, batch_size: int) -> Example:
        # An instance has to be made only where the factory itself does not tell.
        source: Any = made if hasattr(made, "example_inputs") else make(hidden_dim)
        if not hasattr(source, "example_inputs"):
            return _row(hidden_dim, batch_size)
        return as_example(source.example_inputs(hidden_dim, batch_size), f"example_inputs of {name} gave")

    return ExpertClass(name, make, example)
