"""Time as a thing that is passed in: the machine's clock, and one that tests move by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Protocol, cast

from shoal.core.errors import UsageError


class Clock(Protocol):
    """Two readings: `now_s` never goes back and measures waits, `wall_s` is what records expire by."""

    def now_s(self) -> float:
        """Seconds since an unknown start; only differences mean something."""

    def wall_s(self) -> float:
        """Seconds since 1970, UTC; may jump when the machine's clock is set."""


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        """The monotonic clock, the one that asyncio loops use."""
        return time.monotonic()

    def wall_s(self) -> float:
        """The machine's idea of UTC."""
        return time.time()


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_s = wall_s

    def now_s(self) -> float:
        """Where the clock stands."""
        return self._now_s

    def wall_s(self) -> float:
        """Where the calendar stands."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Move both readings forward; never back."""
        if not seconds >= 0:
            raise UsageError(f"A clock cannot go {seconds} s forward.", next_step="give zero or more.")
        self._now_s += seconds
        self._wall_s += seconds


SYSTEM_CLOCK = SystemClock()


class _Threads(threading.local):
    clock: Clock = SYSTEM_CLOCK


_threads = _Threads()


def set_thread_clock(clock: Clock) -> None:
    """From now on `running_clock` is this one where no loop runs, in this thread alone."""
    _threads.clock = clock


def running_clock() -> Clock:
    """The clock of the running loop, or of the thread, where it has its own, as in virtual time.

    The machine's otherwise.
    """
    loop = asyncio._get_running_loop()
    return _threads.clock if loop is None else cast("Clock", getattr(loop, "clock", SYSTEM_CLOCK))
