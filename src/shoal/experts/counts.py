"""What a server has done since it began."""

from __future__ import annotations

import threading


class ServerStatistics:
    """Counts of requests that were answered; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_forward = 0
        self.num_backward = 0
        self.num_forward_samples = 0
        self.num_backward_samples = 0
        self.num_failed = 0
        self.num_batches = 0
        self.busy_s = 0.0
        """That the device thread has spent on batches."""

    @property
    def num_samples(self) -> int:
        """Of forward and backward requests."""
        return self.num_forward_samples + self.num_backward_samples

    def count(self, kind: str, num_samples: int, *, is_done: bool) -> None:
        """A request of this kind, 'forward' or 'backward', is answered."""
        with self._lock:
            if not is_done:
                self.num_failed += 1
            elif kind == "forward":
                self.num_forward += 1
                self.num_forward_samples += num_samples
            else:
                self.num_backward += 1
                self.num_backward_samples += num_samples

    def count_batch(self, busy_s: float) -> None:
        """The device thread has spent so long on one more batch."""
        with self._lock:
            self.num_batches += 1
            self.busy_s += busy_s
