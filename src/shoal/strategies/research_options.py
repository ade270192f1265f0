"""What strategies can be told that compress, push, relay, or allow for staleness; no torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from shoal.strategies.common_options import CommonOptions
from shoal.strategies.server_options import ParameterServerOptions


class ChocoOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `choco`."""

    topology: Annotated[
        Any, Meta(description="static and symmetric: 'ring', 'torus', 'full', a matrix, a networkx graph")
    ] = "ring"
    codec: Annotated[str, Meta(description="of what is sent: top-k:0.1, int8, fp16, low-rank:4, none …")] = (
        "top-k:0.1"
    )
    gamma: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="how far to move toward what neighbours have made public; share of bytes sent"),
    ] = None
    """The stronger the compression, the smaller it must be: above some bound parameters fly apart. Without a
    codec, 1 is plain averaging."""


class SgpOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `sgp`."""

    topology: Annotated[
        Any, Meta(description="who sends to whom; may be directed and irregular, as its weights don't count")
    ] = "one-peer-exponential"


class RelayOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `relay`."""

    tree: Annotated[
        Literal["binary", "chain"],
        Meta(description="along which models are passed on: a worker waits for 3 others at most, or for 2"),
    ] = "binary"
    """A model takes as many rounds as it has edges to go: up to 2 log2(n) in the binary tree, n − 1 in the
    chain. The longer, the smaller the learning rate must be."""


class StalenessAwareOptions(ParameterServerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `staleness-aware`: those of `parameter-server`, two of them with other defaults."""

    staleness_lr: Annotated[
        bool, Meta(description="divide the learning rate by the updates that a gradient is behind")
    ] = True
    delay_compensation: Annotated[
        float,
        Meta(ge=0, description="lambda of g + lambda g*g*(w_now - w_then); 0: no compensation"),
    ] = 0.04
    """Costs the servers one more copy of the model for each worker."""
