"""What a step of a model costs, told to whoever lets time pass, virtual or real, as the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from shoal.simulate.world import StepCosts


class Payer(Protocol):
    """Lets the time of a step pass."""

    def begin(self, seconds: float) -> None:
        """Forward begins, and is to take so long."""

    def end_forward(self) -> None:
        """Forward has been computed."""

    def add(self, seconds: float) -> None:
        """A gradient has come, and so much of backward is over."""


@contextlib.contextmanager
def charged(model: nn.Module, costs: StepCosts, forward_share: float, payer: Payer) -> Iterator[None]:
    """While the block lasts a training step of the model takes what `costs` say.

    Its forward takes its share, its backward the rest as gradients come, by the size of each. Begin it before
    the strategy is attached, so that a gradient's time has passed when it is shared.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_elements = max(1, sum(parameter.numel() for parameter in trained))
    backward_s = 0.0

    def is_training(module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()

    def before_forward(module: nn.Module, args: Any) -> None:
        nonlocal backward_s
        if is_training(module):
            step_s = costs.next_s()
            backward_s = (1 - forward_share) * step_s
            payer.begin(forward_share * step_s)

    def after_forward(module: nn.Module, args: Any, outputs: Any) -> None:
        if is_training(module):
            payer.end_forward()

    def after_gradient(parameter: torch.Tensor) -> None:
        payer.add(backward_s * parameter.numel() / num_elements)

    hooks: list[Any] = [
        model.register_forward_pre_hook(before_forward),
        model.register_forward_hook(after_forward),
    ]
    hooks += [each.register_post_accumulate_grad_hook(after_gradient) for each in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
