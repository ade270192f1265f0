"""Passes names on that `options` holds now; it goes as soon as the strategies import them from there."""

from shoal.strategies.options import ChocoOptions, RelayOptions, SgpOptions, StalenessAwareOptions

__all__ = ["ChocoOptions", "RelayOptions", "SgpOptions", "StalenessAwareOptions"]
