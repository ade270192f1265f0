"""What the strategies can be told that reach the exact optimum of unequal workers; no torch here."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from shoal.strategies.common_options import CommonOptions


class MixOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of strategies that mix over a topology."""

    topology: Annotated[
        Any, Meta(description="a name ('ring', 'exponential:3'); in code also a function, matrix or graph")
    ] = "exponential-2"


class GradientTrackingOptions(MixOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `gradient-tracking`."""


class SymmetricOptions(MixOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of strategies whose topology must be static and symmetric."""

    topology: Annotated[
        Any, Meta(description="static and symmetric: ring, torus, star, full, hypercube, random-regular:4, …")
    ] = "ring"


class ExactDiffusionOptions(SymmetricOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `exact-diffusion`."""


class ExtraOptions(SymmetricOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `extra`."""


class D2Options(SymmetricOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `d2`."""

    laziness: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        Meta(description="part l of l·I + (1 − l)·W, which mixes in place of W; none: the least that fits"),
    ] = None
    """D² needs eigenvalues above −1/3, which W of an even ring, a torus or a hypercube does not have."""


class MomentumOptions(MixOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `momentum`."""

    topology: Annotated[
        Any, Meta(description="a name ('ring', 'exponential:3'); in code also a function, matrix or graph")
    ] = "one-peer-exponential"
