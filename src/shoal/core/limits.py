"""How often something may happen: the one rate limiter of the project."""

from __future__ import annotations

from collections.abc import Hashable

MAX_KEYS = 4096


class RateLimiter:
    """A token bucket for each key: so much at once, then so much a second.

    A key is whoever is limited, as the caller of `take` tells them apart. A bounded number of keys is
    remembered; the one that was silent for longest is forgotten first. Times are those of any one clock.
    """

    def __init__(self, num_a_s: float, burst: float, max_keys: int = MAX_KEYS) -> None:
        self._num_a_s = num_a_s
        self._burst = burst
        self._max_keys = max_keys
        self._taken: dict[Hashable, tuple[float, float]] = {}  # how much, and when that was so; oldest first

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, key: Hashable, num: float, now_s: float) -> float:
        """Take so many: 0.0, or the seconds to wait until there are enough, nothing being taken.

        More than a whole burst may be taken by who has taken nothing, and is waited for afterwards.
        """
        taken, at_s = self._taken.pop(key, (0.0, now_s))
        taken = max(0.0, taken - (now_s - at_s) * self._num_a_s)
        excess = taken + min(num, self._burst) - self._burst
        self._taken[key] = (taken if excess > 0 else taken + num, now_s)
        if len(self._taken) > self._max_keys:
            del self._taken[next(iter(self._taken))]
        return excess / self._num_a_s if excess > 0 else 0.0

    def allows(self, now_s: float, key: Hashable = None) -> bool:
        """Take one, if there is one."""
        return self.take(key, 1, now_s) == 0.0
