"""Who is left out for a while after failing: twice as long with every failure in a row."""

from __future__ import annotations

from collections.abc import Hashable


class Pauses:
    """Of anything that has a name. Times are those of one monotonic clock, given by the caller."""

    def __init__(self, first_s: float = 2.0, longest_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._paused: dict[Hashable, tuple[float, float]] = {}
        """Until when, and how long the pause is."""
        self._until_s = 0.0

    def has_any(self, now_s: float) -> bool:
        """Whether anything may be left out now."""
        return now_s < self._until_s

    def failed(self, name: Hashable, now_s: float) -> None:
        """Leave it out from now on; what fails during a pause was called before it, and adds nothing."""
        until_s, length_s = self._paused.get(name, (now_s, 0.0))
        if now_s < until_s:
            return
        length_s = min(2 * length_s or self._first_s, self._longest_s)
        self._paused[name] = (now_s + length_s, length_s)
        self._until_s = max(self._until_s, now_s + length_s)

    def answered(self, name: Hashable) -> None:
        """All is well again."""
        self._paused.pop(name, None)

    def has_failed(self, name: Hashable) -> bool:
        """Whether it has not answered since it failed, be its pause over or not."""
        return name in self._paused

    def is_paused(self, name: Hashable, now_s: float) -> bool:
        """Whether to leave it out now."""
        paused = self._paused.get(name)
        return paused is not None and now_s < paused[0]
