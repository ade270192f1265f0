"""How often something may happen: the rate limiter of the project, and its back-off after failures."""

from __future__ import annotations

import math
from collections.abc import Hashable

MAX_KEYS = 4096
_MAX_FAILED = 10_000  # names that a back-off remembers


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
        taken = self._still_taken(key, now_s)
        excess = taken + min(num, self._burst) - self._burst
        self._note(key, taken if excess > 0 else taken + num, now_s)
        return excess / self._num_a_s if excess > 0 else 0.0

    def take_anyway(self, key: Hashable, num: float, now_s: float) -> None:
        """Take so many that cannot wait: those who come later wait the longer."""
        self._note(key, self._still_taken(key, now_s) + num, now_s)

    def _still_taken(self, key: Hashable, now_s: float) -> float:
        taken, at_s = self._taken.pop(key, (0.0, now_s))
        return max(0.0, taken - (now_s - at_s) * self._num_a_s)

    def _note(self, key: Hashable, taken: float, now_s: float) -> None:
        self._taken[key] = (taken, now_s)
        if len(self._taken) > self._max_keys:
            del self._taken[next(iter(self._taken))]

    def allows(self, now_s: float, key: Hashable = None) -> bool:
        """Take one, if there is one."""
        return self.take(key, 1, now_s) == 0.0


class FailureBackoff:
    """Who is left out for a while after failing: twice as long with every failure in a row.

    Of anything that has a name. Times are those of one monotonic clock, given by the caller.
    """

    def __init__(self, first_s: float = 2.0, longest_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._paused: dict[Hashable, tuple[float, float]] = {}
        """Until when, and how long the pause is."""
        self._until_s = 0.0
        self.num_changes = 0
        """Of who is paused, but for pauses that end."""

    def has_any(self, now_s: float) -> bool:
        """Whether anything may be left out now."""
        return now_s < self._until_s

    def failed(self, name: Hashable, now_s: float) -> None:
        """Leave it out from now on; what fails during a pause was called before it, and adds nothing."""
        until_s, length_s = self._paused.get(name, (now_s, 0.0))
        if now_s < until_s:
            return
        length_s = min(2 * length_s or self._first_s, self._longest_s)
        if name not in self._paused and len(self._paused) >= _MAX_FAILED:
            self._forget_some()
        self._paused[name] = (now_s + length_s, length_s)
        self.num_changes += 1
        self._until_s = max(self._until_s, now_s + length_s)

    def answered(self, name: Hashable) -> None:
        """All is well again."""
        if self._paused.pop(name, None) is not None:
            self.num_changes += 1

    def has_failed(self, name: Hashable) -> bool:
        """Whether it has not answered since it failed, be its pause over or not."""
        return name in self._paused

    def pause_s(self, name: Hashable) -> float:
        """How long its latest pause is, be it over or not; 0.0 for what has not failed."""
        return self._paused.get(name, (0.0, 0.0))[1]

    def next_end_s(self, now_s: float) -> float:
        """When the next pause ends."""
        return min((until_s for until_s, _ in self._paused.values() if until_s > now_s), default=math.inf)

    def is_paused(self, name: Hashable, now_s: float) -> bool:
        """Whether to leave it out now."""
        paused = self._paused.get(name)
        return paused is not None and now_s < paused[0]

    def _forget_some(self) -> None:
        """Half of all, those whose pauses end first."""
        names = sorted(self._paused, key=lambda name: self._paused[name][0])
        for name in names[: len(names) // 2]:
            del self._paused[name]
