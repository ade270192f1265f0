"""What the convergence experiment of Learning@home is told, what memory it will take, and what it tells."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import msgspec

from shoal.core import UsageError

NUM_FEATURES = 784
NUM_CLASSES = 10
WIDTH = 4
"""Of a block between its first and its last layer, in layer dimensions."""
ROW_WIDTH = 34
"""What backward keeps of one sample at one block, in layer dimensions: the inputs of three linear layers,
the gradients of their outputs, and those of the two norms' weights and biases."""
EVALUATION_ROWS = 32_768
"""Rows of all experts of a layer that are evaluated at once, at most."""
LOCKED_COMPUTE_MS = {"dmoe": 240.0, "large-ffn": 45.0}
"""An update's time in the saved runs, where one lock held all trainers: 64 experts a layer, and dense."""
DEFAULT_COMPUTE_MS = {"dmoe": 14_200.0, "large-ffn": 1_900.0}
"""A trainer's own, without the lock: what one of the 64 of a saved run had between two of its updates, less a
second on the network. 20,480 updates take as long in virtual time as they took then: 81 and 15.5 minutes."""
TRAINERS_AT_ONCE = 12
"""That compute from the same parameters, on average, where no window is given."""
TRAINERS_WITHOUT_DELAY = 3
"""The same where nothing but that makes a gradient stale."""

_FLOAT_BYTES = 4
_OVERHEAD_BYTES = 512 << 20
"""Of Python, torch and the images."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class MixtureRunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run with one seed. The defaults are the paper's 64 experts a layer at one second."""

    model: Literal["dmoe", "large-ffn"] = "dmoe"
    num_experts: Count = 64
    """Of one layer; large-ffn has one block instead that takes all."""
    num_layers: Count = 4
    num_active: Count = 4
    """Experts that a sample goes through in each layer."""
    layer_dim: Count = 512
    batch_size: Count = 4
    num_trainers: Count = 64
    delay_ms: NotNegative = 1000.0
    """Mean of what lies between a trainer's gradient and its update; Weibull of shape 1, so exponential."""
    compute_ms: NotNegative | None = None
    """What lies between a trainer's update and its next gradient, or, where it is faithful, what the lock is
    held for in each step; `DEFAULT_COMPUTE_MS` or `LOCKED_COMPUTE_MS` of the model without it."""
    window_ms: NotNegative | None = None
    """What happens within so long happens at once: gradients arrive, and an expert makes one update of its
    own; then trainers compute together. Without it so long that about `TRAINERS_AT_ONCE` do, and
    `compute_ms` at most; 0, as always where it is faithful, is one after another."""
    failure_rate: Share = 0.0
    """How often an expert does not answer a sample; the next best takes its place."""
    backward_failure_rate: Share = 0.0
    """How often an expert that answered loses the gradient it was sent; the original knows none of that."""
    steps: Count = 20_480
    """Updates of all trainers together; there are neither more nor fewer."""
    eval_every: Count = 1024
    learning_rate: Positive = 1e-3
    is_faithful: bool = False
    """As the original did it: a gate that is never trained, gradients that reach experts at once, failures at
    evaluation too, and one lock around the model."""
    update_every_inputs: Count | None = None
    """Gradients of samples that make an expert update; the batch size without it."""
    update_every_steps: Count = 10
    """Training steps since the first of them that make it update anyway."""
    seed: int = 1337
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.model == "dmoe" and self.num_active > self.num_experts:
            raise UsageError(
                f"A sample cannot go through {self.num_active} of {self.num_experts} experts.",
                next_step="give as many experts as are active, or more.",
            )
        if self.model == "large-ffn" and max(self.failure_rate, self.backward_failure_rate) > 0:
            raise UsageError(
                "large-ffn has no experts that could fail.",
                next_step="leave the failure rate out, or take dmoe.",
            )

    @property
    def has_gate(self) -> bool:
        """Whether layers choose among experts."""
        return self.model == "dmoe"

    @property
    def experts_a_layer(self) -> int:
        """A dense block counts as one expert that everything goes through."""
        return self.num_experts if self.has_gate else 1

    @property
    def rows_a_layer(self) -> int:
        """(sample, expert) pairs of one training step."""
        return self.batch_size * (self.num_active if self.has_gate else 1)

    @property
    def usual_compute_ms(self) -> float:
        """The milliseconds that computing takes where nothing else is said."""
        return (LOCKED_COMPUTE_MS if self.is_faithful else DEFAULT_COMPUTE_MS)[self.model]

    @property
    def compute_s(self) -> float:
        """The seconds of one training step's computing."""
        return (self.usual_compute_ms if self.compute_ms is None else self.compute_ms) / 1000

    def resolved(self) -> Self:
        """The same with every number said that was left open, for a report that stands alone."""
        return msgspec.structs.replace(
            self,
            compute_ms=round(1000 * self.compute_s, 3),
            window_ms=0.0 if self.is_faithful else round(1000 * self.window_s, 3),
            update_every_inputs=self.inputs_an_update,
        )

    @property
    def delivery_shares(self) -> list[float]:
        """Of a step's delay, what lies between an expert's forward and its gradient, the last layer first.

        A step's requests go through all layers and back: the last layer's experts hear again first. A dense
        block is updated with the rest.
        """
        if not self.has_gate:
            return []
        return [(2 * layer + 1) / (2 * self.num_layers) for layer in range(self.num_layers)]

    @property
    def window_s(self) -> float:
        """The seconds in which trainers compute as one."""
        if self.window_ms is not None:
            return self.window_ms / 1000
        at_once = TRAINERS_AT_ONCE if self.delay_ms else TRAINERS_WITHOUT_DELAY
        cycle_s = self.compute_s + self.delay_ms / 1000
        return min(self.compute_s, at_once * cycle_s / self.num_trainers)

    @property
    def inputs_an_update(self) -> int:
        """How many inputs an expert's update takes; a dense block is updated in every step."""
        if not self.has_gate:
            return 1
        return self.batch_size if self.update_every_inputs is None else self.update_every_inputs

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's parameters."""
        inner = WIDTH * self.layer_dim
        matrices = 2 * self.layer_dim * inner + inner * inner
        return _FLOAT_BYTES * (matrices + 6 * inner + self.layer_dim)

    def parameter_bytes(self) -> int:
        """The bytes of the whole model."""
        return self.num_layers * self.experts_a_layer * self.expert_bytes + self._trunk_bytes()

    def memory_bytes(self) -> int:
        """An estimate of the most that a run takes, on its device.

        Most of it are the optimizers' three moments of each expert that was ever updated: all of them, in
        the end, unless a gate never chooses some.
        """
        trunk = self._trunk_bytes()
        row_bytes = _FLOAT_BYTES * ROW_WIDTH * self.layer_dim
        pending_steps = self.update_every_steps if self.has_gate else 1
        rows = (self.num_trainers + pending_steps) * self.num_layers * self.rows_a_layer
        inner_bytes = _FLOAT_BYTES * WIDTH * self.layer_dim
        evaluation = EVALUATION_ROWS * (4 * inner_bytes)
        at_once = min(self.rows_a_layer, self.experts_a_layer) * (1 if self.device == "cpu" else 3)
        return (
            4 * self.parameter_bytes()
            + self.num_trainers * trunk
            + 2 * rows * row_bytes
            + evaluation
            + at_once * self.expert_bytes
            + _OVERHEAD_BYTES
        )

    def fits(self, available_bytes: int) -> bool:
        """Whether a run can be expected to get by with so much."""
        return self.memory_bytes() <= available_bytes

    def _trunk_bytes(self) -> int:
        ends = (NUM_FEATURES + 1) * self.layer_dim + (self.layer_dim + 1) * NUM_CLASSES + 2 * self.layer_dim
        gate = self.layer_dim * (self.num_experts + 2) if self.has_gate else 0
        return _FLOAT_BYTES * (ends + self.num_layers * gate)


