"""One model and optimizer under a strategy: what they hold, and the hooks through which it is told of them.

The hooks are the optimizer's step hooks and, in a group of more than one, the model's forward hooks and the
parameters' hooks in backward. A step that was skipped (GradScaler calls no `step()` when it met an inf) is
noticed when, after a backward pass in training that no step followed, the gradients are gone at the next
forward or backward. Gradients that are still there are being accumulated. What an optimizer computes inside
of its step (LBFGS) is part of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.strategies.hooks import Hook


class Removable(Protocol):
    """What torch gives for a hook."""

    def remove(self) -> None:
        """Take the hook off."""


class Listener(Protocol):
    """The strategy, as its attachment sees it; all of it is called in the user's thread."""

    name: ClassVar[str]
    runs_on_devices: ClassVar[bool]
    """Whether the model may be on a device."""

    @property
    def is_alone(self) -> bool:
        """Whether the group is one of one."""

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward pass now shares nothing, and no step follows it."""

    def forward_ended(self) -> None:
        """The whole forward is done, in training with gradients."""

    def step_begins(self, num_missed: int) -> float:
        """Before the optimizer's step, `num_missed` skipped ones before it; the factor for its rates."""

    def step_ended(self) -> None:
        """After the optimizer's step."""

    def step_skipped(self) -> None:
        """The optimizer did not step after a backward pass."""

    def ending(self, *, should_leave: bool) -> None:
        """The loop is over and nothing has failed."""

    def detached(self, *, should_leave: bool, is_failed: bool) -> None:
        """The last: the hooks are gone."""


