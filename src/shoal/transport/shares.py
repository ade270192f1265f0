"""How much each of many askers may have: so much at once, then so much a second.

A token bucket for each of a bounded number of askers; the one that was silent for longest is forgotten first.
Who counts as one asker is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Hashable

MAX_ASKERS = 4096


class Shares:
    """One kind of thing that is given out."""

    def __init__(self, num_a_s: float, burst: float, max_askers: int = MAX_ASKERS) -> None:
        self._num_a_s = num_a_s
        self._burst = burst
        self._max_askers = max_askers
        self._taken: dict[Hashable, tuple[float, float]] = {}  # how much, and when that was so; oldest first

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, asker: Hashable, num: float, now_s: float) -> float:
        """Take so many: 0.0, or the seconds to wait until there are enough, nothing being taken.

        More than a whole burst may be taken by who has taken nothing, and is waited for afterwards.
        """
        taken, at_s = self._taken.pop(asker, (0.0, now_s))
        taken = max(0.0, taken - (now_s - at_s) * self._num_a_s)
        excess = taken + min(num, self._burst) - self._burst
        self._taken[asker] = (taken if excess > 0 else taken + num, now_s)
        if len(self._taken) > self._max_askers:
            del self._taken[next(iter(self._taken))]
        return excess / self._num_a_s if excess > 0 else 0.0
