"""Requests that are under way: few at once, and the slow ones told apart, so that others can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.core import Deadline

T = TypeVar("T")

MAX_IN_FLIGHT = 48
"""Requests of one look-up or store at once; what waits meanwhile finds company."""
_MIN_SLOW_S, _MAX_SLOW_S = 0.1, 1.0


class UnderWay(Generic[T]):
    """The requests of one operation; `on_slow` is told of each that takes longer than answers usually do."""

    def __init__(self, usual_s: Callable[[], float], on_slow: Callable[[T], None]) -> None:
        self._usual_s = usual_s
        self._on_slow = on_slow
        self._sent_at_s: dict[T, float] = {}  # in the order of sending
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more may be sent; slow ones take no place."""
        return len(self._sent_at_s) < MAX_IN_FLIGHT

    def begin(self, request: T) -> None:
        """It is being sent."""
        self._sent_at_s[request] = self._loop.time()
        if self._timer is None:
            self._arm()

    def end(self, request: T) -> None:
        """It was answered, or has failed."""
        self._sent_at_s.pop(request, None)

    def close(self) -> None:
        """Tell of nobody any more."""
        self._sent_at_s.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _slow_s(self) -> float:
        return min(_MAX_SLOW_S, max(_MIN_SLOW_S, self._usual_s()))

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._slow_s() / 2, self._look)

    def _look(self) -> None:
        self._timer = None
        sent_before_s = self._loop.time() - self._slow_s()
        for request, sent_at_s in tuple(self._sent_at_s.items()):
            if sent_at_s > sent_before_s:
                break
            del self._sent_at_s[request]
            self._on_slow(request)
        if self._sent_at_s and self._timer is None:
            self._arm()


async def until_set(event: asyncio.Event, deadline: Deadline) -> None:
    """Wait for an event, or until the time is over."""
    try:
        async with asyncio.timeout(deadline.timeout_s):
            await event.wait()
    except TimeoutError:
        pass
