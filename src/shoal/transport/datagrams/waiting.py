"""Waiting without a timer or a task for each who waits: alarms behind one timer, and places in a line."""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import Protocol

from shoal.core import Deadline

_EARLY_S = 0.001  # loops round their timers to milliseconds and may ring a little early


class Sleeper(Protocol):
    """Somebody who wants to be woken, unless it is over by then."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is to be woken any more."""

    def on_alarm(self, now_s: float) -> None:
        """The time has come."""


class Alarms:
    """Many alarms, one timer of the loop, and none while nobody sleeps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Sleeper]] = []
        self._num_set = 0
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at_s = math.inf

    def set(self, at_s: float, sleeper: Sleeper) -> None:
        """Wake the sleeper at a time of the loop; those of the same time in order of asking."""
        self._num_set += 1
        heapq.heappush(self._heap, (at_s, self._num_set, sleeper))
        if at_s < self._rings_at_s:
            self._arm(at_s)

    def close(self) -> None:
        """Wake nobody any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at_s = None, math.inf

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_at_s = None, -math.inf  # nobody arms it before the end
        heap = self._heap
        now_s = self._loop.time()
        due = []
        while heap and (heap[0][0] <= now_s + _EARLY_S or heap[0][2].is_over):
            due.append(heapq.heappop(heap))
        for at_s, _, sleeper in due:  # what they set anew rings in a later turn, however soon it is
            if not sleeper.is_over:
                sleeper.on_alarm(max(now_s, at_s))
        self._rings_at_s = math.inf
        if heap:
            self._arm(heap[0][0])


class Line:
    """Places that are given in order of asking; there may be fewer than are taken already."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_places: int) -> None:
        self._loop = loop
        self._num_free = num_places
        self._waiting: dict[asyncio.Future[bool], None] = {}  # in order of asking

    def try_take(self) -> bool:
        """Take a place if one is free; whoever waits has been given it already."""
        if self._num_free > 0:
            self._num_free -= 1
            return True
        return False

    async def take(self, deadline: Deadline) -> bool:
        """Wait for a place; False when the deadline has passed before there was one."""
        if self.try_take():
            return True
        place: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[place] = None
        try:
            async with asyncio.timeout(deadline.timeout_s):
                return await place
        except TimeoutError:
            return place.done() and not place.cancelled()  # given in the moment in which time was over
        except asyncio.CancelledError:
            if not place.cancelled() and place.done() and place.result():
                self.give_back()  # given in the moment of being cancelled
            raise
        finally:
            if place.cancelled():
                self._waiting.pop(place, None)

    def let_all_in(self) -> None:
        """What the places were for is over: nobody needs to wait for one."""
        self._num_free = max(0, self._num_free)
        while self._waiting:
            self.give_back()

    def give_back(self) -> None:
        """Pass the place to the next in line."""
        while self._waiting and self._num_free >= 0:
            place = next(iter(self._waiting))
            del self._waiting[place]
            if not place.done():
                place.set_result(True)
                return
        self._num_free += 1
