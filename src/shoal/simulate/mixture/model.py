"""The network of the convergence experiment: a linear layer, mixtures or dense blocks, a norm, logits.

On an accelerator one trainer's step is recorded once, and replayed by one launch instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch.nn import functional

from shoal.simulate.mixture.experts import (
    AdamMoments,
    ExpertBank,
    Routing,
    adam_step,
    evaluate_rows,
    through_experts,
)
from shoal.simulate.mixture.settings import (
    EVALUATION_ROWS,
    NUM_CLASSES,
    NUM_FEATURES,
    MixtureRunSettings,
)


class StepGradients(msgspec.Struct, kw_only=True):
    """The gradients of one trainer's step, on their way."""

    loss: torch.Tensor
    trunk: list[torch.Tensor]
    """Of everything but experts; matrices, as they are few."""
    rows: list[int]
    """In the bank's pool, one for each expert of each sample in each layer."""
    experts: torch.Tensor
    """Of the rows; −1 where the gradient was lost."""
    num_layers: int
    _listed: list[int] = []

    def of_layer(self, layer: int) -> tuple[list[int], list[int]]:
        """Rows and their experts."""
        if not self._listed:
            self._listed = self.experts.tolist()
        size = len(self.rows) // self.num_layers
        span = slice(layer * size, (layer + 1) * size)
        return self.rows[span], self._listed[span]


class Pass(msgspec.Struct):
    """What a pass of some trainers at once gives."""

    losses: torch.Tensor
    trunk: tuple[torch.Tensor, ...]
    """The gradients of the trunk, `[trainers, …]`."""
    experts: torch.Tensor
    """The experts of all rows, `[trainers, layers · rows]`."""
    rows: list[list[int]]
    """By layer, in the order of trainers, samples and their experts."""


_NUM_REHEARSALS = 3
"""Before a step can be recorded, libraries have to be loaded and buffers allocated."""


class RecordedStep:
    """One trainer's step, recorded on a GPU and replayed; on the CPU it is computed anew each time."""

    def __init__(self, model: MixtureModel, generator: torch.Generator) -> None:
        settings = model.settings
        device = torch.device(settings.device)
        self._model = model
        self._generator = generator
        self._x = torch.zeros(1, settings.batch_size, NUM_FEATURES, device=device)
        self._labels = torch.zeros(1, settings.batch_size, dtype=torch.int64, device=device)
        self._num_rows = settings.num_layers * settings.rows_a_layer
        self._staging = model.bank.pool.take(self._num_rows, 0)
        self._address = 0
        self._replay: Callable[[], Pass] | None = None

    def run(self, x: torch.Tensor, labels: torch.Tensor) -> StepGradients:
        """Computes the gradients of one trainer, of `[1, batch, features]`."""
        bank, settings = self._model.bank, self._model.settings
        for layer in range(settings.num_layers):
            bank.update(layer)
        self._x.copy_(x)
        self._labels.copy_(labels)
        address = bank.pool.span(0, 1).data_ptr()
        if self._replay is None or self._address != address:
            self._replay, self._address = self._record(), address
        done = self._replay()
        first = bank.pool.take(self._num_rows, bank.num_updates)
        bank.pool.span(first, self._num_rows).copy_(bank.pool.span(self._staging, self._num_rows))
        return StepGradients(
            loss=done.losses[0].clone(),
            trunk=[part[0].clone(memory_format=torch.contiguous_format) for part in done.trunk],
            rows=list(range(first, first + self._num_rows)),
            experts=done.experts[0].clone(),
            num_layers=settings.num_layers,
        )

    def _pass(self) -> Pass:
        settings = self._model.settings
        firsts = range(self._staging, self._staging + self._num_rows, settings.rows_a_layer)
        return self._model.pass_through(self._x, self._labels, list(firsts))

    def _record(self) -> Callable[[], Pass]:
        if self._x.device.type != "cuda":
            return self._pass
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_NUM_REHEARSALS):
                self._pass()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            done = self._pass()

        def replay() -> Pass:
            graph.replay()
            return done

        return replay


_GATHERED_ROWS = 32
"""Up to so many, an accelerator gathers the weights of each row; of more, several share an expert."""


