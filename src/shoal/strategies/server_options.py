"""What `parameter-server` can be told; nothing here imports torch.

What the options do is left to `parameter_server`, the worker's side, and `server`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shoal.strategies.common_options import CommonOptions

Mode = Literal["async", "bounded", "sync"]


class ParameterServerOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `parameter-server`; with `local_steps` the gradients of so many local steps are summed."""

    mode: Annotated[
        Mode,
        Meta(description="apply each gradient at once, let no worker lead by too much, or average them all"),
    ] = "async"
    staleness: Annotated[
        int,
        Meta(ge=0, description="bounded: rounds by which a worker may lead the slowest; 0: all wait for all"),
    ] = 4
    num_aggregate: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="sync: gradients that make one update; later ones of a step are dropped. All"),
    ] = None
    """With fewer than there are workers, the others are backups: the slowest are not waited for."""
    drop_stale: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="drop gradients that are more updates behind than this; never"),
    ] = None
    staleness_lr: Annotated[
        bool, Meta(description="divide the learning rate by the updates that a gradient is behind")
    ] = False
    delay_compensation: Annotated[
        float,
        Meta(ge=0, description="lambda of g + lambda g*g*(w_now - w_then); 0: no compensation"),
    ] = 0.0
    """Costs the servers one more copy of the model for each worker."""
    pull_every: Annotated[
        int, Meta(ge=1, description="pushes from one pull to the next; between them the worker steps alone")
    ] = 1
    compression: Annotated[
        str, Meta(description="codec of what is pushed (fp16, bf16, int8, top-k:0.01), with error feedback")
    ] = "none"
