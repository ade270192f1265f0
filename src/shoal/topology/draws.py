"""Random numbers that are the same on every machine: for graphs that all ranks draw for themselves."""

from __future__ import annotations

import random
from collections.abc import Iterable


class Draws:
    """A stream of draws that its name alone decides.

    It builds on `random.Random.random` only, the one method whose numbers Python promises to keep.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit − 1."""
        return int(self._random.random() * limit)

    def shuffled(self, items: Iterable[int]) -> list[int]:
        """The items in random order."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            chosen = self.below(last + 1)
            order[last], order[chosen] = order[chosen], order[last]
        return order
