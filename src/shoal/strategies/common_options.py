"""What every strategy can be told; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=0)]
OnNonfinite: TypeAlias = Literal["warn", "skip", "stop"]


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for all strategies.

    A step is a step of the optimizer; one that was skipped counts, except in a group of one.
    """

    local_steps: Annotated[int, Meta(ge=1, description="steps from one round to the next")] = 1
    """Strategies that share gradients average parameters instead when it is above 1 (local SGD): sharing
    only some of the gradients would let the replicas drift apart for good."""
    warmup_steps: Annotated[
        Count, Meta(description="steps over which the learning rate rises linearly to its full value")
    ] = 0
    warmup_factor: Annotated[Factor, Meta(description="of the learning rate, where warm-up begins")] = 0.1
    decay_every: Annotated[Count, Meta(description="steps after which the rate decays again; 0: never")] = 0
    decay_factor: Annotated[Factor, Meta(description="of the learning rate, at each decay")] = 0.1
    global_average_every: Annotated[
        Count, Meta(description="rounds between averages of the whole group, buffers included; 0: never")
    ] = 0
    should_broadcast_buffers: Annotated[
        bool, Meta(description="buffers (BatchNorm) become those of rank 0 after each step, as in DDP")
    ] = False
    monitor: Annotated[
        bool, Meta(description="measure gradient noise scale and variance; all wait for all in each step")
    ] = False
    on_nonfinite: Annotated[
        OnNonfinite,
        Meta(description="when this worker has a NaN or an infinity: say so, leave the step out, or fail"),
    ] = "warn"
    batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="of one worker; without it the noise scale counts in batches of one worker"),
    ] = None
