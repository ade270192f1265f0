"""How many strangers are answered: enough for those who err, too few to be worth a flood."""

from __future__ import annotations


class Allowance:
    """So many in a second."""

    def __init__(self, num_a_s: int) -> None:
        self._num_a_s = num_a_s
        self._since_s = 0.0
        self._num_taken = 0

    def take(self, now_s: float) -> bool:
        """Whether there is one left."""
        if now_s - self._since_s >= 1.0:
            self._since_s, self._num_taken = now_s, 0
        self._num_taken += 1
        return self._num_taken <= self._num_a_s
