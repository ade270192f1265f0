"""The rate limiter, under the name that it had here."""

from shoal.core.limits import RateLimiter as Shares

__all__ = ["Shares"]
