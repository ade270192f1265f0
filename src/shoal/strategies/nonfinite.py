"""Values that are not finite (NaN, infinities): which rank had them first, in which step, and what follows.

Each worker looks at what it computes itself, between what it has received and what it sends next. So a value
that turns up there is its own, and nobody has to be asked. Strategies that share gradients send them inside
of backward; all others send parameters after the optimizer's step, or what follows from them.

`warn` looks at a sample of large tensors: one pass over all of a model's values costs 2 to 3 % of a step
where a step does little else. The first row and the first column are in it. A matrix product or a convolution
spreads a NaN or an infinity over a whole row or column of its weight's gradient, so none of these is missed;
a single value can be. `skip` and `stop` promise that nothing is sent, and look at every value.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch

from shoal.core.errors import ShoalError
from shoal.strategies.attachment import Attachment
from shoal.strategies.common_options import OnNonfinite

log = logging.getLogger(__name__)

Sent: TypeAlias = Literal["gradients", "parameters", "nothing"]
"""What a strategy sends that must be looked at first."""

_WHOLE_ELEMENTS = 1 << 16
"""Up to this size a tensor is looked at as a whole: it is in the processor's cache."""
_DEVICE_STEPS = 16
"""So many steps are judged at once on a device: to judge is to wait for it."""


class _Look(NamedTuple):
    """A worker's own values at one moment of a step, as sums that are not finite where a value is not."""

    has_received: bool
    """It comes after other workers' values were taken in; otherwise before this worker's are sent."""
    sums: list[torch.Tensor]


