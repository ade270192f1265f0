"""How much experts and their servers have done, and how fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ExpertStatistics:
    """Counts of what was finished; the expert counts, and whoever runs it adds the seconds."""

    num_forward_batches: int = 0
    num_forward_samples: int = 0
    num_backward_batches: int = 0
    num_backward_samples: int = 0
    num_refused_updates: int = 0
    busy_s: float = 0.0
    """Time that the device spent on this expert."""

    @property
    def num_batches(self) -> int:
        """Forward and backward."""
        return self.num_forward_batches + self.num_backward_batches

    @property
    def num_samples(self) -> int:
        """Forward and backward."""
        return self.num_forward_samples + self.num_backward_samples

    @property
    def mean_batch_size(self) -> float:
        """Samples a batch; 0 before the first one."""
        return self.num_samples / self.num_batches if self.num_batches else 0.0

    @property
    def samples_per_busy_s(self) -> float:
        """The rate while the device works on this expert, whatever it does in between; 0 if unknown."""
        return self.num_samples / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(slots=True)
class ServerStatistics:
    """What a server has answered, request by request, whichever expert was asked."""

    num_forward: int = 0
    num_forward_samples: int = 0
    num_backward: int = 0
    num_backward_samples: int = 0
    num_failed: int = 0
    """Requests that were accepted and ended in an error."""
    busy_s: float = 0.0
    """Time that the device thread spent on requests."""

    @property
    def num_requests(self) -> int:
        """Answered ones, forward and backward."""
        return self.num_forward + self.num_backward

    @property
    def num_samples(self) -> int:
        """In answered requests, forward and backward."""
        return self.num_forward_samples + self.num_backward_samples

    def count(self, kind: str, num_samples: int, *, is_done: bool) -> None:
        """One request of the kind `forward` or `backward` has ended."""
        if not is_done:
            self.num_failed += 1
        elif kind == "backward":
            self.num_backward += 1
            self.num_backward_samples += num_samples
        else:
            self.num_forward += 1
            self.num_forward_samples += num_samples
