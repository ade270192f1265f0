"""Optimizers of the committed state: all members make the same step and must arrive at the same bits.

Every operation here rounds once, as IEEE 754 says, whatever the processor: additions, products, quotients and
square roots of float32, one at a time. No fused multiply-add, no `alpha=`, no `lerp`: those give other bits
with AVX2 than without. Powers are kept as running products of Python floats, not computed by `pow`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch

from shoal.core import UsageError


class CommittedOptimizer(Protocol):
    """Moves the committed parameters by an averaged gradient, and says what it keeps between steps."""

    def start(self, num_elements: int) -> dict[str, Any]:
        """Makes what it keeps at the beginning: tensors and numbers."""

    def step(self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any]) -> None:
        """Changes the parameters, and what it keeps, in place; `gradient` may be overwritten."""


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
        if self.weight_decay:
            gradient += parameters * self.weight_decay
        if self.momentum:
            velocity = kept["velocity"]
            velocity *= self.momentum
            velocity += gradient
            gradient += velocity * self.momentum
        gradient *= self.learning_rate
        parameters -= gradient


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
        if self.weight_decay and self.is_decoupled:
            parameters *= 1 - self.learning_rate * self.weight_decay
        elif self.weight_decay:
            gradient += parameters * self.weight_decay
        mean, square = kept["mean"], kept["square"]
        mean *= self.beta1
        mean += gradient * (1 - self.beta1)
        gradient *= gradient
        gradient *= 1 - self.beta2
        square *= self.beta2
        square += gradient
        kept["power1"] *= self.beta1
        kept["power2"] *= self.beta2
        below = torch.sqrt(square / (1 - kept["power2"]))
        below += self.epsilon
        change = mean / (1 - kept["power1"])
        change *= self.learning_rate
        change /= below
        parameters -= change


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
