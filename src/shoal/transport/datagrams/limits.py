"""What is bounded: calls at once, sessions, strangers, what is kept for callers, and log lines about them."""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import TYPE_CHECKING, Protocol

from shoal.core import Deadline
from shoal.transport.datagrams.callee import MAX_KEPT_BYTES_IN_ALL, CalleeSession
from shoal.transport.datagrams.sessions import Session

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramTransport

_EARLY_S = 0.001  # loops round their timers to milliseconds and may ring a little early


class Timed(Protocol):
    """Somebody who wants to be woken, unless it is over by then."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is to be woken any more."""

    def on_timer(self, now_s: float) -> None:
        """The time has come."""


class Timers:
    """Many timers behind one of the loop, and none while nobody waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Timed]] = []
        self._num_set = 0
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at_s = math.inf

    def set(self, at_s: float, timed: Timed) -> None:
        """Wake somebody at a time of the loop; those of the same time in order of asking."""
        self._num_set += 1
        heapq.heappush(self._heap, (at_s, self._num_set, timed))
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
        for at_s, _, timed in due:  # what they set anew rings in a later turn, however soon it is
            if not timed.is_over:
                timed.on_timer(max(now_s, at_s))
        self._rings_at_s = math.inf
        if heap:
            self._arm(heap[0][0])


class CallSlots:
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
        """What the slots were for is over: nobody needs to wait for one."""
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


MAX_UNPROVEN = 4096
MAX_UNPROVEN_A_HOST = 256


class UnprovenSessions:
    """The oldest of a host goes when the host has too many, the oldest of all when there are too many."""

    def __init__(self, sessions: dict[bytes, Session]) -> None:
        self._sessions = sessions
        self._by_host: dict[str, dict[bytes, CalleeSession]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, callee: CalleeSession) -> None:
        """Let packets reach a new session."""
        host = _host_of(callee)
        if len(self._by_host.get(host, ())) >= MAX_UNPROVEN_A_HOST:
            self._drop_oldest(host)
        elif self._num >= MAX_UNPROVEN:
            self._drop_oldest(next(iter(self._by_host)))
        self._by_host.setdefault(host, {})[callee.id] = callee
        self._num += 1
        self._sessions[callee.id] = callee

    def remove(self, callee: CalleeSession) -> None:
        """It is no newcomer any more."""
        host = _host_of(callee)
        of_host = self._by_host.get(host, {})
        if of_host.pop(callee.id, None) is not None:
            self._num -= 1
            if not of_host:
                del self._by_host[host]

    def _drop_oldest(self, host: str) -> None:
        callee = next(iter(self._by_host[host].values()))
        self.remove(callee)
        self._sessions.pop(callee.id, None)


def _host_of(callee: CalleeSession) -> str:
    return str(callee.where[0])


SESSIONS_A_CONNECTION = 4
"""So many sessions for each of `Limits.max_connections`: they cost much less."""
_EVICTED_SHARE = 8  # one in so many sessions goes when there are too many


def make_room(transport: DatagramTransport, *, num_unproven: int) -> bool:
    """Drop the sessions unused for longest when there are too many; False when all are in use."""
    max_sessions = SESSIONS_A_CONNECTION * transport.limits.max_connections + num_unproven
    if len(transport.sessions) <= max_sessions:
        return True
    idle = [session for session in transport.sessions.values() if session.is_settled and not session.num_open]
    idle.sort(key=lambda session: session.used_at_s)
    for session in idle[: 1 + len(idle) // _EVICTED_SHARE]:
        transport.drop(session, "it was not used for a long time.")
    return bool(idle)


def shed(transport: DatagramTransport) -> None:
    """Forget answers of the sessions that were not used for the longest time, then those sessions.

    That a call was served is forgotten with its session only: else it could run twice.
    """
    keepers = [one for one in transport.sessions.values() if isinstance(one, CalleeSession) and one.is_proven]
    keepers.sort(key=lambda session: session.used_at_s)
    for keeper in keepers:
        if transport.kept_bytes <= MAX_KEPT_BYTES_IN_ALL // 2:
            return
        keeper.kept.shed()
    for keeper in keepers:
        if transport.kept_bytes <= MAX_KEPT_BYTES_IN_ALL // 2:
            return
        if not keeper.num_open:
            transport.drop(keeper, "too much was kept for it.")
