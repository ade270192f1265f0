"""Holding the caller's thread on purpose, in the one place where a group does so."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.core import SYSTEM_CLOCK, Clock, Deadline

_SLICE_S = 0.001  # others may wait for work that this worker does for them between two slices
_NEAR_S = 1e-9


class Sleeper:
    """Sleeps by a clock; a test gives one whose `sleep` moves a manual clock."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock

    def sleep(self, seconds: float) -> None:
        """Hold the thread."""
        time.sleep(seconds)

    def until(self, due_s: float, between: Callable[[], None], deadline: Deadline, what: str) -> None:
        """Sleep until a moment of the clock, calling `between` now and then.

        DeadlineExceeded, naming `what` was waited for, if the deadline comes first.
        """
        while (left_s := due_s - self.clock.now_s()) > _NEAR_S:
            deadline.check(what)
            self.sleep(min(left_s, _SLICE_S, deadline.remaining_s))
            between()
