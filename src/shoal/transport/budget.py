"""Bytes that all connections of a transport share: who asks too much waits in line."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable


class ByteBudget:
    """First come, first served; may be used from several loop threads.

    What has arrived already may pass the line, and use `spare_bytes` more: it takes memory as it is.
    What asks for more than the whole budget is the caller's mistake: limits are checked before.
    """

    def __init__(self, max_bytes: int, spare_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._spare_bytes = spare_bytes
        self._used_bytes = 0
        self._waiting: collections.OrderedDict[object, tuple[int, Callable[[], None]]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What is taken now."""
        return self._used_bytes

    def try_take(self, size_bytes: int, *, may_pass: bool = False) -> bool:
        """Take bytes now, if there are as many and nobody stands in line for them."""
        with self._lock:
            max_bytes = self.max_bytes + self._spare_bytes if may_pass else self.max_bytes
            if self._used_bytes + size_bytes > max_bytes or (self._waiting and not may_pass):
                return False
            self._used_bytes += size_bytes
            return True

    def stand_in_line(self, ticket: object, size_bytes: int, when_granted: Callable[[], None]) -> None:
        """Wait for bytes; whoever gives some back calls `when_granted` once these are taken."""
        with self._lock:
            self._waiting[ticket] = (size_bytes, when_granted)
            granted = self._grant()
        for grant in granted:
            grant()

    def leave(self, ticket: object) -> bool:
        """Step out of the line; False when it was not (or no longer) in it and so holds its bytes."""
        with self._lock:
            was_waiting = self._waiting.pop(ticket, None) is not None
            granted = self._grant()
        for when_granted in granted:
            when_granted()
        return was_waiting

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken."""
        with self._lock:
            self._used_bytes -= size_bytes
            if not self._waiting:
                return
            granted = self._grant()
        for when_granted in granted:
            when_granted()

    def _grant(self) -> list[Callable[[], None]]:
        granted = []
        while self._waiting:
            ticket, (size_bytes, when_granted) = next(iter(self._waiting.items()))
            if self._used_bytes + size_bytes > self.max_bytes:
                break
            del self._waiting[ticket]
            self._used_bytes += size_bytes
            granted.append(when_granted)
        return granted
