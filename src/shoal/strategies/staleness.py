"""How old the models were that a worker has mixed into its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_EXACT = 1 << 14
"""A peer that stands still adds a number each round: from here on they are counted in classes."""


class Staleness:
    """Counts versions behind: the puller's own number of rounds less that of the model that it pulled."""

    def __init__(self) -> None:
        self.num_mixed = 0
        self.num_unmixed = 0
        """Rounds in which there was no model to pull, or none that could be read in one piece."""
        self.max_behind = 0
        self._sum = 0
        self._counts: dict[int, int] = {}

    def note(self, behind: int | None) -> None:
        """Counts a round; a peer that is ahead has a negative number, and None is a round without a peer."""
        if behind is None:
            self.num_unmixed += 1
            return
        self.num_mixed += 1
        self._sum += max(behind, 0)
        self.max_behind = max(self.max_behind, behind)
        place = max(behind, -1) if behind < MAX_EXACT else _floor(behind)
        self._counts[place] = self._counts.get(place, 0) + 1

    @property
    def mean_behind(self) -> float:
        """The mean over all rounds that mixed; a peer that is ahead counts as 0."""
        return self._sum / self.num_mixed if self.num_mixed else 0.0

    @property
    def counts(self) -> dict[int, int]:
        """Rounds by versions behind, −1 for ahead; exact below MAX_EXACT, in powers of two beyond."""
        return dict(sorted(self._counts.items()))

    @property
    def histogram(self) -> dict[int, int]:
        """Rounds by the least number of versions behind: −1 (ahead), 0, 1, 2 (or 3), 4 (to 7), and so on."""
        classes: dict[int, int] = {}
        for behind, count in self.counts.items():
            classes[_floor(behind)] = classes.get(_floor(behind), 0) + count
        return classes

    def summary(self) -> dict[str, Any]:
        """Gives all of it as plain values, for a report."""
        return {
            "num_mixed": self.num_mixed,
            "num_unmixed": self.num_unmixed,
            "mean_behind": self.mean_behind,
            "max_behind": self.max_behind,
            "behind": self.histogram,
        }

    def state_dict(self) -> dict[str, Any]:
        """Gives the counts, for a checkpoint."""
        return {
            "num_mixed": self.num_mixed,
            "num_unmixed": self.num_unmixed,
            "max_behind": self.max_behind,
            "sum": self._sum,
            "histogram": self.counts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counts on from there."""
        self.num_mixed, self.num_unmixed = int(state["num_mixed"]), int(state["num_unmixed"])
        self.max_behind, self._sum = int(state["max_behind"]), int(state["sum"])
        self._counts = {int(behind): int(count) for behind, count in state["histogram"].items()}


def _floor(behind: int) -> int:
    """To a power of two, where it is above 1."""
    return behind if behind < 2 else 1 << behind.bit_length() - 1
