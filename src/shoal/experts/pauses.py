"""Who is left out for a while after failing: twice as long with every failure in a row."""

from __future__ import annotations

import math
from collections.abc import Hashable

_MAX_NAMES = 10_000


class Pauses:
    """Of anything that has a name. Times are those of one monotonic clock, given by the caller."""

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
        if name not in self._paused and len(self._paused) >= _MAX_NAMES:
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
