"""What a server has done since it began."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shoal.experts.expert import Expert
from shoal.experts.jobs import Job, JobKind


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

    def count(self, results: Sequence[tuple[Job, object]]) -> None:
        """Requests are answered, with an exception where they failed."""
        with self._lock:
            for job, outcome in results:
                if isinstance(outcome, Exception):
                    self.num_failed += 1
                elif job.kind is JobKind.FORWARD:
                    self.num_forward += 1
                    self.num_forward_samples += job.num_samples
                else:
                    self.num_backward += 1
                    self.num_backward_samples += job.num_samples

    def count_batch(self, expert: Expert, busy_s: float) -> None:
        """The device thread has spent so long on one more batch."""
        self.num_batches += 1
        self.busy_s += busy_s
        expert.statistics.busy_s += busy_s
