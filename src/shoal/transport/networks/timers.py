"""Timers that are right to a fraction of a millisecond, for delays on real sockets.

uvloop's timers count whole milliseconds, and a loop's idea of the time may be as old as its last turn. A
timer that is soon due is awaited with the loop's timer until shortly before, and then turn by turn.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from shoal.core import SYSTEM_CLOCK

_SOON_S = 0.02  # from here on a millisecond is less than 5 %
_SPIN_S = 0.0015


class _Call:
    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class PreciseTimers:
    """The part of an event loop that pipes use; keeps the loop busy while a call is due in 1.5 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.time = SYSTEM_CLOCK.now_s
        self.call_soon = loop.call_soon
        self._soon: list[tuple[float, int, _Call]] = []
        self._order = itertools.count()
        self._wake_at_s: float | None = None
        self._waker: asyncio.Handle | None = None

    def is_closed(self) -> bool:
        """Whether the loop is."""
        return self.loop.is_closed()

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> _Call | asyncio.Handle:
        """Have it called then; what it returns has `cancel`."""
        delay_s = when - self.time()
        if delay_s <= 0:
            return self.loop.call_soon(callback, *args)
        if delay_s > _SOON_S:
            return self.loop.call_later(delay_s, callback, *args)
        call = _Call(callback, args)
        heapq.heappush(self._soon, (when, next(self._order), call))
        self._await_next()
        return call

    def _await_next(self) -> None:
        if not self._soon:
            return
        at_s = self._soon[0][0]
        if self._waker is not None:
            if self._wake_at_s is not None and at_s >= self._wake_at_s:
                return
            self._waker.cancel()
        self._wake_at_s = at_s
        wait_s = at_s - self.time() - _SPIN_S
        self._waker = (
            self.loop.call_later(wait_s, self._wake) if wait_s > 0 else self.loop.call_soon(self._wake)
        )

    def _wake(self) -> None:
        self._waker = None
        soon, now_s = self._soon, self.time()
        while soon and soon[0][0] <= now_s:
            call = heapq.heappop(soon)[2]
            if call.callback is not None:
                self.loop.call_soon(call.callback, *call.args)
        while soon and soon[0][2].callback is None:
            heapq.heappop(soon)
        self._await_next()
