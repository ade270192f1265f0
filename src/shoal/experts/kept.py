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

from shoal.experts.jobs import Job, Outcome

_MAX_IDS = 1 << 17  # of applied requests, 16 bytes each: remembered for longer than their answers


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
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size_bytes > self._max_bytes:
            return
        now_s = time.monotonic()
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self.used_bytes -= known.size_bytes
            self._kept[key] = _Inputs(uid, tensors, size_bytes, now_s)
            self.used_bytes += size_bytes
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
    """Backward requests by their ids: those under way, and what was answered to those that are done."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._under_way: dict[bytes, Job] = {}
        self._answers: collections.OrderedDict[bytes, Outcome] = collections.OrderedDict()
        self._ids: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0

    def begin(self, request_id: bytes, job: Job) -> Job:
        """Note that a request is under way: the job that does it, which may have come before."""
        with self._lock:
            return self._under_way.setdefault(request_id, job)

    def find(self, request_id: bytes) -> Job | Outcome | None:
        """The job that is under way, or what it was answered with."""
        with self._lock:
            return self._under_way.get(request_id) or self._answers.get(request_id)

    def is_applied(self, request_id: bytes) -> bool:
        """Whether it was done, though its answer may be gone."""
        return request_id in self._ids

    def end(self, request_id: bytes, outcome: Outcome | None) -> None:
        """It is over: done with this answer, or with None not done at all."""
        with self._lock:
            self._under_way.pop(request_id, None)
            if outcome is None:
                return
            self._ids[request_id] = None
            if len(self._ids) > _MAX_IDS:
                self._ids.popitem(last=False)
            self._answers[request_id] = outcome
            self.used_bytes += _bytes_of(outcome)
            while self.used_bytes > self._max_bytes:
                _, oldest = self._answers.popitem(last=False)
                self.used_bytes -= _bytes_of(oldest)


class _Inputs(msgspec.Struct, frozen=True):
    uid: str
    tensors: Sequence[Any]
    size_bytes: int
    since_s: float


def _bytes_of(outcome: Outcome) -> int:
    return sum(memoryview(buffer).nbytes for buffer in outcome[1])
