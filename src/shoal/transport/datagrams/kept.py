"""Which calls of a session have been served, and their answers as long as they may be asked for again.

Every call from the caller's oldest open one on is remembered, so that none runs twice; answers are kept
within bounds, and the oldest of them forgotten first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

MAX_KEPT = 1024
"""Answers that are kept for one session."""
MAX_KEPT_BYTES = 1 << 20
"""Their bytes."""
MAX_KEPT_BYTES_IN_ALL = 64 << 20
"""The bytes of those of all sessions."""
MAX_SPAN = 8192
"""Ids from a caller's oldest open call to its newest."""

NEW: Any = object()
"""A call that was never seen."""
RUNNING: Any = object()
"""A call whose handler runs."""
FORGOTTEN: Any = None
"""A call that has been served; its answer is not kept."""

Kept = Any
"""One of the above, an encoded frame, or a list of frames with the parts of an answer."""


class KeepingHub(Protocol):
    """What all sessions keep together."""

    kept_bytes: int

    def shed(self) -> None:
        """More than MAX_KEPT_BYTES_IN_ALL are kept: forget some."""


class KeptAnswers:
    """The memory of one session."""

    def __init__(self, hub: KeepingHub) -> None:
        self.oldest = 0
        """Calls before this one are of no interest to their caller."""
        self.size_bytes = 0
        self._hub = hub
        self._calls: dict[int, Kept] = {}
        self._order: collections.deque[tuple[int, int]] = collections.deque()  # ids and sizes of kept answers

    def get(self, call_id: int) -> Kept:
        """What is known of a call."""
        return self._calls.get(call_id, NEW)

    def mark(self, call_id: int, state: Kept) -> None:
        """Remember a call without an answer: RUNNING or FORGOTTEN."""
        self._calls[call_id] = state

    def keep(self, call_id: int, answer: bytes | list[bytes], size_bytes: int) -> None:
        """Remember a call's answer."""
        self._calls[call_id] = answer
        order = self._order
        order.append((call_id, size_bytes))
        self._count(size_bytes)
        while len(order) > MAX_KEPT or self.size_bytes > MAX_KEPT_BYTES:
            self._forget_answer()
        if self._hub.kept_bytes > MAX_KEPT_BYTES_IN_ALL:
            self._hub.shed()

    def forget_before(self, oldest: int) -> Sequence[int]:
        """The caller waits for no earlier call: forget them all. Those that still run are returned."""
        calls = self._calls
        if oldest - self.oldest <= len(calls):
            ids: Sequence[int] = range(self.oldest, oldest)
        else:
            ids = [call_id for call_id in calls if call_id < oldest]
        self.oldest = oldest
        running = [call_id for call_id in ids if calls.pop(call_id, None) is RUNNING]
        order = self._order
        while order and order[0][0] < oldest:
            self._count(-order.popleft()[1])
        return running

    def shed(self) -> None:
        """Forget all answers, but not that the calls were served."""
        while self._order:
            self._forget_answer()

    def _forget_answer(self) -> None:
        call_id, size_bytes = self._order.popleft()
        self._count(-size_bytes)
        if call_id in self._calls:
            self._calls[call_id] = FORGOTTEN

    def _count(self, more_bytes: int) -> None:
        self.size_bytes += more_bytes
        self._hub.kept_bytes += more_bytes
