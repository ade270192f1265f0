"""Optimizers of the committed state: all members make the same step and must arrive at the same bits.

Every operation here rounds once, as IEEE 754 says, whatever the processor: additions, products, quotients and
square roots of float32, one at a time. No fused multiply-add, no `alpha=`, no `lerp`: those give other bits
with AVX2 than without. Powers are kept as running products of Python floats, not computed by `pow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import torch

from shoal.core import UsageError


class CommittedOptimizer(Protocol):
    """Moves the committed parameters by an averaged gradient, and says what it keeps between steps."""

    def start(self, num_elements: int) -> dict[str, Any]:
        """Makes what it keeps at the beginning: tensors and numbers."""

    def step(self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any]) -> None:
        """Changes the parameters, and what it keeps, in place; `gradient` stays as it is."""


_BLOCK = 32 << 10
"""Elements at a time: what one operation leaves is in the cache for the next, and torch starts no threads."""


def _blocks(gradient: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cuts vectors into blocks; that of the gradient is a copy, which may be overwritten."""
    copy = torch.empty(min(_BLOCK, gradient.numel()))
    for begin in range(0, gradient.numel(), _BLOCK):
        end = min(begin + _BLOCK, gradient.numel())
        yield copy[: end - begin].copy_(gradient[begin:end]), *(other[begin:end] for other in others)


class CommittedSGD(msgspec.Struct, frozen=True):
    """Stochastic gradient descent, with Nesterov's momentum where `momentum` is above zero."""

    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def start(self, num_elements: int) -> dict[str, Any]:
        """Keeps a velocity where there is momentum."""
        return {"velocity": torch.zeros(num_elements)} if self.momentum else {}

    def step(self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any]) -> None:
        """θ ← θ − η(g + μv), v ← μv + g (Sutskever et al. 2013, as in torch)."""
        velocities = [kept["velocity"]] if self.momentum else []
        for block in _blocks(gradient, parameters, *velocities):
            self._step(*block)

    def _step(self, change: torch.Tensor, part: torch.Tensor, velocity: torch.Tensor | None = None) -> None:
        if self.weight_decay:
            change += part * self.weight_decay
        if velocity is not None:
            velocity *= self.momentum
            velocity += change
            change += velocity * self.momentum
        change *= self.learning_rate
        part -= change


class CommittedAdam(msgspec.Struct, frozen=True):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with `is_decoupled`."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = False

    def start(self, num_elements: int) -> dict[str, Any]:
        """Keeps both moments and the running powers of both betas."""
        zeros = torch.zeros(num_elements)
        return {"mean": zeros, "square": zeros.clone(), "power1": 1.0, "power2": 1.0}

    def step(self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any]) -> None:
        """Makes algorithm 1 of Kingma & Ba, or algorithm 2 of Loshchilov & Hutter, operation by operation."""
        kept["power1"] *= self.beta1
        kept["power2"] *= self.beta2
        for block in _blocks(gradient, parameters, kept["mean"], kept["square"]):
            self._step(1 - kept["power1"], 1 - kept["power2"], *block)

    def _step(
        self,
        mean_share: float,
        square_share: float,
        change: torch.Tensor,
        part: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
    ) -> None:
        if self.weight_decay and self.is_decoupled:
            part *= 1 - self.learning_rate * self.weight_decay
        elif self.weight_decay:
            change += part * self.weight_decay
        mean *= self.beta1
        mean += change * (1 - self.beta1)
        change *= change
        change *= 1 - self.beta2
        square *= self.beta2
        square += change
        below = torch.sqrt(square / square_share)
        below += self.epsilon
        torch.div(mean, mean_share, out=change)
        change *= self.learning_rate
        change /= below
        part -= change


def optimizer_named(name: str, learning_rate: float | None = None) -> CommittedOptimizer:
    """Makes one by name: sgd, nesterov, adam, adamw, or outer-nesterov, which is DiLoCo's (0.7 and 0.9)."""
    rates: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
    made: dict[str, CommittedOptimizer] = {
        "sgd": CommittedSGD(**rates),
        "nesterov": CommittedSGD(momentum=0.9, **rates),
        "outer-nesterov": CommittedSGD(**({"learning_rate": 0.7} | rates), momentum=0.9),
        "adam": CommittedAdam(**rates),
        "adamw": CommittedAdam(**rates, weight_decay=0.01, is_decoupled=True),
    }
    if name not in made:
        raise UsageError(f"There is no optimizer {name!r}.", next_step=f"choose one of {', '.join(made)}.")
    return made[name]
