"""What a user's loop does with a model and its optimizer, seen through torch's hooks.

The hooks are the optimizer's step hooks and, in a group of more than one, the model's forward hooks and the
parameters' hooks in backward. A step that was skipped (GradScaler calls no `step()` when it met an inf, or
the user's loop leaves one out) is noticed when, after a backward pass in training that no step followed, the
gradients are gone at the next forward or backward, or `settle` is called. Gradients that are still there at
the next forward are being accumulated, unless every step until then had one backward pass: then the step was
left out. What an optimizer computes inside of its step (LBFGS) is part of that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.core.errors import UsageError

if TYPE_CHECKING:
    from shoal.strategies.session import TrainingSession

log = logging.getLogger(__name__)
_NUM_ALIKE = 3
"""After so many steps alike one hook stands for all."""


def _do_nothing(*args: Any) -> None:
    """Stands in for the hooks in a copy of a model."""


class Hook(partial[None]):
    """Calls `act` as a forward hook; in a copy of the model (`deepcopy`, `torch.save`) it does nothing.

    A copy shares nothing with the group. It is a `partial`, so that a call goes straight to `act`.
    """

    __slots__ = ()

    def __new__(cls, act: Callable[..., None] = _do_nothing) -> Self:
        """Makes a hook that does this; without it, one that does nothing."""
        return super().__new__(cls, act)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls once, when the backward pass that is running is through; what it raises, `backward()` raises.

    The engine's queue is no documented name, though DDP and FSDP stand on it. The documented way,
    `register_multi_grad_hook`, keeps every gradient until the end, so that accumulating copies them all,
    loses count in a backward inside a backward, and remembers every pass that failed.
    """
    Variable._execution_engine.queue_callback(callback)