# --- what it tells ---


class MixtureEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """How well the model does on all test images."""

    num_updates: int
    virtual_s: float
    loss: float
    accuracy: float


class TrainLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The mean loss over the last updates."""

    num_updates: int
    virtual_s: float
    loss: float


class MixtureResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told of a run; equal from run to run."""

    evaluations: list[MixtureEvaluation]
    train_loss: list[TrainLoss]
    staleness: dict[int, int]
    """Updates by how many others were made between their forward and them."""
    expert_staleness: dict[int, int]
    """Samples' gradients by how many updates their expert made between its forward and taking them in."""
    virtual_s: float
    num_touched_experts: int
    num_lost: int
    """Samples' gradients that no expert took in, because it had failed."""

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all updates, in updates."""
        return _mean(self.staleness)

    @property
    def mean_expert_staleness(self) -> float:
        """The mean staleness of all samples' gradients."""
        return _mean(self.expert_staleness)

    @property
    def diverged_after(self) -> int | None:
        """The first evaluation or window of training that is no number; None where all are."""
        losses = [(each.num_updates, each.loss) for each in self.evaluations]
        losses += [(each.num_updates, each.loss) for each in self.train_loss]
        return min((at for at, loss in losses if not math.isfinite(loss)), default=None)


def _mean(counts: dict[int, int]) -> float:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else 0.0
