"""What clients of `shoal bench experts` count, in a form that is short to tell."""

from __future__ import annotations

import msgspec

_MAX_TEXT = 300


class Tally(msgspec.Struct):
    """What clients have done in a phase; moments are on the clock that all processes of a machine share."""

    num_samples: int = 0
    """Of batches that went all the way."""
    forward_us: list[int] = []
    """How long each call took that was answered."""
    backward_us: list[int] = []
    failures: dict[str, int] = {}
    """Calls that failed, by the name of the error."""
    first_failure: str = ""
    """What one of them said."""
    ended_s: float = 0.0

    @property
    def num_failed(self) -> int:
        """Calls that failed."""
        return sum(self.failures.values())

    def add(self, other: Tally) -> None:
        """What others have done in the same phase."""
        self.num_samples += other.num_samples
        self.forward_us += other.forward_us
        self.backward_us += other.backward_us
        for name, count in other.failures.items():
            self.fail(name, count, other.first_failure)
        self.ended_s = max(self.ended_s, other.ended_s)

    def fail(self, name: str, count: int = 1, text: str = "") -> None:
        """Some calls have failed."""
        self.failures[name] = self.failures.get(name, 0) + count
        self.first_failure = self.first_failure or text

    def note(self, error: Exception) -> None:
        """A call has failed, whatever the error is: it counts under its name."""
        self.fail(type(error).__name__, text=" ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TEXT])
