"""Passes names on that `options` holds now; it goes as soon as the strategies import them from there."""

from shoal.strategies.options import Mode, ParameterServerOptions

__all__ = ["Mode", "ParameterServerOptions"]
