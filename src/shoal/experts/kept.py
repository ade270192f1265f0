"""What a server keeps between two requests of a client: inputs of a forward, answers to a backward.

Both are bounded in bytes and time; what is gone is sent or asked for again. For any thread.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shoal.core import PeerRefused
from shoal.experts.expert import Expert
from shoal.experts.jobs import Job, Outcome

_ENTRY_BYTES = 2 << 10  # what an entry takes beside its tensors
_MAX_ANSWERS = 8192  # seconds of small requests: one that is sent again comes soon


_Key = tuple[str, bytes]  # an expert's uid, and the id of a request


class KeptInputs:
    """Inputs of forward requests, where the device needs them, until their backward comes."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._kept: collections.OrderedDict[bytes, _Inputs] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: bytes, uid: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the tensors; the oldest go when there are too many."""
        size_bytes = _ENTRY_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size_bytes > self._max_bytes:
            return
        now_s = time.monotonic()
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self.used_bytes -= known.size_bytes
            self._kept[key] = _Inputs(uid, tensors, size_bytes, now_s)
            self.used_bytes += size_bytes
            self._drop_oldest(now_s)

    def sweep(self) -> None:
        """Let those go that were kept for long enough."""
        with self._lock:
            self._drop_oldest(time.monotonic())

    def _drop_oldest(self, now_s: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self.used_bytes <= self._max_bytes and oldest.since_s >= now_s - self._max_age_s:
                break
            self._kept.popitem(last=False)
            self.used_bytes -= oldest.size_bytes

    def find(self, key: bytes, uid: str) -> Sequence[torch.Tensor] | None:
        """Those that were kept, while they are; they stay until `drop`."""
        found = self._kept.get(key)
        return None if found is None or found.uid != uid else found.tensors

    def drop(self, key: bytes) -> None:
        """They are needed no more."""
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self.used_bytes -= known.size_bytes


class Applied:
    """Backward requests by their ids: those under way, and what was answered to those that are done.

    That a request was applied is remembered by its expert, together with what it has learned from it: for
    longer than the answer, and in its checkpoints.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._under_way: dict[_Key, Job] = {}
        self._answers: collections.OrderedDict[_Key, Outcome] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0

    @property
    def num_under_way(self) -> int:
        """Requests that are not answered yet."""
        return len(self._under_way)

    def find(self, expert: Expert, request_id: bytes) -> Job | Outcome | None:
        """The job that does it, or what it was answered with; PeerRefused when that is kept no longer."""
        with self._lock:
            return self._find(expert, request_id)

    def begin(self, job: Job) -> Job | Outcome:
        """Note that a job does it, and give that job back; or what `find` gives, where that is something."""
        with self._lock:
            known = self._find(job.expert, job.request_id)
            if known is None:
                self._under_way[job.expert.uid, job.request_id] = job
                return job
            return known

    def end(self, job: Job, outcome: Outcome | None) -> None:
        """A job is over, with this answer; with None it has none, and may not have been done at all."""
        key = job.expert.uid, job.request_id
        with self._lock:
            if self._under_way.get(key) is not job:
                return
            del self._under_way[key]
            if outcome is None:
                return
            self._answers[key] = outcome
            self.used_bytes += _bytes_of(outcome)
            while self._answers and (self.used_bytes > self._max_bytes or len(self._answers) > _MAX_ANSWERS):
                _, oldest = self._answers.popitem(last=False)
                self.used_bytes -= _bytes_of(oldest)

    def _find(self, expert: Expert, request_id: bytes) -> Job | Outcome | None:
        key = expert.uid, request_id
        known = self._under_way.get(key) or self._answers.get(key)
        if known is None and expert.has_applied(request_id):
            raise PeerRefused(
                "this backward was applied before, and its answer is kept no longer.",
                cause="it was sent again late, or after this server was started anew.",
                next_step="go on without its gradient.",
            )
        return known


class _Inputs(msgspec.Struct, frozen=True):
    uid: str
    tensors: Sequence[Any]
    size_bytes: int
    since_s: float


def _bytes_of(outcome: Outcome) -> int:
    return _ENTRY_BYTES + sum(memoryview(buffer).nbytes for buffer in outcome[1])
