"""What warm-up and decay make of the learning rate: a pure function of the step."""

from __future__ import annotations

from shoal.strategies.options import CommonOptions


def rate_factor(options: CommonOptions, step: int) -> float:
    """What step number `step` (from 0) multiplies the user's learning rate by; a user's scheduler goes on.

    Warm-up rises linearly from `warmup_factor` at step 0 to 1 at step `warmup_steps`; decay multiplies by
    `decay_factor` after every `decay_every` steps.
    """
    factor = 1.0
    if step < options.warmup_steps:
        factor = options.warmup_factor + (1 - options.warmup_factor) * step / options.warmup_steps
    if options.decay_every:
        factor *= options.decay_factor ** (step // options.decay_every)
    return factor
