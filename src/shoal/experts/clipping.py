"""How large gradients of an expert usually are: a limit that one huge gradient cannot pass, and cannot shift.

Adam divides by a mean of squared gradients, which needs thousands of steps to forget: a single gradient of
1e17, although finite, keeps an expert from learning for as long. So the gradient of all parameters together
is scaled down to a multiple of its usual norm, which is the upper quartile of the latest steps' norms: liars
who make less than a quarter of the steps cannot move it far. The median would be too low. An expert of a
mixture gets one sample now and twenty then, and honest norms of more than ten times the median are common.

Norms are remembered as they are after clipping, and at least as the usual one divided by the same factor. So
even many liars in a row move the limit by one factor at a time, each quarter of `NUM_NORMS` steps; honest
norms that grow are followed at the same pace.

This module computes with numbers alone, on one thread; the tensors are the expert's.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from shoal.core.errors import UsageError

DEFAULT_FACTOR = 10.0
"""Usual norms differ by a factor of several. One gradient ten times as large as the others costs Adam about a
third of its pace for a hundred steps, one twenty times as large more than half."""
NUM_NORMS = 64
"""So many norms are remembered."""
_MIN_FACTOR = 2.0  # below it, usual gradients would be clipped too
_FEWEST = 5  # norms that may say of another one that it was not usual
_SMALL_WEIGHTS = 10.0  # smaller ones, or zeros at the beginning, say little of how large gradients are
_LEAST = 1e-6  # of the weights' norm: what a norm counts for at least, until what is usual is known


class GradientClip:
    """Remembers the norms of an expert's latest steps and limits the next one; a factor of 0 never does.

    `weight_norm` is called only while few steps are known.
    """

    def __init__(self, factor: float) -> None:
        if not (factor == 0 or _MIN_FACTOR <= factor < math.inf):
            raise UsageError(
                f"Gradients cannot be clipped to {factor} times their usual norm.",
                next_step=f"give clip_gradients (--clip-gradients) a number of at least {_MIN_FACTOR:g}, "
                "or 0, which never clips.",
            )
        self.factor = factor
        self._norms: collections.deque[float] = collections.deque(maxlen=NUM_NORMS)

    @property
    def norms(self) -> list[float]:
        """What is remembered, the oldest first: to be saved with the expert."""
        return list(self._norms)

    def restore(self, norms: Any) -> None:
        """Go on from what was saved; where that cannot be norms, nothing is known yet."""
        self._norms.clear()
        if isinstance(norms, list) and len(norms) <= NUM_NORMS and all(map(_is_norm, norms)):
            self._norms.extend(norms)

    def limit(self, weight_norm: Callable[[], float]) -> float:
        """The largest norm that a gradient may have now."""
        if not self.factor:
            return math.inf
        # Of the first gradient nobody knows whether it is usual, and a liar may send it.
        usual = self._usual() if self._norms else max(_SMALL_WEIGHTS, weight_norm())
        return self.factor * usual

    def remember(self, norm: float, weight_norm: Callable[[], float]) -> bool:
        """Note the norm of a gradient as it is applied; True when one before turns out to be far from usual.

        Then the optimizer has to start anew: it was given that one when nothing was known yet.
        """
        if not self.factor:
            return False
        is_full = len(self._norms) == NUM_NORMS
        least = self._usual() / self.factor if is_full else _LEAST * max(_SMALL_WEIGHTS, weight_norm())
        self._norms.append(max(norm, least))
        if len(self._norms) < _FEWEST or is_full:
            return False
        limit = self.factor * self._usual()
        if max(self._norms) <= limit:
            return False
        kept = [norm for norm in self._norms if norm <= limit]
        self._norms.clear()
        self._norms.extend(kept)
        return True

    def _usual(self) -> float:
        """The upper quartile, rounded down: at first a limit too low does less harm than one too high."""
        return sorted(self._norms)[3 * (len(self._norms) - 1) // 4]


def _is_norm(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf
