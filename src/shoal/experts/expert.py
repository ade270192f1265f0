"""A piece of a model that is served and trained by itself: a module with its own optimizer.

Whoever runs it decides where, when and in which precision (under `torch.autocast`, whose cache must not
outlive one call: backward changes the weights). Networks, batches and files are not known here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.core import PeerRefused, ShoalError, UsageError
from shoal.experts.clipping import DEFAULT_FACTOR, GradientClip
from shoal.experts.schema import Example, ExpertSchema, discover_schema, run_on
from shoal.experts.state import (
    APPLIED_IDS,
    ExpertState,
    applied_ids,
    check_module_state,
    cpu_copy,
    ids_as_tensor,
    move_optimizer,
    optimizer_state,
    replace_parameters,
    restore_optimizer,
    restore_scheduler,
    scheduler_state,
)
from shoal.tensors.dtypes import dtype_named

log = logging.getLogger(__name__)


MAX_APPLIED_IDS = 1 << 14
"""Of 16 bytes each: what is sent again comes soon, while its client waits."""


class Expert:
    """A module, its optimizer and its schema, found by running an example of a batch.

    Asking does not train: `forward` changes neither weights nor running statistics (it may be retried and
    hedged); `backward` computes the forward again and does both. The module stays in the mode (training or
    evaluation) that it came in; dropout draws anew in backward, unless its mask is an input.

    Not thread-safe: everything that touches the module runs on one thread.
    """

    def __init__(
        self,
        uid: str,
        module: nn.Module,
        example: Example,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        clip_gradients: float = DEFAULT_FACTOR,
    ) -> None:
        if not uid:
            raise UsageError("An expert needs a uid.", next_step="name it, such as 'expert0' or 'ffn.3.14'.")
        _check_training(module, optimizer, scheduler, max_grad_norm)
        self.uid = uid
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        """Gradients of all parameters together are scaled down to this norm; None never does."""
        self.clip = GradientClip(clip_gradients)
        """Gradients are also scaled down to so many times the usual norm of this expert's; 0 never does."""
        self.schema: ExpertSchema = discover_schema(module, example)
        self.statistics = ExpertStatistics()
        self.num_updates = 0
        """Optimizer steps since the expert was made, those before a checkpoint included."""
        self.num_changes = 0
        """Times that anybody has changed its weights: steps, averages, loads. Who restores it from a file
        that need not be written again sets this back to 0."""
        self._applied_ids: dict[bytes, None] = {}
        self._is_schedule_over = False
        self._parameters = list(module.parameters())
        saved = module.state_dict()
        self._running = frozenset(name for name, _ in module.named_buffers() if name in saved)
        self._output_dtypes = tuple(dtype_named(schema.dtype) for schema in self.schema.outputs)
        self._has_gradient = tuple(
            dtype.is_floating_point or dtype.is_complex
            for dtype in (dtype_named(schema.dtype) for schema in self.schema.inputs)
        )

    def place(self, device: torch.device) -> None:
        """Move module and optimizer."""
        before = self._parameters
        self.module.to(device)
        self._parameters = list(self.module.parameters())
        if self.optimizer is not None:
            replace_parameters(self.optimizer, dict(zip(before, self._parameters, strict=True)))
            move_optimizer(self.optimizer)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs for a batch that is on the expert's device, in the schema's order; no gradient."""
        buffers = self._copies_of_buffers() if self._running else ()
        has_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # not `no_grad`, which takes as long as a small module
        try:
            outputs = self._call(inputs)
        finally:
            torch.set_grad_enabled(has_gradients)
            if buffers:
                _restore(buffers)
        self.statistics.num_forward_batches += 1
        self.statistics.num_forward_samples += inputs[0].shape[0]
        return outputs

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor],
        request_ids: Sequence[bytes] = (),
    ) -> list[torch.Tensor | None]:
        """Gradients for the inputs (None for integers and booleans), after one step of the optimizer.

        `request_ids` name the requests that the batch consists of, which `has_applied` knows from then on.
        Without an optimizer nothing is trained. RefusedUpdate when a gradient is not finite, MergedTooLarge
        when that of several requests would have to be clipped: then, and after any other error of the module,
        the expert is as it was before.
        """
        leaves = [
            tensor.detach().requires_grad_(has_gradient)
            for tensor, has_gradient in zip(inputs, self._has_gradient, strict=True)
        ]
        buffers = self._copies_of_buffers()
        try:
            with torch.enable_grad():
                outputs = self._call(leaves)
                is_update = self._differentiate(leaves, outputs, grad_outputs)
            gradients = [leaf.grad for leaf in leaves]
            self._check_and_clip(gradients, is_merged=len(request_ids) > 1)
            if is_update:
                self._step()
            self._note_applied(request_ids)
        except BaseException as error:
            _restore(buffers)
            self.statistics.num_refused_updates += isinstance(error, RefusedUpdate)
            raise
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        self.statistics.num_backward_batches += 1
        self.statistics.num_backward_samples += inputs[0].shape[0]
        return [
            torch.zeros_like(leaf, requires_grad=False) if gradient is None and has_gradient else gradient
            for leaf, gradient, has_gradient in zip(leaves, gradients, self._has_gradient, strict=True)
        ]

    def has_applied(self, request_id: bytes) -> bool:
        """Whether a backward with this id is part of what the expert has learned. For any thread."""
        return request_id in self._applied_ids

    def state(self) -> ExpertState:
        """All that `load` needs to go on training to the bit, copied to memory of the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self.module.state_dict().items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"The state of expert {self.uid} has {name}, a {type(value).__name__}, not a tensor.",
                    next_step="let the module's get_extra_state() give a tensor, or nothing.",
                )
            tensors[f"module.{name}"] = cpu_copy(value)
        if self._applied_ids:
            tensors[APPLIED_IDS] = ids_as_tensor(self._applied_ids)
        numbers: dict[str, Any] = {"num_updates": self.num_updates, "gradient_norms": self.clip.norms}
        if self.optimizer is not None:
            optimizer_tensors, numbers["optimizer"] = optimizer_state(self.optimizer)
            tensors |= optimizer_tensors
        if self.scheduler is not None:
            numbers["scheduler"] = scheduler_state(self.scheduler)
        return ExpertState(tensors, numbers)

    def load(self, state: ExpertState, *, keeps_settings: bool = False) -> list[str]:
        """Take over a state; what it lacks beside the module's tensors starts anew, and is told as warnings.

        With `keeps_settings`, learning rates and all other settings of optimizer and scheduler stay this
        expert's own, and so do the ids of requests that it has applied. UsageError, and nothing changed, when
        the module's tensors are not those of this expert.
        """
        module_tensors = check_module_state(self.uid, self.module, state.tensors)
        self.num_changes += 1
        self.module.load_state_dict(module_tensors)
        self.num_updates = state.num_updates
        self.clip.restore(state.numbers.get("gradient_norms"))
        if not keeps_settings:
            self._applied_ids = dict.fromkeys(applied_ids(state))
        self._is_schedule_over = False
        warnings: list[str] = []
        if self.optimizer is not None:
            warnings += restore_optimizer(self.optimizer, state, keeps_settings=keeps_settings)
        if self.scheduler is not None:
            warnings += restore_scheduler(self.scheduler, state, keeps_settings=keeps_settings)
        return [f"expert {self.uid}: {warning}" for warning in warnings]

    def parameters_and_buffers(self) -> dict[str, torch.Tensor]:
        """Floating ones by name, each once; the tensors themselves, so that writing to them is felt."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if tensor.is_floating_point()}

    def _call(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = run_on(self.module, self.schema.keyword_names, inputs)
        for output, dtype in zip(outputs, self._output_dtypes, strict=True):
            if output.dtype is not dtype:
                # under autocast a module may answer in another type than the one it has promised
                return tuple(map(torch.Tensor.to, outputs, self._output_dtypes))
        return tuple(outputs)

    def _differentiate(
        self,
        leaves: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor],
    ) -> bool:
        """Fill `.grad`; whether there is anything that the optimizer could apply."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, grad_outputs, strict=True)
            if output.requires_grad
        ]
        if not pairs:
            return False
        ends, gradients = zip(*pairs, strict=True)
        if self.optimizer is not None:
            torch.autograd.backward(ends, gradients)
            return True
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if wanted:
            # Unlike `backward`, this gives a gradient that merely passes through without a copy.
            found = torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
            for leaf, gradient in zip(wanted, found, strict=True):
                leaf.grad = gradient
        return False

    def _check_and_clip(self, input_gradients: Sequence[torch.Tensor | None], *, is_merged: bool) -> None:
        of_inputs = [gradient for gradient in input_gradients if gradient is not None]
        of_parameters = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not of_inputs and not of_parameters:
            return
        norms = _norms([*of_inputs, *of_parameters])
        total = math.hypot(*norms[len(of_inputs) :])
        if not math.isfinite(total) or not all(map(math.isfinite, norms)):
            where = "inputs" if math.isfinite(total) else "parameters"
            raise RefusedUpdate(
                f"A gradient for the {where} of expert {self.uid} is not finite; nothing was updated.",
                cause="NaN or infinity in the inputs or the gradients that were sent, or training diverges.",
                next_step="check the loss before backward(), lower the learning rate, or clip gradients.",
            )
        if total == 0:
            return  # nothing to scale, and it says nothing of what is usual
        limit = self.clip.limit(self._weight_norm)
        if total > limit:
            if is_merged:
                raise MergedTooLarge(f"The gradient of several requests for {self.uid} would be clipped.")
            self.statistics.num_clipped_updates += 1
        applied = min(total, limit, self.max_grad_norm or math.inf)
        if applied < total:
            for gradient in of_parameters:
                gradient.mul_(applied / total)
        is_to_start_anew = self.clip.remember(applied, self._weight_norm)
        if is_to_start_anew and self.optimizer is not None and self.optimizer.state:
            self.optimizer.state.clear()
            log.warning(
                "The optimizer of expert %s starts anew: one of its first gradients was far too large.",
                self.uid,
            )

    def _weight_norm(self) -> float:
        return math.hypot(*_norms(self._parameters))

    def _note_applied(self, request_ids: Sequence[bytes]) -> None:
        self._applied_ids.update(dict.fromkeys(request_ids))
        while len(self._applied_ids) > MAX_APPLIED_IDS:
            del self._applied_ids[next(iter(self._applied_ids))]

    def _step(self) -> None:
        assert self.optimizer is not None
        self.num_changes += 1  # before: a step that fails may have changed some
        self.optimizer.step()
        self.num_updates += 1
        if self.scheduler is not None and not self._is_schedule_over:
            self._step_scheduler(self.scheduler)

    def _step_scheduler(self, scheduler: LRScheduler) -> None:
        """A schedule that cannot go on stays where it is: the step that was made is not taken back."""
        last_epoch = scheduler.last_epoch
        try:
            scheduler.step()
        except Exception as error:  # noqa: BLE001 - OneCycleLR's at its end, or one of one's own
            scheduler.last_epoch = last_epoch
            self._is_schedule_over = True
            log.warning(
                "The scheduler of expert %s fails, so that the learning rate stays from now on: %s",
                self.uid,
                error,
            )

    def _copies_of_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self._running:
            return []
        return [
            (buffer, buffer.clone()) for name, buffer in self.module.named_buffers() if name in self._running
        ]