class FiniteCheck:
    """Looks at one worker's gradients or parameters in every step, while a strategy is attached."""

    def __init__(self, mode: OnNonfinite, rank: int, attachment: Attachment, sent: Sent) -> None:
        self._mode = mode
        self._rank = rank
        self._attachment = attachment
        self._sent = sent
        self._computed: list[torch.Tensor] = []
        """Sums of the gradients that backward has left since the last step, before they are shared."""
        self._looks: list[_Look] = []
        self._history: list[tuple[int, list[_Look]]] = []
        """The steps that are not judged yet."""
        self._first_received: int | None = None
        """The step since which the parameters hold values of others that are not finite."""
        self._hidden: list[torch.Tensor | None] = []
        self._num_left_out = 0
        self._has_told = False
        if sent == "gradients":
            for parameter in attachment.parameters:
                attachment.on_accumulated(parameter, self._ready)

    # What the strategy reports, in the order of a step.

    def before_step(self, step: int) -> None:
        """The gradients are final. ShoalError with `stop`; with `skip` the optimizer finds none of them."""
        if self._mode == "warn":
            self._look()
        elif self._sent != "nothing" and not (self._attachment.has_closure or self._attachment.is_void):
            self._leave_out(step)

    def before_optimizer(self) -> None:
        """The strategy has done what it does before the optimizer's step, and may have received values."""
        if self._mode == "warn" and self._sent == "parameters":
            self._looks.append(_Look(True, self._sums(self._parameters())))

    def after_optimizer(self, step: int) -> None:
        """The strategy may send parameters next. ShoalError with `skip`, too: the step cannot be undone."""
        self._restore()
        if self._mode == "warn":
            self._look()
        elif self._sent == "parameters" and not _are_finite(self._sums(self._parameters())):
            where = _first(self._parameters())
            if where is not None:
                raise self._error(step, f"{where}, from the optimizer's step")

    def after_step(self, step: int) -> None:
        """The step is over; also one that was skipped."""
        self._attachment.is_left_out = False
        self._computed = []
        if self._mode != "warn" or self._sent == "nothing":
            return
        self._looks.append(_Look(True, self._sums(self._parameters())))
        self._history.append((step, self._looks))
        self._looks = []
        if self._attachment.device.type == "cpu" or len(self._history) == _DEVICE_STEPS:
            self._judge()

    def refused(self, step: int, consequence: str) -> None:
        """A gradient of this worker was not finite, and nobody has used it. ShoalError with `stop`."""
        where = _first(self._gradients()) or "a gradient holds nan or inf"
        if self._mode == "stop":
            raise self._error(step, where)
        self._num_left_out += 1
        self._tell(f"{self._what(step, where)} {consequence}")

    def closed(self, *, speaks_for_all: bool) -> None:
        """The loop has ended well. One worker says what no other may have said: nothing spreads in silence."""
        self._judge()
        if self._num_left_out > 1:
            log.warning("rank %d: %d steps were left out in all.", self._rank, self._num_left_out)
        if speaks_for_all and self._first_received is not None and not self._has_told:
            log.warning(
                "rank %d ends with parameters that are not finite, since step %d (counted from 0); what it sent "
                "until then was finite. To prevent it: --on-nonfinite skip or stop.",
                self._rank, self._first_received,
            )  # fmt: skip

    # `warn`: sums are taken in passing, and judged when the step is over.

    def _ready(self, parameter: torch.Tensor) -> None:
        """The hook of a parameter whose gradient backward has computed; it comes before the strategy's own."""
        if parameter.grad is not None:
            self._computed += self._sums({"": parameter.grad})

    def _look(self) -> None:
        """At what is sent next, or was sent since the last look."""
        if self._sent == "parameters":
            self._looks.append(_Look(False, self._sums(self._parameters())))
        elif self._computed:
            # a GradScaler that has found an infinity leaves the step out: that is what it is there for
            if not self._attachment.is_void:
                self._looks.append(_Look(False, self._computed))
            self._computed = []

    def _judge(self) -> None:
        history, self._history = self._history, []
        if not history:
            return
        if _are_finite([total for _, looks in history for look in looks for total in look.sums]):
            self._first_received = None
            return
        for step, looks in history:
            for look in looks:
                is_finite = _are_finite(look.sums)
                if look.has_received and is_finite:
                    self._first_received = None
                elif look.has_received and self._first_received is None:
                    self._first_received = step
                elif not (is_finite or self._has_told) and self._first_received is None:
                    self._warn(step)

    def _warn(self, step: int) -> None:
        where = _first(self._gradients()) or _first(self._parameters())
        if where is not None:  # else a sum was too large, and no value
            self._tell(
                f"{self._what(step, where, 'sent')} It spreads to the other workers. To prevent that: a lower "
                "learning rate, clipped gradients, or --on-nonfinite skip or stop."
            )

    # `skip` and `stop`: every value is looked at before it is used.

    def _leave_out(self, step: int) -> None:
        computed, self._computed = self._computed, []
        gradients = self._gradients()
        where = None if _are_finite(self._sums(gradients)) else _first(gradients)
        if where is None:
            return
        # A mean that is not finite is so on all members: all leave the step out, whoever was the cause.
        is_own = self._sent == "parameters" or not _are_finite(computed)
        if is_own and self._mode == "stop":
            raise self._error(step, where)
        self._attachment.is_left_out = True
        self._hidden = [parameter.grad for parameter in self._attachment.parameters]
        for parameter in self._attachment.parameters:
            parameter.grad = None
        if is_own:
            self._num_left_out += 1
            who = "It leaves" if self._sent == "parameters" else "All workers leave"
            self._tell(f"{self._what(step, where)} {who} this step out.")

    def _restore(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in zip(self._attachment.parameters, hidden, strict=False):
            parameter.grad = gradient

    # What is looked at, and what is said.

    def _sums(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        parts = (part for tensor in tensors.values() for part in self._parts(_real(tensor)))
        return [_sum(part) for part in parts]

    def _parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if self._mode != "warn" or tensor.numel() <= _WHOLE_ELEMENTS or tensor.dim() < 2:
            yield tensor
        else:
            yield tensor[0]
            yield tensor[(slice(None), *(0 for _ in tensor.shape[1:]))]

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._attachment.named_parameters.items()}

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self._attachment.named_parameters.items()
        return {
            f"the gradient of {name}": tensor.grad.detach()
            for name, tensor in named
            if tensor.grad is not None
        }

    def _what(self, step: int, where: str, verb: str = "has") -> str:
        return f"rank {self._rank} {verb} a value that is not finite in step {step} (counted from 0): {where}."

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


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision: that of halves would overflow where no value does."""
    if tensor.dtype is torch.float32:
        return tensor.sum()
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).float()


def _are_finite(sums: Iterable[torch.Tensor]) -> bool:
    known = list(sums)
    return not known or bool(torch.stack(known).sum().isfinite())


def _first(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Which one holds a value that is not finite; looks at every value."""
    for name, tensor in tensors.items():
        values = _real(tensor)
        if not bool(values.isfinite().all()):
            return f"{name} holds {'nan' if bool(values.isnan().any()) else 'inf'}"
    return None
