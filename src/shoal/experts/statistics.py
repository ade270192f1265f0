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
    num_clipped_updates: int = 0
    """Steps whose gradient was far above what is usual for the expert."""
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
