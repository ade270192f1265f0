"""Values that are not finite (NaN, infinities): which rank had them first, in which step, and what follows.

Each worker looks at the gradients that it has computed itself, before they are shared, and at its parameters
when the step is over. Gradients that are not finite, from parameters that were, are its own doing, and nobody
has to be asked. Parameters that are not, where its gradients were, hold what others have sent.

`warn` looks at the first row of large tensors: one pass over all of a model's values costs 2 to 3 % of a step
where a step does little else. A NaN in a loss or in an activation reaches all gradients before it, and is not
missed; a single value of a large tensor can be. `skip` and `stop` promise that no such gradient is used, and
look at every value of it.

On a GPU every operation costs as much as a layer of a small model, and a look at its result waits for all
that was given to it. There `warn` keeps one small gradient of each step, looks at those of many steps at
once, and reads what came of it as many steps later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias

import torch

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import ShoalError
from shoal.tensors import local_part
from shoal.tensors.buckets import as_real

if TYPE_CHECKING:
    from shoal.strategies.session import TrainingSession

log = logging.getLogger(__name__)

Checked: TypeAlias = Literal["in backward", "before the step", "never"]
"""When gradients are looked at: before they are shared, if they are."""

_WHOLE_ELEMENTS = 1 << 16
"""Up to this size a tensor is looked at as a whole, above it at its first row."""
_DEVICE_S, _DEVICE_STEPS = 1.0, 256
"""On a device the steps of a second, or so many, are judged at once, parameters after the last of them."""
_LOOK_STEPS = 16
"""The clock is looked at after so many steps."""
_SAMPLE_ELEMENTS = 1 << 13
"""A gradient that is kept until then has at most so many values."""


class _Look(NamedTuple):
    """What one step has left: sums that are not finite where a value is not, or on a device a gradient."""

    step: int
    gradients: Sequence[torch.Tensor]
    """Of this worker alone, before they were shared."""
    parameters: Sequence[torch.Tensor]
    """At the end, with what has come from others."""


class FiniteCheck:
    """Looks at one worker's gradients and parameters in every step, while a strategy is attached."""

    def __init__(self, session: TrainingSession) -> None:
        self._mode = session.options.on_nonfinite
        self._is_on_cpu = session.device.type == "cpu"
        self._rank = session.group.rank
        self._session = session
        self._checked: Checked = "in backward" if session.strategy.shares_gradients else "before the step"
        if session.is_alone or session.group.size == 1 or not session.strategy.checks_finite:
            self._checked = "never"
        self._is_looked_at_later = self._mode == "warn" and self._checked == "before the step"
        """Whether gradients are looked at when the step is over, which leaves them as they are."""
        self.looks_before_step = self._checked != "never" and not self._is_looked_at_later
        """Whether `before_step` has anything to do."""
        self.is_hiding = False
        """Whether gradients are hidden, and `after_optimizer` is due."""
        self._own: list[torch.Tensor] = []
        """Sums of the gradients that this worker has computed since the last step."""
        self._looks: list[tuple[int, Sequence[torch.Tensor]]] = []
        """Of the steps on a device that are not judged yet: each with the gradients that are kept of it."""
        self._pending: _Pending | None = None
        """What a device was asked for, and is read when the next steps are to be judged."""
        small = (each for each in session.trainable if each.numel() <= _SAMPLE_ELEMENTS)
        self._sampled = next(small, next(iter(session.trainable), None))
        """The parameter whose gradient is looked at alone, the first small one: a NaN of a loss, or of an
        activation behind it, comes to it."""
        self._is_sample_large = self._sampled is not None and self._sampled.numel() > _SAMPLE_ELEMENTS
        self._last_sample: torch.Tensor | None = None
        self._looked_s = SYSTEM_CLOCK.now_s()
        self._first_received: int | None = None
        """The step since which the parameters hold values of others that are not finite."""
        self._hidden: list[torch.Tensor | None] = []
        self._is_skipped = False
        self._num_left_out = 0
        self._has_told = False
        if self._checked == "in backward" and self._is_on_cpu:
            for parameter in session.trainable:
                session.on_gradient(parameter, self._ready)

    # What the strategy reports, in the order of a step.

    def before_step(self, step: int) -> None:
        """Looks at the final gradients. ShoalError with `stop`; with `skip` the optimizer finds none."""
        if self._session.is_void:
            # a GradScaler that has found an infinity leaves the step out: that is what it is there for
            self._own = []
        elif self._mode != "warn" and not self._session.has_closure:
            self._leave_out(step)

    def after_optimizer(self) -> None:
        """Gives hidden gradients back: the optimizer has stepped, if it was to."""
        hidden, self._hidden = self._hidden, []
        self.is_hiding = False
        for parameter, gradient in zip(self._session.trainable, hidden, strict=False):
            parameter.grad = gradient

    def hide_gradients(self) -> None:
        """Leaves the optimizer nothing to do in the step that comes; afterwards they are there again.

        A step may have two reasons for it: a value that is not finite, and a peer that was lost.
        """
        if not self.is_hiding:
            self._hidden = [parameter.grad for parameter in self._session.trainable]
        self.is_hiding = True
        for parameter in self._session.trainable:
            parameter.grad = None

    def after_step(self, step: int) -> None:
        """Looks at the parameters of a step that is over; also of one that was skipped."""
        if self._checked == "never":
            return
        is_skipped, self._is_skipped = self._is_skipped, False
        if not self._is_on_cpu:
            self._after_step_on_device(step, is_skipped=is_skipped)
            return
        self._session.is_left_out = False
        own, self._own = self._own, []
        with torch.no_grad():
            parameters = self._sums(self._session.trainable, is_whole=False)
        if _are_finite([*own, *parameters]):
            self._first_received = None
        else:
            self._judge([_Look(step, own, parameters)])

    def _after_step_on_device(self, step: int, *, is_skipped: bool) -> None:
        """Keeps what is to be looked at, and looks at what many steps have left when it is time."""
        session, looks = self._session, self._looks
        if self._is_looked_at_later and not is_skipped and not session.is_void:
            looks.append((step, self._sample()))  # the optimizer leaves gradients as they are
        else:
            looks.append((step, self._own))
        self._own = []
        session.is_left_out = False
        if len(looks) % _LOOK_STEPS == 0:
            now_s = SYSTEM_CLOCK.now_s()
            if len(looks) >= _DEVICE_STEPS or now_s - self._looked_s >= _DEVICE_S:
                self._looked_s = now_s
                self._judge_pending()
                # what is not finite stays so: the parameters of the last step are enough
                self._pending = _Pending.ask(self._take_looks([_norm(session.trainable)]))

    def skipped_step(self) -> None:
        """Forgets the gradients of a step that a GradScaler leaves out, since it has found an infinity."""
        self._own = []
        self._is_skipped = True

    def refused(self, step: int, consequence: str) -> None:
        """Tells of an own gradient that was not finite and that nobody used. ShoalError with `stop`."""
        if self._first_received is not None:
            return
        where = _first(self._gradients()) or "a gradient holds nan or inf"
        if self._mode == "stop":
            raise self._error(step, where)
        self._num_left_out += 1
        self._tell(f"{self._what(step, where)} {consequence}")

    def closed(self, *, speaks_for_all: bool) -> None:
        """Ends with the loop. One worker says so if the model is spoiled: maybe no other has."""
        self._judge_pending()
        self._judge(self._take_looks([]))
        if self._num_left_out > 1:
            log.warning("rank %d: %d steps were left out in all.", self._rank, self._num_left_out)
        if speaks_for_all and self._first_received is not None and not self._has_told:
            log.warning(
                "rank %d ends with parameters that are not finite, since step %d (counted from 0); what it "
                "sent until then was finite. To prevent it: --on-nonfinite skip or stop.",
                self._rank, self._first_received,
            )  # fmt: skip

    # Sums are taken in passing, and judged when the step is over.

    def _ready(self, parameter: torch.Tensor) -> None:
        """The hook of a parameter whose gradient backward has computed; the strategy's own comes later."""
        if parameter.grad is not None:
            self._own += self._sums((parameter.grad,))

    def sharing(self) -> None:
        """Takes a look in backward at gradients on a device that are about to be shared."""
        if self._checked == "in backward":
            self._own = self._sums(self._gradients().values()) if self._mode != "warn" else self._sample()

    def _sample(self) -> list[torch.Tensor]:
        gradient = None if self._sampled is None else self._sampled.grad
        if gradient is None:
            return []
        last, self._last_sample = self._last_sample, gradient
        # one that stays from step to step is overwritten, one that is new in every step stays what it is
        if last is None or gradient is last or self._is_sample_large:
            return self._sums((gradient.detach(),))
        return [gradient.detach() if gradient.requires_grad else gradient]

    def _take_looks(self, parameters: Sequence[torch.Tensor]) -> list[_Look]:
        """Gives what the steps until now have left; of the last one also what is said of parameters."""
        looks, self._looks = [_Look(step, own, []) for step, own in self._looks], []
        if looks:
            looks[-1] = looks[-1]._replace(parameters=parameters)
        return looks

    def _judge_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.is_there is not None:
            pending.is_there.synchronize()
        if math.isfinite(pending.norm.item()):
            self._first_received = None
        else:
            self._judge(pending.looks)

    def _judge(self, looks: Sequence[_Look]) -> None:
        """Finds the first step, of some in which a value may not be finite, that had one, and says so."""
        for look in looks:
            was_finite = self._first_received is None
            gradients = look.gradients
            if not self._is_on_cpu:
                gradients = self._sums(gradients, is_whole=True)
            elif self._checked == "before the step":
                gradients = self._sums(self._gradients().values(), is_whole=True)  # they are still there
            if was_finite and not self._has_told and not _are_finite(gradients):
                self._warn(look.step)
            if not look.parameters:
                continue
            if _are_finite(look.parameters):
                self._first_received = None
            elif was_finite:
                self._first_received = look.step
                where = _first(self._parameters()) if self._mode != "warn" else None
                if where is not None:
                    raise self._error(look.step, where)

    def _warn(self, step: int) -> None:
        where = _first(self._gradients()) or _first(self._parameters())
        if where is not None:  # else a sum was too large, and no value
            self._tell(
                f"{self._what(step, where, 'sent')} It spreads to the other workers. To prevent that: a "
                "lower learning rate, clipped gradients, or --on-nonfinite skip or stop."
            )

    def _leave_out(self, step: int) -> None:
        own, self._own = self._own, []
        gradients = self._gradients()
        where = None if _are_finite(self._sums(gradients.values())) else _first(gradients)
        if where is None:
            return
        # A mean that is not finite is so on all members: all leave the step out, whoever was the cause.
        is_own = self._checked == "before the step" or not _are_finite(own)
        if is_own and self._mode == "stop":
            raise self._error(step, where)
        self._session.is_left_out = True
        self.hide_gradients()
        if is_own:
            self._num_left_out += 1
            who = "It leaves" if self._checked == "before the step" else "All workers leave"
            self._tell(f"{self._what(step, where)} {who} this step out.")

    # What is looked at, and what is said.

    def _sums(self, tensors: Iterable[torch.Tensor], *, is_whole: bool | None = None) -> list[torch.Tensor]:
        is_whole = self._mode != "warn" if is_whole is None else is_whole
        sums = []
        for given in tensors:
            tensor = _real(given)
            is_small = tensor.numel() <= _WHOLE_ELEMENTS or tensor.dim() < 2
            sums.append(_sum(tensor if is_whole or is_small else tensor[0]))
        return sums

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._session.named_parameters.items()}

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self._session.named_parameters.items()
        return {
            f"the gradient of {name}": tensor.grad.detach()
            for name, tensor in named
            if tensor.grad is not None
        }

    def _what(self, step: int, where: str, verb: str = "has") -> str:
        rank = self._rank
        return f"rank {rank} {verb} a value that is not finite in step {step} (counted from 0): {where}."

    def _tell(self, line: str) -> None:
        if not self._has_told:
            self._has_told = True
            log.warning("%s", line)

    def _error(self, step: int, where: str) -> ShoalError:
        return ShoalError(
            self._what(step, where),
            cause="the learning rate is too high, a batch holds a NaN, or a loss divides by zero.",
            next_step="lower the learning rate, clip gradients, check the data, or leave such steps out with "
            "--on-nonfinite skip.",
        )