class Attachment:
    """A context manager: on a clean end this worker leaves the group in order, on an exception it doesn't."""

    named_parameters: dict[str, nn.Parameter]
    """The trainable ones, each once, in the order of the model; then those that only the optimizer has."""
    parameters: list[nn.Parameter]

    def __init__(self, strategy: Listener, model: nn.Module, optimizer: Optimizer, *, stays: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.stays = stays
        self._strategy = strategy
        self._hooks: list[Removable] = []
        self._rates: list[Any] = []
        self._is_open = True
        self._has_backward = False
        """A backward pass in training, outside of `accumulate()`, that no step has followed yet."""
        self._is_seen = False
        """The backward pass that runs, or the last one, is in `_has_backward`."""
        self._is_stepping = False
        """Also after a step that raised, until the next one: there is no hook for that."""
        self._num_missed = 0
        self.has_closure = False
        """Whether the step under way computes its gradients itself."""
        self.is_left_out = False
        """Whether the step under way finds no gradients, since some are not finite."""
        self.named_tensors = _named_tensors(model, optimizer)
        self.named_parameters = {
            name: tensor
            for name, tensor in self.named_tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        self.parameters = list(self.named_parameters.values())
        is_any_device = strategy.is_alone or strategy.runs_on_devices
        self.device = _device_of(self.parameters, strategy.name, is_any_device=is_any_device)
        self._frozen = {
            name: tensor for name, tensor in self.named_tensors.items() if name not in self.named_parameters
        }
        self._num_optimized = _num_optimized(optimizer)

    @property
    def is_void(self) -> bool:
        """Whether the step under way moves nothing: it is left out, or GradScaler found an inf for it."""
        if self.is_left_out:
            return True
        found_inf = getattr(self.optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def add(self, hook: Removable) -> None:
        """A hook that is removed on detaching."""
        self._hooks.append(hook)

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Call a hook, inside backward, each time that a parameter's `.grad` has got its new value."""
        self.add(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def listen(self) -> None:
        """Register the hooks that all strategies have."""
        self.add(self.optimizer.register_step_pre_hook(self._before_step))
        self.add(self.optimizer.register_step_post_hook(self._after_step))
        if self._strategy.is_alone:
            return
        self.add(self.model.register_forward_pre_hook(Hook(self._before_forward)))
        self.add(self.model.register_forward_hook(Hook(self._after_forward)))
        for parameter in self.parameters:
            self.add(parameter.register_hook(self._before_accumulation))  # type: ignore[no-untyped-call]
            self.on_accumulated(parameter, self._after_accumulation)

    def settle(self) -> None:
        """Make up for steps that were skipped; one whose gradients are not finite will be, or was."""
        if self._is_stepping:
            return
        if self._has_backward and (self._are_gradients_gone() or not self._are_gradients_finite()):
            self._has_backward = False
            self._num_missed += 1
        while self._num_missed:
            self._num_missed -= 1
            self._strategy.step_skipped()

    def silence(self) -> None:
        """Take the hooks off, and forget what they have seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._restore_rates()
        self._has_backward = self._is_seen = self._is_stepping = False
        self._num_missed = 0

    def close(self, *, is_failed: bool = False) -> None:
        """Detach; idempotent. With `is_failed` nothing is said to the group."""
        if not self._is_open:
            return
        self._is_open = False
        num_missed = self._num_missed + self._has_backward
        self.silence()
        if not is_failed:
            try:
                for _ in range(num_missed):
                    self._strategy.step_skipped()
                self._strategy.ending(should_leave=not self.stays)
            except BaseException:
                self._strategy.detached(should_leave=False, is_failed=True)
                raise
        self._strategy.detached(should_leave=not self.stays, is_failed=is_failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(is_failed=error is not None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._restore_rates()
        self._require_unchanged()
        # the first of `args` is the optimizer
        self.has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        missed, self._num_missed = self._num_missed, 0
        factor = self._strategy.step_begins(missed)
        if factor != 1:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self._is_stepping = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_rates()
        self._has_backward = self._is_seen = self._is_stepping = False
        self._strategy.step_ended()

    def _restore_rates(self) -> None:
        """Also after a step that raised, for which there is no hook."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if self._is_stepping:
            return
        self._is_seen = False
        if self._has_backward and self._are_gradients_gone():
            self._has_backward = False
            self._strategy.step_skipped()

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._is_stepping:
            self._strategy.forward_ended()

    def _before_accumulation(self, gradient: torch.Tensor) -> None:
        """For each gradient of a backward pass, and of `autograd.grad`; the first finds `.grad` as it was."""
        if self._is_seen or not self._has_backward or self._is_stepping:
            return
        if self._are_gradients_gone():
            # a round changes parameters, which backward still needs: it is made up for in the next step
            self._num_missed += 1
            self._has_backward = False

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        """For each gradient of a backward pass alone."""
        self._is_seen = True
        if not (self._has_backward or self._is_stepping or self._strategy.is_accumulating):
            self._has_backward = self.model.training

    def _require_unchanged(self) -> None:
        thawed = [name for name, tensor in self._frozen.items() if tensor.requires_grad]
        if thawed or _num_optimized(self.optimizer) != self._num_optimized:
            raise UsageError(
                f"{', '.join(thawed) or 'a parameter of the optimizer'} came to training after attach, "
                "and is not shared.",
                next_step="end the `with` block (attach with stays=True), and attach again.",
            )

    def _are_gradients_gone(self) -> bool:
        return all(parameter.grad is None or not bool(parameter.grad.any()) for parameter in self.parameters)

    def _are_gradients_finite(self) -> bool:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        return all(bool(gradient.isfinite().all()) for gradient in dense)


def _num_optimized(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _named_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """All that must be equal at the start: parameters, each once, and buffers."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    seen = {id(tensor) for tensor in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, tensor in enumerate(group["params"]):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[f"optimizer.{number}.{position}"] = tensor
    named.update(model.named_buffers())
    for name, tensor in named.items():
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: its module is a lazy one.",
                next_step="run one forward before attach.",
            )
    return named


def _device_of(parameters: Sequence[torch.Tensor], name: str, *, is_any_device: bool) -> torch.device:
    """The one that all trainable parameters are on."""
    devices = {parameter.device: None for parameter in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices: {', '.join(map(str, devices))}.",
            next_step="put it on one before attach.",
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type != "cpu" and not is_any_device:
        raise UsageError(
            f"{name} works in memory of the CPU, and the model is on {device}.",
            next_step="move the model to the CPU before attach, or take all-reduce, neighbor or diloco.",
        )
    return device
