"""Which calls of a session have been served, and their answers as long as they may be asked for again.

Every call from the caller's oldest open one on is remembered, so that none runs twice; answers are kept
within bounds, and the oldest of them forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

MAX_KEPT = 1024
"""Answers that are kept for one session."""
MAX_KEPT_BYTES = 1 << 20
"""Bytes that one session takes."""
MAX_KEPT_BYTES_IN_ALL = 64 << 20
"""Bytes that all sessions take."""
MAX_SPAN = 2560
"""Ids from a caller's oldest open call to its newest; a caller that keeps to its own bound has fewer."""
ENTRY_BYTES = 200
"""What remembering a call takes beside its answer."""

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
        """More than MAX_KEPT_BYTES_IN_ALL are taken: forget some."""


class KeptAnswers:
    """The memory of one session."""

    def __init__(self, hub: KeepingHub) -> None:
        self.oldest = 0
        """Calls before this one are of no interest to their caller."""
        self.size_bytes = 0
        self._hub = hub
        self._calls: dict[int, Kept] = {}
        self._sizes: dict[int, int] = {}  # of the answers that are kept, oldest first

    def get(self, call_id: int) -> Kept:
        """What is known of a call."""
        return self._calls.get(call_id, NEW)

    def mark(self, call_id: int, state: Kept) -> None:
        """Remember a call without an answer: RUNNING or FORGOTTEN."""
        size_bytes = self._sizes.pop(call_id, 0)
        if call_id not in self._calls:
            size_bytes -= ENTRY_BYTES
        self._calls[call_id] = state
        self._count(-size_bytes)
        if self._hub.kept_bytes > MAX_KEPT_BYTES_IN_ALL:
            self._hub.shed()

    def keep(self, call_id: int, answer: bytes | list[bytes], size_bytes: int) -> None:
        """Remember a call's answer."""
        sizes = self._sizes
        self._count(size_bytes if call_id in self._calls else size_bytes + ENTRY_BYTES)
        self._calls[call_id] = answer
        sizes[call_id] = size_bytes
        while len(sizes) > MAX_KEPT or (self.size_bytes > MAX_KEPT_BYTES and sizes):
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
        running = []
        sizes, freed_bytes = self._sizes, 0
        for call_id in ids:
            state = calls.pop(call_id, NEW)
            if state is not NEW:
                freed_bytes += sizes.pop(call_id, 0) + ENTRY_BYTES
                if state is RUNNING:
                    running.append(call_id)
        self._count(-freed_bytes)
        return running

    def shed(self) -> None:
        """Forget all answers, but not that the calls were served."""
        for call_id in self._sizes:
            self._calls[call_id] = FORGOTTEN
        self._count(-sum(self._sizes.values()))
        self._sizes.clear()

    def clear(self) -> None:
        """The session has ended: forget everything."""
        self._count(-self.size_bytes)
        self._calls.clear()
        self._sizes.clear()

    def _forget_answer(self) -> None:
        call_id = next(iter(self._sizes))
        self._calls[call_id] = FORGOTTEN
        self._count(-self._sizes.pop(call_id))

    def _count(self, more_bytes: int) -> None:
        self.size_bytes += more_bytes
        self._hub.kept_bytes += more_bytes
