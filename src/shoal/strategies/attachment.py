"""One model and optimizer under a strategy: what they hold, and the hooks through which it is told of them.

The hooks are the optimizer's step hooks and, in a group of more than one, the model's forward hooks and the
parameters' hooks in backward. A step that was skipped (GradScaler calls no `step()` when it met an inf, or
the user's loop leaves one out) is noticed when, after a backward pass in training that no step followed, the
gradients are gone at the next forward or backward, or `settle` is called. Gradients that are still there at
the next forward are being accumulated, unless every step until then had one backward pass: then the step was
left out. What an optimizer computes inside of its step (LBFGS) is part of that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.status import tell_launcher
from shoal.strategies.hooks import Hook

log = logging.getLogger(__name__)
_NUM_ALIKE = 3
"""After so many steps alike one hook stands for all."""


class Removable(Protocol):
    """What torch gives for a hook."""

    def remove(self) -> None:
        """Take the hook off."""


class Listener(Protocol):
    """The strategy, as its attachment sees it; all of it is called in the user's thread."""

    name: ClassVar[str]
    runs_on_devices: ClassVar[bool]
    """Whether the model may be on a device."""
    steps: int

    @property
    def is_alone(self) -> bool:
        """Whether the group is one of one."""

    @property
    def shares_gradients(self) -> bool:
        """Whether the gradients of all trainable parameters are shared, whichever optimizer has them."""

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward pass now shares nothing, and no step follows it."""

    @property
    def hears_forward(self) -> bool:
        """Whether it is to be told that a forward is done."""

    def forward_ended(self) -> None:
        """The whole forward is done, in training with gradients."""

    def gradient_accumulated(self) -> None:
        """Backward has added to the gradient of a parameter on a GPU."""

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
    """The trainable ones that are shared, each once, in the order of the model; then the optimizer's own.

    Of the model those that the optimizer has: others may have another optimizer, and are between its steps.
    Where gradients are shared instead, all, but for those that a strategy on this model shares already.
    """
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
        self._is_settled = False
        """The step of the last backward pass was counted as left out, by `settle`."""
        self._is_between = False
        """A forward in training has come after the last backward pass, and no step yet."""
        self._is_simple: bool | None = None
        """Whether each step until now had one forward and one backward pass; None before the first."""
        self._is_tried = False
        """A step was called for the last backward pass, and has raised or is under way."""
        self._has_warned = False
        self.has_closure = False
        """Whether the step under way computes its gradients itself."""
        self.is_left_out = False
        """Whether the step under way finds no gradients, since some are not finite."""
        self._watches: dict[nn.Parameter, Removable] = {}
        """The hooks of parameters on a GPU."""
        self._first_accumulated: torch.Tensor | None = None
        """The parameter whose gradient came first in the last backward pass."""
        self._usual_first: torch.Tensor | None = None
        self._num_alike = 0
        """Steps in a row in whose backward passes it was the same, and all others came too."""
        self.named_tensors = _named_tensors(model, optimizer)
        trainable = {
            name: tensor
            for name, tensor in self.named_tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        known = _ids([tensor for group in optimizer.param_groups for tensor in group["params"]])
        taken = _shared_of(model, by_gradients=True)
        self.named_parameters = {
            name: tensor
            for name, tensor in trainable.items()
            if (id(tensor) not in taken if strategy.shares_gradients else id(tensor) in known)
        }
        self._not_shared = {
            name: tensor for name, tensor in trainable.items() if name not in self.named_parameters
        }
        self.parameters = list(self.named_parameters.values())
        is_any_device = strategy.is_alone or strategy.runs_on_devices
        self.device = _device_of(self.parameters, strategy.name, is_any_device=is_any_device)
        self._frozen = {name: tensor for name, tensor in self.named_tensors.items() if name not in trainable}
        self._num_optimized = _num_optimized(optimizer)

    @property
    def is_open(self) -> bool:
        """Whether the strategy is attached."""
        return self._is_open

    @property
    def shares_gradients(self) -> bool:
        """Whether the strategy shares gradients."""
        return self._strategy.shares_gradients

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
        _attached.setdefault(self.model, []).append(ref(self))
        self.add(self.model.register_forward_pre_hook(Hook(self._before_forward)))
        if self._strategy.hears_forward:
            self.add(self.model.register_forward_hook(Hook(self._after_forward)))
        if self.device.type != "cpu":
            self._watch_on_device()
            return
        for parameter in self.parameters:
            self.add(parameter.register_hook(self._before_accumulation))  # type: ignore[no-untyped-call]
            self.on_accumulated(parameter, self._after_accumulation)

    def _watch_on_device(self) -> None:
        """Register one hook for each parameter on a GPU, where a step is short and hooks lengthen it.

        It does what both hooks do elsewhere. Where gradients are not shared in backward, the one that comes
        first is enough to know of a backward pass, once all have come in a few: see `_thin_out`.
        """
        self._watches = {
            parameter: parameter.register_post_accumulate_grad_hook(self._after_accumulation_on_device)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        }
        self._num_alike = 0

    def _thin_out(self) -> None:
        """After a step: keep one hook alone, once the same gradient came first in each of a few steps."""
        usual, self._usual_first = self._usual_first, self._first_accumulated
        is_alike = usual is self._usual_first and all(each.grad is not None for each in self.parameters)
        self._num_alike = self._num_alike + 1 if is_alike else 0
        if self._num_alike >= _NUM_ALIKE:
            for parameter in [each for each in self._watches if each is not usual]:
                self._watches.pop(parameter).remove()

    def _watch_anew(self) -> None:
        """Before a step: watch all parameters, for good, when a backward pass was not noticed."""
        is_missed = not self._has_backward and not self._is_settled and self.model.training
        if is_missed and any(each.grad is not None for each in self.parameters):
            for watch in self._watches.values():
                watch.remove()
            self._watch_on_device()
            self._has_backward = True
            self._num_alike = -1

    def settle(self) -> None:
        """Make up for steps that were skipped: no step will follow the last backward pass any more."""
        if self._is_stepping:
            return
        if self._has_backward:
            self._has_backward = self._is_between = False
            self._is_settled = True
            self._num_missed += 1
        while self._num_missed:
            self._num_missed -= 1
            self._strategy.step_skipped()

    def silence(self) -> None:
        """Take the hooks off, and forget what they have seen."""
        for hook in (*self._hooks, *self._watches.values()):
            hook.remove()
        self._hooks.clear()
        self._watches.clear()
        self._restore_rates()
        self._has_backward = self._is_seen = self._is_stepping = False
        self._is_settled = self._is_between = self._is_tried = False
        self._num_missed = 0

    def close(self, *, is_failed: bool = False) -> None:
        """Detach; idempotent. With `is_failed` nothing is said to the group."""
        if not self._is_open:
            return
        self._is_open = False
        self._not_shared = {}
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
        if isinstance(error, SystemExit) and not error.code:
            tell_launcher(early_step=self._strategy.steps)
        self.close(is_failed=error is not None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._is_tried = True
        self._restore_rates()
        if 0 < len(self._watches) < len(self.parameters):
            self._watch_anew()
        self._require_unchanged()
        self._require_unsettled()
        self._warn_of_others()
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
        self._is_simple = self._is_simple is not False and not self._is_between and not self.has_closure
        self._has_backward = self._is_seen = self._is_stepping = self._is_between = False
        self._is_tried = False
        if len(self._watches) > 1 and not self._strategy.shares_gradients and self._num_alike >= 0:
            self._thin_out()
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
        if not self._has_backward:
            return
        is_gone = self._are_gradients_gone()
        if is_gone or self._is_left_out():
            if not is_gone:
                self._warn_once()
            self._has_backward = self._is_between = False
            self._strategy.step_skipped()
        elif model.training and torch.is_grad_enabled():
            self._is_between = True

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

    def _after_accumulation_on_device(self, parameter: torch.Tensor) -> None:
        """Does what both others do. That gradients were zeroed is seen by their absence alone there."""
        if not self._is_seen:
            others = (each for each in self.parameters if each is not parameter)
            is_due = self._has_backward and not self._is_stepping
            if is_due and all(other.grad is None for other in others):
                self._num_missed += 1
                self._has_backward = False
            self._is_seen = True
            self._first_accumulated = parameter
            if not (self._has_backward or self._is_stepping or self._strategy.is_accumulating):
                self._has_backward = self.model.training
        self._strategy.gradient_accumulated()

    def _is_left_out(self) -> bool:
        """Whether no step will follow the last backward pass, though its gradients are there."""
        is_training = self.model.training and torch.is_grad_enabled()
        is_open = self._is_tried or self._strategy.is_accumulating
        return bool(self._is_simple) and is_training and not is_open

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: no step() followed a backward pass, as after all others before, and its gradients were "
                "kept: this counts as a step that was skipped. To add gradients up over several passes, put "
                "all but the last one into `with strategy.accumulate():`.",
                self._strategy.name,
            )

    def _warn_of_others(self) -> None:
        """At the first step: name what has gradients, and is shared by no strategy on this model."""
        others, self._not_shared = self._not_shared, {}
        if not others or self._strategy.is_alone:
            return
        shared = _shared_of(self.model)
        names = [
            name for name, tensor in others.items() if tensor.grad is not None and id(tensor) not in shared
        ]
        if names:
            log.warning(
                "%s: %s %s trained, and not by this optimizer: the workers' values were equal at the start, "
                "and are not shared. Where a second optimizer trains them, attach a strategy of its own to "
                "it, before the first step: `shoal.from_args(group).attach(model, second_optimizer)`.",
                self._strategy.name,
                ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                "are" if len(names) > 1 else "is",
            )

    def _require_unsettled(self) -> None:
        is_settled, self._is_settled = self._is_settled, False
        if is_settled and not self._has_backward:
            raise UsageError(
                "step() for gradients whose step has been counted as skipped.",
                cause="settle(), consensus_distance(), state_dict() or save() was called between backward() "
                "and step(); they take a step that has not come by then for one that was left out.",
                next_step="call them after step().",
            )

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


_attached: WeakKeyDictionary[nn.Module, list[ReferenceType[Attachment]]] = WeakKeyDictionary()
"""What was attached to a model, to see which of its parameters are shared."""


def _shared_of(model: nn.Module, *, by_gradients: bool = False) -> dict[int, bool]:
    """The parameters of a model that are shared by strategies, or by those alone that share gradients."""
    attachments = [known() for known in _attached.get(model, ())]
    return _ids(
        [
            tensor
            for each in attachments
            if each is not None and each.is_open and (each.shares_gradients or not by_gradients)
            for tensor in each.parameters
        ]
    )


def _ids(tensors: Sequence[torch.Tensor]) -> dict[int, bool]:
    return {id(tensor): True for tensor in tensors}


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
            next_step="move the model to the CPU before attach, or take a strategy that trains there: "
            "all-reduce, neighbor, local-sgd, diloco, or, where nobody shall wait, pair, window or push-sum.",
        )
    return device
