"""What gradients of an expert are usual: the limit that one huge gradient cannot pass, and cannot shift.

Adam divides by a mean of squared gradients which takes thousands of steps to forget: a single gradient of
1e17, finite as it is, would keep an expert from learning for good. So gradients of all parameters together
are scaled down to some times the median norm of the latest steps. A median cannot be moved by a few liars,
and what is remembered of a norm is held near the median too, so that many in a row move it by one factor at a
time: up to honest norms that really grow, and down again, within half of what is remembered.

Numbers alone, for one thread; the tensors are `expert`'s.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

DEFAULT_FACTOR = 10.0
"""Usual norms differ by a factor of several; one gradient ten times the others costs Adam a third of its pace
for a hundred steps, and not more."""
MIN_FACTOR = 2.0
NUM_NORMS = 32
"""That are remembered: honest norms that grow tenfold are followed after half as many steps."""
_FEWEST = 5  # norms that may say of another one that it was not usual
_SMALL_WEIGHTS = 10.0  # smaller ones, or zeros at the beginning, say little of how large gradients are
_LEAST = 1e-6  # of the weights' norm: what a norm counts for at least, until what is usual is known


def is_factor(factor: float) -> bool:
    """Whether gradients can be clipped to so many times what is usual; 0 never clips."""
    return factor == 0 or MIN_FACTOR <= factor < math.inf


class GradientClip:
    """Knows the norms of an expert's latest steps. `weight_norm` is asked for while there are few of them."""

    def __init__(self, factor: float) -> None:
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
        usual = self._median() if self._norms else max(_SMALL_WEIGHTS, weight_norm())
        return self.factor * usual

    def remember(self, norm: float, weight_norm: Callable[[], float]) -> bool:
        """Note the norm of a gradient as it is applied; True when one before turns out to be far from usual.

        Then the optimizer has to start anew: it was given that one when nothing was known yet.
        """
        if not self.factor:
            return False
        is_full = len(self._norms) == NUM_NORMS
        least = self._median() / self.factor if is_full else _LEAST * max(_SMALL_WEIGHTS, weight_norm())
        self._norms.append(max(norm, least))
        if len(self._norms) < _FEWEST or is_full:
            return False
        limit = self.factor * self._median()
        if max(self._norms) <= limit:
            return False
        usual = [norm for norm in self._norms if norm <= limit]
        self._norms.clear()
        self._norms.extend(usual)
        return True

    def _median(self) -> float:
        """The lower of two: a limit that is too low for a step or two does less harm than one too high."""
        return sorted(self._norms)[(len(self._norms) - 1) // 2]


def _is_norm(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf
