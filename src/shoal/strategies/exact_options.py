"""Passes names on that `options` holds now; it goes as soon as the strategies import them from there."""

from shoal.strategies.options import D2Options, MixOptions, MomentumOptions, SymmetricOptions

GradientTrackingOptions = MixOptions
ExactDiffusionOptions = SymmetricOptions
ExtraOptions = SymmetricOptions

__all__ = [
    "D2Options",
    "ExactDiffusionOptions",
    "ExtraOptions",
    "GradientTrackingOptions",
    "MixOptions",
    "MomentumOptions",
    "SymmetricOptions",
]
