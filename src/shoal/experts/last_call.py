"""What became of a mixture's last batch: who was asked, who answered, how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core import Peer, ShoalError


@dataclass(slots=True)
class ExpertCall:
    """One expert's part in it."""

    uid: str
    peer: Peer
    """Who answered or failed; the first to be asked while that is not known."""
    num_samples: int
    is_answered: bool = False
    seconds: float | None = None
    """Until the answer or the failure."""
    error: str | None = None
    backward_seconds: float | None = None
    backward_error: str | None = None


@dataclass(slots=True)
class LastCall:
    """Filled in by forward, and later by backward."""

    experts: list[ExpertCall] = field(default_factory=list)
    num_samples: int = 0
    search_seconds: float = 0.0
    """Of finding the experts; next to nothing unless the DHT had to be asked."""
    seconds: float = 0.0
    """Of the whole forward."""
    backward_seconds: float | None = None

    @property
    def num_asked(self) -> int:
        """Experts that were called."""
        return len(self.experts)

    @property
    def num_answered(self) -> int:
        """Experts whose answers count."""
        return sum(call.is_answered for call in self.experts)

    @property
    def num_failed(self) -> int:
        """Experts that were called in vain."""
        return self.num_asked - self.num_answered

    def __str__(self) -> str:
        backward = "" if self.backward_seconds is None else f", backward {_ms(self.backward_seconds)}"
        head = (
            f"{self.num_answered} of {self.num_asked} experts answered for {self.num_samples} samples in "
            f"{_ms(self.seconds)} (search {_ms(self.search_seconds)}{backward})"
        )
        rows = [("expert", "peer", "samples", "forward", "backward", "error")]
        rows += [
            (
                call.uid,
                str(call.peer),
                str(call.num_samples),
                _ms(call.seconds),
                _ms(call.backward_seconds),
                call.error or call.backward_error or "",
            )
            for call in self.experts
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if 2 <= at <= 4 else text.ljust(width)
                for at, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])


class NotEnoughExperts(ShoalError):
    """A sample has fewer answers than it needs; `last_call` has every expert that was asked."""

    def __init__(self, what: str, last_call: LastCall, *, cause: str = "", next_step: str = "") -> None:
        super().__init__(what, cause=cause, next_step=next_step)
        self.last_call = last_call


def describe_error(error: BaseException) -> str:
    """One line."""
    what = error.what if isinstance(error, ShoalError) else str(error)
    return f"{type(error).__name__}: {what}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
