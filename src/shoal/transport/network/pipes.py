"""One direction of a byte stream under a link: what has been pushed, what is on its way, what is held up.

A link (`links`) says when bytes leave and arrive and keeps none; a pipe keeps them and tells. Streams in
memory (`memory`) and tunnels between real sockets (`shaped`) both run on pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from shoal.core import SYSTEM_CLOCK
from shoal.transport.network.links import Link

_SOON_S = 0.02  # from here on a millisecond is less than 5 %
_SPIN_S = 0.0015


def corrupted(data: bytes, choice: random.Random) -> bytes:
    """A copy with one byte changed."""
    damaged = bytearray(data)
    damaged[choice.randrange(len(damaged))] ^= 0xFF
    return bytes(damaged)


_What = bytes | Callable[[], None]
"""Bytes, or what should happen in their place in the order."""


class Pipe:
    """Carries bytes in order from `push` to `deliver`, which is never called inside `push`.

    More than `buffer_bytes` that have not left make it full; `on_drained` is called when nothing is left of
    them. `choice` picks the bytes that a corrupting link damages.
    """

    __slots__ = (
        "_arrival",
        "_buffer_bytes",
        "_choice",
        "_crossing",
        "_deliver",
        "_drain",
        "_held",
        "_held_bytes",
        "_is_closed",
        "_is_paused",
        "_last_arrival_at_s",
        "_last_left_at_s",
        "_link",
        "_loop",
        "_on_drained",
        "_stop_listening",
        "is_full",
    )

    def __init__(
        self,
        loop: Loop,
        link: Link,
        deliver: Callable[[bytes], None],
        on_drained: Callable[[], None],
        *,
        buffer_bytes: int = 0,
        choice: random.Random,
    ) -> None:
        self.is_full = False
        self._loop = loop
        self._link = link
        self._deliver = deliver
        self._on_drained = on_drained
        self._buffer_bytes = buffer_bytes
        self._choice = choice
        # lists: they are short, and an empty deque takes ten times the memory
        self._held: list[_What] = []  # not carried yet
        self._held_bytes = 0
        self._crossing: list[tuple[float, float, _What]] = []  # when it leaves the queue, when it arrives
        self._last_left_at_s = self._last_arrival_at_s = -math.inf
        self._arrival: Timer | None = None
        self._drain: Timer | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._is_paused = False
        self._is_closed = False

    @property
    def queued_bytes(self) -> int:
        """Pushed, and not yet out of the sender's queue."""
        num_bytes, now_s = self._held_bytes, self._loop.time()
        for left_at_s, _, what in reversed(self._crossing):
            if left_at_s <= now_s:
                break
            num_bytes += len(what) if isinstance(what, bytes) else 0
        return num_bytes

    def push(self, data: bytes) -> None:
        """Send these bytes after all earlier ones."""
        if not data or self._is_closed:
            return
        if self._held or self._is_paused or not self._carry(data, len(data)):
            self._hold(data)
        if not self.is_full and self.queued_bytes > self._buffer_bytes:
            self.is_full = True
            self._await_drain()

    def push_eof(self, then: Callable[[], None]) -> None:
        """Have `then` run in its turn, after all bytes pushed so far."""
        if self._is_closed:
            return
        if self._held or self._is_paused or not self._carry(then, 0):
            self._hold(then)

    @property
    def is_unused(self) -> bool:
        """Whether nothing has ever been put on its way."""
        return self._last_left_at_s == -math.inf

    def cut(self, then: Callable[[], None]) -> None:
        """Drop what has not left; `then` crosses the link after what has."""
        now_s, crossing = self._loop.time(), self._crossing
        while crossing and crossing[-1][0] > now_s:
            crossing.pop()
        self._last_left_at_s, self._last_arrival_at_s = crossing[-1][:2] if crossing else (now_s, now_s)
        if not crossing:
            self._cancel_arrival()
        self._drop_queue()
        self.push_eof(then)

    def pause(self) -> None:
        """The receiver takes no more for now: what arrives waits, what is pushed is held."""
        self._is_paused = True
        self._cancel_arrival()

    def resume(self) -> None:
        """The receiver takes bytes again."""
        self._is_paused = False
        if self._crossing and self._arrival is None:
            self._await_arrival(self._loop.time(), self._crossing[0][1])
        self._release()

    def close(self) -> None:
        """Drop everything; nothing is called any more."""
        self._is_closed = True
        self._crossing.clear()
        self._drop_queue()
        self._cancel_arrival()

    # --- what the link says ---

    def _carry(self, what: _What, size_bytes: int) -> bool:
        """Put it on its way; False when the link holds it up."""
        now_s = self._loop.time()
        left_at_s, arrives_at_s, is_corrupt = self._link.carry_stream(now_s, size_bytes)
        if arrives_at_s == math.inf:
            return False
        if is_corrupt and isinstance(what, bytes):
            what = corrupted(what, self._choice)
        # nothing overtakes
        self._last_left_at_s = max(left_at_s, self._last_left_at_s)
        self._last_arrival_at_s = arrives_at_s = max(arrives_at_s, self._last_arrival_at_s)
        self._crossing.append((self._last_left_at_s, arrives_at_s, what))
        if self._arrival is None and not self._is_paused:
            self._await_arrival(now_s, arrives_at_s)
        return True

    def _hold(self, what: _What) -> None:
        self._held.append(what)
        if isinstance(what, bytes):
            self._held_bytes += len(what)
        if self._stop_listening is None:
            self._stop_listening = self._link.when_changed(self._on_link_changed)

    def _release(self) -> None:
        """Try again what was held up."""
        while self._held and not self._is_paused:
            what = self._held[0]
            size_bytes = len(what) if isinstance(what, bytes) else 0
            if not self._carry(what, size_bytes):
                return
            self._held.pop(0)
            self._held_bytes -= size_bytes
        if not self._held:
            self._stop_waiting_for_link()
            if self.is_full:
                self._await_drain()

    def _on_link_changed(self) -> None:
        """Real links change in whichever thread the script's time passes."""
        if isinstance(self._loop, PreciseTimers):
            call_on_loop(self._loop.loop, self._release)
        else:
            self._release()

    def _stop_waiting_for_link(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    # --- leaving ---

    def _await_drain(self) -> None:
        if self._drain is None and not self._held:
            at_s = max(self._last_left_at_s, self._loop.time())
            self._drain = self._loop.call_at(at_s, self._drained, at_s)

    def _drained(self, at_s: float) -> None:
        self._drain = None
        now_s = max(at_s, self._loop.time())  # a loop's timers may be a little early
        if self._held or self._last_left_at_s > now_s:
            self._await_drain()
        elif self.is_full:
            self.is_full = False
            self._on_drained()

    def _drop_queue(self) -> None:
        self.is_full = False
        self._held.clear()
        self._held_bytes = 0
        self._stop_waiting_for_link()
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None

    # --- arriving ---

    def _await_arrival(self, now_s: float, at_s: float) -> None:
        if at_s <= now_s:
            self._arrival = self._loop.call_soon(self._arrive, at_s)
        else:
            self._arrival = self._loop.call_at(at_s, self._arrive, at_s)

    def _cancel_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _arrive(self, at_s: float) -> None:
        crossing, this = self._crossing, self._arrival
        now_s = max(at_s, self._loop.time())  # a loop's timers may be a little early
        while crossing and crossing[0][1] <= now_s:
            if self._is_paused:
                return
            what = crossing.pop(0)[2]
            if isinstance(what, bytes):
                self._deliver(what)
            else:
                what()
        if self._arrival is this:  # else the receiver has paused, closed or cut it
            self._arrival = None
            if crossing and not self._is_paused:
                self._await_arrival(now_s, crossing[0][1])


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Have a loop call it, from any thread; nothing where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _PreciseTimer:
    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class PreciseTimers:
    """The part of an event loop that pipes use, right to a fraction of a millisecond.

    uvloop's timers count whole milliseconds, and a loop's idea of the time may be as old as its last turn. A
    timer that is soon due is awaited with the loop's timer until 1.5 ms before, and then turn by turn, which
    keeps the loop busy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.time = SYSTEM_CLOCK.now_s
        self.call_soon = loop.call_soon
        self._soon: list[tuple[float, int, _PreciseTimer]] = []
        self._order = itertools.count()
        self._wake_at_s: float | None = None
        self._waker: asyncio.Handle | None = None

    def is_closed(self) -> bool:
        """Whether the loop has been closed."""
        return self.loop.is_closed()

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> _PreciseTimer | asyncio.Handle:
        """Have it called then; what it returns has `cancel`."""
        delay_s = when - self.time()
        if delay_s <= 0:
            return self.loop.call_soon(callback, *args)
        if delay_s > _SOON_S:
            return self.loop.call_later(delay_s, callback, *args)
        call = _PreciseTimer(callback, args)
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


Loop = asyncio.AbstractEventLoop | PreciseTimers
"""What counts the time of links: an event loop, real or virtual, or timers that are more precise."""
Timer = asyncio.Handle | _PreciseTimer
"""What a `Loop` gives for a call that is to come; `cancel` is all that it can do."""
