"""Requests that take less time than handing them to another thread: they are computed where they arrive.

The way to the device's thread and back takes 150 to 300 µs. What an expert takes for a small request is
learnt from those before; one that has become slow goes back to the device's thread.
"""

from __future__ import annotations

import collections
import math
import threading

from shoal.experts.jobs import Job, JobKind
from shoal.tensors.codecs.base import PLAIN

_QUICK_S = 250e-6  # about what the way there and back takes when the caches are cold
_SMALL_BYTES = 32 << 10  # what a network's loop can do in between
_NUM_LATEST = 16


class QuickWork:
    """Who computes: one thread at a time, that of the device or that of a loop with something quick."""

    def __init__(self) -> None:
        self.device = threading.Lock()
        """Held by whoever touches an expert."""
        self._seconds: dict[tuple[str, JobKind], float] = {}
        self._latest: dict[tuple[str, JobKind], collections.deque[float]] = {}

    def try_begin(self, job: Job) -> bool:
        """Whether this thread may compute the job now; who may says `end` afterwards. Never waits."""
        return (
            self._seconds.get((job.expert.uid, job.kind), math.inf) <= _QUICK_S
            and _is_small(job)
            and self.device.acquire(blocking=False)
        )

    def end(self, job: Job, seconds: float) -> None:
        """The job is computed, and has taken so long."""
        self.device.release()
        self.learn(job, seconds)

    def learn(self, job: Job, seconds: float) -> None:
        """A batch with this job has taken so long."""
        if _is_small(job):
            key = (job.expert.uid, job.kind)
            latest = self._latest.setdefault(key, collections.deque(maxlen=_NUM_LATEST))
            latest.append(seconds)
            # not their mean: threads that take turns make single ones seem slow
            self._seconds[key] = sorted(latest)[len(latest) // 4]


def _is_small(job: Job) -> bool:
    """As it came and as it is: what is compressed may become large."""
    size_bytes = sum(len(buffer) for _, buffers in job.received for buffer in buffers)
    return size_bytes <= _SMALL_BYTES and all(
        meta.codec == PLAIN for metas, _ in job.received for meta in metas
    )