class _Choice(msgspec.Struct):
    """Of the experts of one layer; all `[samples, active]`."""

    experts: torch.Tensor
    weights: torch.Tensor
    has_answer: torch.Tensor | None = None
    """False where no expert was left to ask, or the gradient will be lost; None where all is well."""


class _Gate(msgspec.Struct):
    """Of one layer; all `[trainers, …]`."""

    scale: torch.Tensor
    shift: torch.Tensor
    keys: torch.Tensor


class MixtureModel:
    """Its parameters are plain tensors: `trunk`, which an optimizer of its own updates, and `bank`."""

    def __init__(self, settings: MixtureRunSettings) -> None:
        self.settings = settings
        device = torch.device(settings.device)
        self._generator = torch.Generator(device).manual_seed(settings.seed)
        is_cpu = device.type == "cpu"
        self.gathered_rows = 0 if is_cpu or not settings.has_gate else _GATHERED_ROWS
        self.bank = ExpertBank(settings, self._generator, is_one_by_one=is_cpu or not settings.has_gate)
        dim, count = settings.layer_dim, settings.num_layers
        last_norm = [torch.ones(dim, device=device), torch.zeros(dim, device=device)]
        self.trunk = [*self._linear(NUM_FEATURES, dim), *last_norm, *self._linear(dim, NUM_CLASSES)]
        """First linear layer, last norm, last linear layer; then those of `gate`, if it is trained."""
        self.gate: list[torch.Tensor] = []
        """Scales and shifts of its norms, and keys, each for all layers."""
        if settings.has_gate:
            keys = torch.randn(count, dim, settings.num_experts, generator=self._generator, device=device)
            self.gate = [torch.ones(count, dim, device=device), torch.zeros(count, dim, device=device), keys]
            if not settings.is_faithful:
                self.trunk += self.gate
        self._moments = [AdamMoments(part) for part in self.trunk]
        self._recorded = RecordedStep(self, self._generator) if self.gathered_rows and not is_cpu else None

    def gradients(self, x: torch.Tensor, labels: torch.Tensor) -> list[StepGradients]:
        """Forward and backward of `[trainers, batch, features]`: of each trainer, those of its own loss."""
        if self._recorded is not None and len(labels) == 1:
            return [self._recorded.run(x, labels)]
        num_rows = len(labels) * self.settings.rows_a_layer
        pool, layers = self.bank.pool, range(self.settings.num_layers)
        done = self.pass_through(x, labels, [pool.take(num_rows, self.bank.num_updates) for _ in layers])
        size = self.settings.rows_a_layer
        return [
            StepGradients(
                loss=done.losses[trainer],
                trunk=[part[trainer].contiguous() for part in done.trunk],
                rows=[row for rows in done.rows for row in rows[trainer * size : (trainer + 1) * size]],
                experts=done.experts[trainer],
                num_layers=self.settings.num_layers,
            )
            for trainer in range(len(labels))
        ]

    def pass_through(self, x: torch.Tensor, labels: torch.Tensor, first_rows: list[int]) -> Pass:
        """Goes once forward and back; what experts get is left in the pool, by layer from those rows on."""
        num_trainers, size = labels.shape
        trunk = [part.expand(num_trainers, *part.shape).requires_grad_() for part in self.trunk]
        rows_of_layers, experts_of_layers = [], []
        hidden = _linear(x, trunk[0], trunk[1])
        for layer, gate in enumerate(self._gates(trunk[6:] or self._frozen_gate(num_trainers))):
            self.bank.update(layer)
            choice = self._choose(hidden, layer, gate, self.settings.failure_rate)
            routing = Routing(choice.experts, is_grouped=choice.experts.numel() > self.gathered_rows)
            first_row = first_rows[layer]
            pairs = through_experts(hidden.flatten(0, 1), self.bank, routing, first_row)
            if choice.has_answer is not None:
                if self.settings.backward_failure_rate:
                    choice.has_answer &= ~self._failed(choice.experts, self.settings.backward_failure_rate)
                    pairs = torch.where(choice.has_answer.unsqueeze(2), pairs, pairs.detach())
                choice.experts = torch.where(choice.has_answer, choice.experts, -1)
            rows_of_layers.append([first_row + row for row in routing.rows_of_pairs])
            experts_of_layers.append(choice.experts.view(num_trainers, -1))
            hidden = torch.bmm(choice.weights.unsqueeze(1), pairs).view_as(hidden)
        logits = _linear(_normed(hidden, trunk[2], trunk[3]), trunk[4], trunk[5])
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view(num_trainers, size).mean(1)
        gradients = torch.autograd.grad(losses.sum(), trunk)
        return Pass(losses.detach(), gradients, torch.cat(experts_of_layers, dim=1), rows_of_layers)

    def update_trunk(self, gradients: list[torch.Tensor]) -> None:
        """One step of the optimizer of everything but experts."""
        adam_step(self.trunk, gradients, self._moments, self.settings.learning_rate)

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Mean loss and accuracy; how many are computed at once makes no difference to this model."""
        failure_rate = self.settings.failure_rate if self.settings.is_faithful else 0.0
        loss = torch.zeros((), device=x.device)
        num_right = torch.zeros((), device=x.device)
        at_once = max(1, EVALUATION_ROWS * self.settings.batch_size // self.settings.rows_a_layer)
        trunk = [part.unsqueeze(0) for part in self.trunk]
        gates = self._gates(trunk[6:] or self._frozen_gate(1))
        for layer in range(self.settings.num_layers):
            self.bank.update(layer)
        for images, truth in zip(torch.split(x, at_once), torch.split(labels, at_once), strict=True):
            hidden = _linear(images.unsqueeze(0), trunk[0], trunk[1])
            for layer, gate in enumerate(gates):
                choice = self._choose(hidden, layer, gate, failure_rate)
                hidden = evaluate_rows(hidden[0], self.bank, choice.experts, choice.weights).unsqueeze(0)
            logits = _linear(_normed(hidden, trunk[2], trunk[3]), trunk[4], trunk[5])[0]
            loss += functional.cross_entropy(logits, truth, reduction="sum")
            num_right += (logits.argmax(1) == truth).sum()
        return loss.item() / len(x), num_right.item() / len(x)

    def _frozen_gate(self, num_trainers: int) -> list[torch.Tensor]:
        return [part.expand(num_trainers, *part.shape) for part in self.gate]

    def _gates(self, parts: list[torch.Tensor]) -> list[_Gate | None]:
        if not parts:
            return [None] * self.settings.num_layers
        scales, shifts, keys = parts
        layers = zip(
            scales.unbind(1), shifts.unbind(1), functional.normalize(keys, dim=-1).unbind(1), strict=True
        )
        return [_Gate(*layer) for layer in layers]

    def _choose(self, x: torch.Tensor, layer: int, gate: _Gate | None, failure_rate: float) -> _Choice:
        first_expert = layer * self.settings.experts_a_layer
        num_samples = x.shape[0] * x.shape[1]
        if gate is None:
            chosen = torch.full((num_samples, 1), first_expert, device=x.device)
            return _Choice(chosen, torch.ones(num_samples, 1, device=x.device))
        logits = torch.bmm(_normed(x, gate.scale, gate.shift), gate.keys).flatten(0, 1)
        has_answer = None
        if failure_rate:
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill(self._failed(logits, failure_rate), lowest)
        best, chosen = logits.topk(self.settings.num_active, dim=1)
        weights = functional.softmax(best, dim=1)
        if failure_rate:
            has_answer = best > lowest
            weights = weights * has_answer
        elif self.settings.backward_failure_rate:
            has_answer = torch.ones_like(chosen, dtype=torch.bool)
        return _Choice(chosen + first_expert, weights, has_answer)

    def _failed(self, like: torch.Tensor, rate: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=self._generator, device=like.device) < rate

    def _linear(self, num_inputs: int, num_outputs: int) -> list[torch.Tensor]:
        bound = num_inputs**-0.5
        shapes = ((num_outputs, num_inputs), (num_outputs,))
        device = self._generator.device
        return [
            torch.empty(shape, device=device).uniform_(-bound, bound, generator=self._generator)
            for shape in shapes
        ]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of each trainer: `[trainers, batch, inputs]`, `[trainers, outputs, inputs]`, `[trainers, outputs]`."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    n = functional.layer_norm(x, x.shape[2:])
    return torch.addcmul(shift.unsqueeze(1), n, scale.unsqueeze(1))