class LoopHooks:
    """The hooks of one session, which is told of forward passes, gradients, steps and skipped steps."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._strategy = session.strategy
        self._model = session.model
        self._optimizer = session.optimizer
        self._trainable = session.trainable
        self._hear = session.gradient_listener
        self._hooks: list[RemovableHandle] = []
        self._step_hooks: list[RemovableHandle] = []
        self._rates: list[Any] = []
        """The user's learning rates, while a step runs with others."""
        self.has_closure = False
        """Whether the step under way computes its gradients itself."""
        self._is_simple: bool | None = None
        """Whether each step until now had one forward and one backward pass; None before the first."""
        self._has_warned = False
        self._watches: dict[nn.Parameter, RemovableHandle] = {}
        """The hooks of parameters on a GPU."""
        self._first_accumulated: torch.Tensor | None = None
        """The parameter whose gradient came first in the last backward pass."""
        self._usual_first: torch.Tensor | None = None
        self._num_alike = 0
        """Steps in a row in whose backward passes it was the same, and all others came too."""
        self._forget()

    def _forget(self) -> None:
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
        self._is_tried = False
        """A step was called for the last backward pass, and has raised or is under way."""

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Calls a hook, inside backward, each time that a parameter's `.grad` has got its new value."""
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def listen(self) -> None:
        """Registers the hooks; those of the optimizer once, since they may be running."""
        if not self._step_hooks:
            self._step_hooks = [
                self._optimizer.register_step_pre_hook(self._before_step),
                self._optimizer.register_step_post_hook(self._after_step),
            ]
        if self._session.is_alone:
            return
        # before FSDP2's own hook, which would wait for a lost worker
        is_first = self._session.is_sharded
        self._hooks.append(
            self._model.register_forward_pre_hook(Hook(self._before_forward), prepend=is_first)
        )
        if self._strategy.hears("after_forward"):
            self._hooks.append(self._model.register_forward_hook(Hook(self._after_forward)))
        if self._session.device.type != "cpu" or self._session.is_sharded:
            # FSDP2 sets gradients itself, and calls no other hook of the parameters
            self._watch_on_device()
            return
        for parameter in self._trainable:
            self._hooks.append(parameter.register_hook(self._before_accumulation))  # type: ignore[no-untyped-call]
            self.on_accumulated(parameter, self._after_accumulation)
            if self._hear is not None:
                self.on_accumulated(parameter, self._hear)

    @property
    def user_rates(self) -> list[Any]:
        """The learning rate of each group of the optimizer, as the user has set it, also inside of a step."""
        return self._rates or [group["lr"] for group in self._optimizer.param_groups]

    def settle(self) -> None:
        """Makes up for steps that were skipped: no step will follow the last backward pass any more."""
        if self._is_stepping:
            return
        if self._has_backward:
            self._has_backward = self._is_between = False
            self._is_settled = True
            self._num_missed += 1
        while self._num_missed:
            self._num_missed -= 1
            self._session.step_skipped()

    def remove(self) -> int:
        """Takes the hooks off, and forgets what they have seen; how many skipped steps were still owed."""
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        return self.pause()

    def pause(self) -> int:
        """Takes all hooks off but those of the optimizer, which may be running, and forgets what they saw."""
        num_missed = self._num_missed + self._has_backward
        for hook in (*self._hooks, *self._watches.values()):
            hook.remove()
        self._hooks.clear()
        self._watches.clear()
        self._restore_rates()
        self._forget()
        return num_missed

    # The optimizer's hooks.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._is_tried = True
        if self._rates:
            self._restore_rates()
        if not self._has_backward and 0 < len(self._watches) < len(self._trainable):
            self._watch_anew()
        self._session.require_unchanged()
        if self._is_settled:
            self._require_unsettled()
        # the first of `args` is the optimizer
        self.has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        missed, self._num_missed = self._num_missed, 0
        factor = self._session.step_begins(missed)
        if factor != 1:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self._is_stepping = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._rates:
            self._restore_rates()
        self._is_simple = self._is_simple is not False and not self._is_between and not self.has_closure
        self._has_backward = self._is_seen = self._is_stepping = False
        self._is_between = self._is_tried = False
        if len(self._watches) > 1 and self._num_alike >= 0 and not self._strategy.shares_gradients:
            self._thin_out()
        self._session.step_ended()

    def _restore_rates(self) -> None:
        """Also after a step that raised, for which there is no hook."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _require_unsettled(self) -> None:
        self._is_settled = False
        if not self._has_backward:
            raise UsageError(
                "step() for gradients whose step has been counted as skipped.",
                cause="settle(), consensus_distance(), state_dict() or save() was called between backward() "
                "and step(); they take a step that has not come by then for one that was left out.",
                next_step="call them after step().",
            )

    # The model's hooks.

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if self._session.is_sharded:
            self._session.check_lost_peers()
        if self._is_stepping:
            return
        if not model.training:
            self._strategy.status_reporter.doing("evaluates")
        self._is_seen = False
        if not self._has_backward:
            return
        if self._are_gradients_gone() or self._was_step_omitted():
            self._has_backward = self._is_between = False
            self._session.step_skipped()
        elif model.training and torch.is_grad_enabled():
            self._is_between = True

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._is_stepping:
            self._session.forward_ended()

    def _was_step_omitted(self) -> bool:
        """Tells whether no step will follow the last backward pass, whose gradients are there; warns once."""
        is_training = self._model.training and torch.is_grad_enabled()
        is_open = self._is_tried or self._session.is_accumulating
        is_omitted = bool(self._is_simple) and is_training and not is_open
        if is_omitted and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: no step() followed a backward pass, as after all others before, and its gradients were "
                "kept: this counts as a step that was skipped. To add gradients up over several passes, put "
                "all but the last one into `with strategy.accumulate():`.",
                self._strategy.name,
            )
        return is_omitted

    # The parameters' hooks.

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
            self._has_backward = self._model.training

    def _are_gradients_gone(self) -> bool:
        if self._session.is_sharded:
            # one worker's part may be empty, or all zeros: their absence is the same on the whole machine
            return all(parameter.grad is None for parameter in self._trainable)
        return all(parameter.grad is None or not bool(parameter.grad.any()) for parameter in self._trainable)

    # On a GPU a step is short, and hooks lengthen it.

    def _watch_on_device(self) -> None:
        """Registers one hook for each parameter, which does what both do elsewhere.

        Where gradients are not shared in backward, the one that comes first is enough to know of a backward
        pass, once all have come in a few: see `_thin_out`.
        """
        self._watches = {
            parameter: parameter.register_post_accumulate_grad_hook(self._after_accumulation_on_device)  # type: ignore[no-untyped-call]
            for parameter in self._trainable
        }
        self._num_alike = 0

    def _after_accumulation_on_device(self, parameter: torch.Tensor) -> None:
        """Sees that gradients were zeroed by their absence alone: to look at values is to wait."""
        if not self._is_seen:
            if self._has_backward and not self._is_stepping and self._is_first_gradient(parameter):
                self._num_missed += 1
                self._has_backward = False
            self._first_accumulated = parameter
            self._after_accumulation(parameter)
        if self._hear is not None:
            self._hear(parameter)

    def _is_first_gradient(self, parameter: torch.Tensor) -> bool:
        """Tells whether no other parameter has a gradient."""
        return all(other.grad is None for other in self._trainable if other is not parameter)

    def _thin_out(self) -> None:
        """After a step: keeps one hook alone, once the same gradient came first in each of a few steps."""
        usual, self._usual_first = self._usual_first, self._first_accumulated
        is_alike = usual is self._usual_first and all(each.grad is not None for each in self._trainable)
        self._num_alike = self._num_alike + 1 if is_alike else 0
        if self._num_alike >= _NUM_ALIKE:
            for parameter in [each for each in self._watches if each is not usual]:
                self._watches.pop(parameter).remove()

    def _watch_anew(self) -> None:
        """Before a step: watches all parameters, for good, when a backward pass was not noticed."""
        is_missed = not self._is_settled and self._model.training
        if is_missed and any(each.grad is not None for each in self._trainable):
            for watch in self._watches.values():
                watch.remove()
            self._watch_on_device()
            self._has_backward = True
            self._num_alike = -1
