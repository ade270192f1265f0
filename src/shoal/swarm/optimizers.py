"""Optimizers of the committed state: all members make the same step and must arrive at the same bits.

Every operation here rounds once, as IEEE 754 says, whatever the processor: additions, products, quotients and
square roots of float32, one at a time. No fused multiply-add, no `alpha=`, no `lerp`: those give other bits
with AVX2 than without. Powers are kept as running products of Python floats, not computed by `pow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.optim import Optimizer

from shoal.core import UsageError


class CommittedOptimizer(Protocol):
    """Moves the committed parameters by an averaged gradient, and says what it keeps between steps."""

    def start(self, num_elements: int) -> dict[str, Any]:
        """Makes what it keeps at the beginning: tensors and numbers."""

    def step(
        self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any], begin: int = 0
    ) -> None:
        """Changes the parameters, and what it keeps, in place; `gradient` stays as it is.

        It may be that of some parameters alone, from the one at `begin` on: the others stay, too.
        """


_BLOCK = 32 << 10
"""Elements at a time: what one operation leaves is in the cache for the next, and torch starts no threads."""


def _blocks(gradient: torch.Tensor, first: int, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cuts vectors into blocks, the others from their element `first` on; that of the gradient is a copy,
    which may be overwritten.
    """
    copy = torch.empty(min(_BLOCK, gradient.numel()))
    for begin in range(0, gradient.numel(), _BLOCK):
        end = min(begin + _BLOCK, gradient.numel())
        rest = (other[first + begin : first + end] for other in others)
        yield copy[: end - begin].copy_(gradient[begin:end]), *rest


class CommittedSGD(msgspec.Struct, frozen=True):
    """Stochastic gradient descent, with momentum where `momentum` is above zero: Nesterov's, or Polyak's."""

    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    is_nesterov: bool = True

    def start(self, num_elements: int) -> dict[str, Any]:
        """Keeps a velocity where there is momentum."""
        return {"velocity": torch.zeros(num_elements)} if self.momentum else {}

    def step(
        self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any], begin: int = 0
    ) -> None:
        """v ← μv + g; θ ← θ − η(g + μv), or θ ← θ − ηv (Sutskever et al. 2013, as in torch)."""
        velocities = [kept["velocity"]] if self.momentum else []
        for block in _blocks(gradient, begin, parameters, *velocities):
            self._step(*block)

    def _step(self, change: torch.Tensor, part: torch.Tensor, velocity: torch.Tensor | None = None) -> None:
        if self.weight_decay:
            change += part * self.weight_decay
        if velocity is not None:
            velocity *= self.momentum
            velocity += change
            if self.is_nesterov:
                change += velocity * self.momentum
            else:
                change.copy_(velocity)
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

    def step(
        self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any], begin: int = 0
    ) -> None:
        """Makes algorithm 1 of Kingma & Ba, or algorithm 2 of Loshchilov & Hutter, operation by operation."""
        kept["power1"] *= self.beta1
        kept["power2"] *= self.beta2
        for block in _blocks(gradient, begin, parameters, kept["mean"], kept["square"]):
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


class OptimizerPart(msgspec.Struct, frozen=True):
    """How one range of the parameters, from the end of the part before, is stepped."""

    end: int
    optimizer: CommittedSGD | CommittedAdam
    has_rate: bool = True
    """Whether its learning rate follows the schedule."""


class PartitionedOptimizer:
    """Steps ranges of the parameters each in its own way, at rates that follow the number of steps made.

    `rates(step)` gives the factor on the learning rate of each part whose rate follows the schedule, in
    order; it must give the same on all members. With `kept` it goes on from what another run has kept.
    """

    def __init__(
        self,
        parts: Sequence[OptimizerPart],
        rates: Callable[[int], Sequence[float]] | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._rates = rates
        self._kept = kept

    def start(self, num_elements: int) -> dict[str, Any]:
        """Keeps what each part keeps, and the number of steps."""
        made: dict[str, Any] = {"num_steps": 0}
        begin = 0
        for number, part in enumerate(self.parts):
            for name, value in part.optimizer.start(part.end - begin).items():
                made[f"{number}.{name}"] = value
            begin = part.end
        if begin != num_elements:
            raise UsageError(
                f"The parts of the optimizer end at {begin}, and there are {num_elements} parameters.",
                next_step="let the last part end with the last parameter.",
            )
        if self._kept is not None:
            if sorted(self._kept) != sorted(made):
                raise UsageError(
                    "What the optimizer has kept is of another optimizer.",
                    next_step="go on with the optimizer that the checkpoint was saved with.",
                )
            made = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in self._kept.items()
            }
        return made

    def step(
        self, parameters: torch.Tensor, gradient: torch.Tensor, kept: dict[str, Any], begin: int = 0
    ) -> None:
        """Steps part by part."""
        factors = iter(() if self._rates is None else self._rates(kept["num_steps"]))
        stepped, end = 0, begin + gradient.numel()
        for number, part in enumerate(self.parts):
            optimizer, prefix = part.optimizer, f"{number}."
            if part.has_rate and (factor := next(factors, 1.0)) != 1.0:
                rate = optimizer.learning_rate * factor
                optimizer = msgspec.structs.replace(optimizer, learning_rate=rate)
            first, last = max(begin, stepped), min(end, part.end)
            if first < last:
                own = {name.removeprefix(prefix): kept[name] for name in kept if name.startswith(prefix)}
                due = gradient[first - begin : last - begin]
                optimizer.step(parameters[stepped : part.end], due, own, first - stepped)
                kept.update((prefix + name, value) for name, value in own.items())
            stepped = part.end
        kept["num_steps"] += 1


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


def committed_like(optimizer: Optimizer, number: int) -> CommittedSGD | CommittedAdam:
    """Makes what steps the committed parameters as a group of torch's SGD, Adam or AdamW steps its own.

    UsageError for other optimizers, which give other bits on other processors.
    """
    group = optimizer.param_groups[number]
    kind = type(optimizer)
    has_extras = group.get("maximize") or group.get("amsgrad") or group.get("dampening")
    if kind is torch.optim.SGD and not has_extras:
        return CommittedSGD(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
        )
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not has_extras:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return CommittedAdam(
            learning_rate=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            epsilon=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            is_decoupled=kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        )
    raise UsageError(
        f"Members of a swarm cannot all make the same step of {kind.__name__} with these settings.",
        cause="with target_samples the step is Shoal's own, equal to the bit on all processors: SGD (without "
        "dampening and maximize), Adam and AdamW (without amsgrad and maximize).",
        next_step="take one of these, or local_steps=… in place of target_samples, with any optimizer.",
    )
