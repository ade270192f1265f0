"""How an expert server, its clients and mixtures work: numbers with defaults that need no thought."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from shoal.core import UsageError
from shoal.core.errors import did_you_mean
from shoal.transport.limits import GIB, MIB

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of an `ExpertServer`."""

    device: str = "cpu"
    """Where experts compute: `cpu`, `cuda`, `cuda:1`."""
    precision: Precision = "fp32"
    """fp32; tf32 rounds the factors of matrix products (CUDA); bf16 computes under autocast."""
    num_threads: int | None = None
    """Of torch, for one batch on the CPU; None leaves torch's own choice."""
    max_batch_size: int = 4096
    """Samples that are computed at once; a request with more is refused."""
    min_batch_size: int = 1
    """Samples to wait for, up to `max_wait_s`; 1 computes whatever is there as soon as the device is free."""
    max_wait_s: float = 0.005
    """How long the oldest request waits for others when `min_batch_size` is above 1."""
    max_waiting: int = 4096
    """Requests that wait for the device; beyond it, a client with more than its share is told 'busy'."""
    kept_bytes: int = 2 * GIB
    """Inputs of forward requests that are kept for their backward."""
    kept_s: float = 120.0
    """How long they are kept at most."""
    pinned_bytes: int | None = None
    """Memory that a GPU reads and writes by itself, taken at the start; more is taken when it is needed, and
    holds everything up for a while. None: for as many requests as the endpoint takes at once, and answers."""
    remembered_bytes: int = 256 * MIB
    """Answers to backward requests that are remembered, in case the request comes again."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "min_batch_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.min_batch_size > self.max_batch_size:
            raise UsageError(
                f"min_batch_size {self.min_batch_size} is above max_batch_size {self.max_batch_size}."
            )
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"The precision {self.precision!r} is not known.", next_step=f"use {', '.join(PRECISIONS)}."
            )


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of an `ExpertClient`."""

    codec: str = "none"
    """How inputs, outputs and gradients travel, such as `bf16` or `int8`."""
    patience: float = 1.0
    """Scales every deadline that the client finds by itself; 2 waits twice as long."""
    first_s: float = 30.0
    """The deadline of calls to a peer of which nothing is known yet."""
    has_hedges: bool = True
    """Ask a second replica when the first takes longer than it usually does; forward only."""


WhenNoneAnswers = Literal["raise", "zeros"]


@dataclass(frozen=True, slots=True)
class MixtureSettings:
    """Settings of a `MixtureOfExperts`."""

    k_best: int = 4
    """Experts that each sample is sent to."""
    k_min: int = 1
    """Answers that each sample needs."""
    backward_k_min: int = 1
    """Experts that each sample needs gradients from; those beyond it that fail contribute none."""
    beam_size: int | None = None
    """How many prefixes the search keeps; more find better experts and ask more. None: `k_best`."""
    forward_timeout_s: float | None = None
    """For all experts together, finding them and a second try included; None: as long as each server may
    usually take."""
    backward_timeout_s: float | None = None
    timeout_after_k_min_s: float | None = None
    """How long the others are waited for once every sample has what it needs; None: three times as long as
    that took, a second at least."""
    when_none_answers: WhenNoneAnswers = "raise"
    """A sample that no expert answers for: `raise` NotEnoughExperts, or `zeros` in its place."""
    is_checking: bool = True
    """Whether answers with NaN or infinity count as failures."""
    num_tries: int = 2
    """How often a batch is sent when samples lack answers; those that failed are left out the next time."""
    refresh_s: float = 30.0
    """How old may be what is known of who serves which expert."""

    def __post_init__(self) -> None:
        if not 0 <= self.k_min <= self.k_best or self.k_best < 1 or self.backward_k_min < 0:
            raise UsageError(
                f"k_min {self.k_min} and k_best {self.k_best} do not go together "
                f"(backward_k_min {self.backward_k_min}).",
                next_step="let k_best be 1 or more and k_min not above it; neither minimum below 0.",
            )
        if self.when_none_answers not in ("raise", "zeros"):
            raise UsageError(
                f"when_none_answers is 'raise' or 'zeros', not {self.when_none_answers!r}.",
            )
        if (self.beam_size is not None and self.beam_size < 1) or self.num_tries < 1:
            raise UsageError(f"beam_size ({self.beam_size}) and num_tries ({self.num_tries}) are above 0.")

    @property
    def is_none_enough(self) -> bool:
        """Whether a sample may go without any answer."""
        return self.when_none_answers == "zeros" or self.k_min == 0

    def but(self, **options: Any) -> Self:
        """The same with other values; UsageError for a name that is no setting."""
        names = [each.name for each in dataclasses.fields(self)]
        for name in options:
            if name not in names:
                raise UsageError(
                    f"A mixture has no setting {name!r}.{did_you_mean(name, names)}",
                    next_step=f"there are {', '.join(names)}.",
                )
        return dataclasses.replace(self, **options)