def _restore(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, copy in buffers:
            buffer.copy_(copy)


@torch.no_grad()
def _norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    norms = [_norm(tensor) for tensor in tensors]
    if norms[0].is_cpu:
        return [norm.item() for norm in norms]
    # One wait for the device, however many there are.
    floats: list[float] = torch.stack(norms).tolist()
    return floats


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    # The norm of a large half-precision tensor is soon beyond what its own type can hold.
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def _check_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    max_grad_norm: float | None,
) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(
            f"max_grad_norm must be above 0, not {max_grad_norm}.", next_step="None never clips."
        )
    if scheduler is not None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau needs a loss, which an expert never sees.",
                next_step="use a scheduler that counts steps, such as LambdaLR.",
            )
        if scheduler.optimizer is not optimizer:
            raise UsageError("The scheduler belongs to another optimizer than the one given.")
    if optimizer is not None:
        own = {id(parameter) for parameter in module.parameters()}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all(id(parameter) in own for parameter in trained):
            raise UsageError(
                "The optimizer has parameters that are not the module's.",
                next_step="make it from module.parameters() of the very module that is given.",
            )


class RefusedUpdate(PeerRefused):
    """A gradient was not finite; the expert is as it was before."""


class MergedTooLarge(ShoalError):
    """The gradient of several requests together is above the limit: each has to be computed by itself.

    One of them may be a liar's, beside which the others would be scaled down to nothing.
    """


@dataclass(slots=True)
class ExpertStatistics:
    """Counts of what was finished; the expert counts, and whoever runs it adds the seconds."""

    num_forward_batches: int = 0
    num_forward_samples: int = 0
    num_backward_batches: int = 0
    num_backward_samples: int = 0
    num_refused_updates: int = 0
    num_clipped_updates: int = 0
    """Steps whose gradient was far above what is usual for the expert."""
    busy_s: float = 0.0
    """Time that the device spent on this expert."""

    @property
    def num_batches(self) -> int:
        """Counts forward and backward batches together."""
        return self.num_forward_batches + self.num_backward_batches

    @property
    def num_samples(self) -> int:
        """Counts samples of forward and backward together."""
        return self.num_forward_samples + self.num_backward_samples

    @property
    def mean_batch_size(self) -> float:
        """Samples a batch; 0 before the first one."""
        return self.num_samples / self.num_batches if self.num_batches else 0.0

    @property
    def samples_per_busy_s(self) -> float:
        """The rate while the device works on this expert, whatever it does in between; 0 if unknown."""
        return self.num_samples / self.busy_s if self.busy_s > 0 else 0.0