class _Pending(NamedTuple):
    """What some steps have left on a device, and the norm of it, on its way to the processor."""

    looks: Sequence[_Look]
    norm: torch.Tensor
    is_there: torch.cuda.Event | None

    @classmethod
    def ask(cls, looks: Sequence[_Look]) -> Self:
        """Tells the device to compute the norm, and does not wait for it."""
        norm = _norm([tensor for look in looks for tensor in (*look.gradients, *look.parameters)])
        copy = torch.empty((), dtype=norm.dtype, pin_memory=norm.is_cuda).copy_(norm, non_blocking=True)
        is_there = torch.cuda.current_stream(norm.device).record_event() if norm.is_cuda else None
        return cls(looks, copy, is_there)


@torch.no_grad()
def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Computes one number from all of them, by few operations; not finite where a value is not."""
    return torch.nn.utils.get_total_norm([_real(tensor) for tensor in tensors])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_part(tensor)
    if tensor.dtype is torch.float32 and not tensor.is_sparse:
        return tensor
    return as_real(tensor._values() if tensor.is_sparse else tensor)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision: that of halves would overflow where no value does."""
    if tensor.dtype is torch.float32:
        return tensor.sum()
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).float()


def _are_finite(sums: Sequence[torch.Tensor]) -> bool:
    return not sums or math.isfinite(torch.stack(list(sums)).sum().item())


def _first(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Which one holds a value that is not finite; looks at every value."""
    for name, tensor in tensors.items():
        values = _real(tensor)
        if not bool(values.isfinite().all()):
            return f"{name} holds {'nan' if bool(values.isnan().any()) else 'inf'}"
    return None
