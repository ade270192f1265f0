"""Student's t distribution, through the regularised incomplete beta function (Lentz's continued fraction).

Numerical Recipes, section 6.4, describes the method; scipy would be a large dependency for two functions.
"""

from __future__ import annotations

import math

from shoal.core.errors import UsageError

_TINY = 1e-300
_PRECISION = 1e-15


def survival(t: float, freedom: float) -> float:
    """P(T > t) for `freedom` > 0 degrees of freedom, which need not be whole."""
    if freedom <= 0 or math.isnan(t):
        raise UsageError(f"Student's t needs a number and positive degrees of freedom, not {t} and {freedom}")
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    if square < freedom:
        centre = _incomplete_beta(0.5, freedom / 2, square / (freedom + square))
        tail = (1 - centre) / 2
    else:
        tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square)) / 2
    return tail if t > 0 else 1 - tail


def quantile(tail: float, freedom: float) -> float:
    """The t that leaves `tail` (above 0, at most one half) above it."""
    if not 0 < tail <= 0.5:
        raise UsageError(f"a tail is above 0 and at most 0.5, not {tail}")
    low, high = 0.0, 1.0
    while survival(high, freedom) > tail:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), from the side on which the continued fraction converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
