"""How an expert server works, and how its clients do: numbers with defaults that need no thought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.core import UsageError
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
