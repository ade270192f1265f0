"""Passes names on that `options` holds now; it goes as soon as the strategies import them from there."""

from shoal.strategies.options import CommonOptions, Count, OnNonfinite

__all__ = ["CommonOptions", "Count", "OnNonfinite"]
