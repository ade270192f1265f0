"""Joins a real connection to one end of a pair of sockets by two pipes: a network in between, below TLS.

The other end of the pair is what the transport speaks through. Back-pressure passes through: an end is read
only while the pipe behind it is short. The end of one side is the end of the connection; a half that stays
open, which TLS knows nothing of, is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import socket
from collections.abc import Callable, Sequence
from typing import cast

from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.scope import settle
from shoal.transport.conditions.lines import WayLink
from shoal.transport.networks.pipes import Passage, Pipe, nothing
from shoal.transport.networks.timers import PreciseTimers

_LEAST_QUEUE_BYTES = 64 * 1024
_MOST_QUEUE_BYTES = 4 * 1024 * 1024
_QUEUE_S = 0.02
_LEAST_PIECE_BYTES = 4 * 1024
_MOST_PIECE_BYTES = 64 * 1024
_PIECE_S = 0.001
_PAIR_BYTES = 64 * 1024  # what the kernel may hold of the pair, unseen by the queue


class _HomeLink:
    """A link that tells of changes on the loop that uses it, whichever thread they come from."""

    def __init__(self, link: WayLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop

    def carry_stream(self, now_s: float, size_bytes: int) -> Passage:
        return self._link.carry_stream(now_s, size_bytes)

    def carry_datagram(self, now_s: float, size_bytes: int) -> Sequence[Passage]:
        return self._link.carry_datagram(now_s, size_bytes)

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._link.when_changed(functools.partial(call_home, self._loop, callback))


def call_home(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Have a loop call it, from any thread; nothing where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _End(asyncio.Protocol):
    """One socket, and the pipe that leads away from it."""

    def __init__(self, timers: PreciseTimers, link: WayLink, choice: random.Random) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_lost = False
        self.has_ended = False
        """It has said that no more will come."""
        self.other: _End
        self.on_lost: Callable[[], None]
        bytes_per_s = link.bytes_per_s
        self._queue_bytes = _within(_LEAST_QUEUE_BYTES, _QUEUE_S * bytes_per_s, _MOST_QUEUE_BYTES)
        self._piece_bytes = _within(_LEAST_PIECE_BYTES, _PIECE_S * bytes_per_s, _MOST_PIECE_BYTES)
        self._half_s = 0.0 if math.isinf(bytes_per_s) else self._queue_bytes / bytes_per_s / 2
        self._loop = timers.loop
        self._is_reading = True
        self._descriptor = -1
        loop = cast("asyncio.AbstractEventLoop", timers)  # the part of it that a pipe uses
        self.pipe = Pipe(
            loop,
            _HomeLink(link, timers.loop),
            self._deliver,
            self._resume,
            buffer_bytes=self._queue_bytes,
            choice=choice,
        )

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        close_in_children(self._descriptor)

    def data_received(self, data: bytes) -> None:
        pipe, size_bytes = self.pipe, self._piece_bytes
        if len(data) <= size_bytes:
            pipe.push(data)
        else:
            for start in range(0, len(data), size_bytes):
                pipe.push(data[start : start + size_bytes])
        if self._is_reading and self.transport is not None and pipe.queued_bytes > self._queue_bytes:
            self._is_reading = False
            self.transport.pause_reading()
            self._look_later()

    def eof_received(self) -> bool:
        self.has_ended = True
        self.pipe.push_eof(self.other.close)
        return True

    def pause_writing(self) -> None:
        self.other.pipe.pause()

    def resume_writing(self) -> None:
        self.other.pipe.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        keep_in_children(self._descriptor)
        self.is_lost = True
        self.other.pipe.close()
        if self.other.has_ended:  # it was closed because of that: nothing is left to be said
            self.pipe.close()
            self.other.abort()
        elif not self.has_ended:
            self.has_ended = True
            self.pipe.push_eof(self.other.abort)
        self.on_lost()

    # --- reading while the pipe is short ---

    def _look_later(self) -> None:
        if self._half_s:
            self._loop.call_later(self._half_s, self._look)

    def _look(self) -> None:
        """Read on before the pipe is empty, so that it never runs dry."""
        if self._is_reading or self.is_lost:
            return
        if self.pipe.queued_bytes <= self._queue_bytes // 2:
            self._resume()
        else:
            self._look_later()

    def _resume(self) -> None:
        if not self._is_reading and self.transport is not None and not self.is_lost:
            self._is_reading = True
            self.transport.resume_reading()

    # --- what the pipes and the tunnel do ---

    def _deliver(self, data: bytes) -> None:
        if self.other.transport is not None and not self.other.is_lost:
            self.other.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Tunnel:
    """Two sockets with a network between them; lives on one loop, and ends when either of them does.

    `choice` picks the bytes that a corrupting link damages.
    """

    def __init__(
        self, timers: PreciseTimers, leaving: WayLink, arriving: WayLink, choice: random.Random
    ) -> None:
        self.loop = timers.loop
        self._inside = _End(timers, leaving, choice)
        self._outside = _End(timers, arriving, choice)
        self._inside.other, self._outside.other = self._outside, self._inside
        self._inside.on_lost = self._outside.on_lost = self._check_over
        self.on_over: Callable[[], None] = nothing

    async def open(self, outside: socket.socket) -> socket.socket:
        """Join a connected socket, which belongs to the tunnel from now on; returns the end to speak to."""
        inside, ours = socket.socketpair()
        try:
            for each in (inside, ours):
                each.setblocking(False)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BYTES)
            await self.loop.create_connection(lambda: self._inside, sock=inside)
            await self.loop.create_connection(lambda: self._outside, sock=outside)
        except BaseException:
            ours.close()
            for end, its_socket in ((self._inside, inside), (self._outside, outside)):
                if end.transport is None:
                    its_socket.close()
                    end.is_lost = True
            self.abort()
            raise
        return ours

    def abort(self) -> None:
        """End it at once: what is on its way is lost."""
        for end in (self._inside, self._outside):
            end.pipe.close()
            end.has_ended = True
            end.abort()

    def reset(self) -> None:
        """The other side is no more: this one hears of it when the way lets that through."""
        self._outside.pipe.cut(self.abort)

    def _check_over(self) -> None:
        if self._inside.is_lost and self._outside.is_lost:
            for end in (self._inside, self._outside):
                end.pipe.close()
            self.on_over()


async def cross(link: WayLink, timers: PreciseTimers, size_bytes: int) -> None:
    """Wait for as long as one packet takes; the caller's deadline ends a wait for a link that is cut."""
    while True:
        waiter: asyncio.Future[None] = timers.loop.create_future()
        wake = functools.partial(settle, waiter, None)
        arrives_s = link.carry_stream(timers.time(), size_bytes).arrives_at_s
        if arrives_s < math.inf:
            timer = timers.call_at(arrives_s, wake)
            try:
                return await waiter
            finally:
                timer.cancel()
        stop = link.when_changed(functools.partial(call_home, timers.loop, wake))
        try:
            await waiter
        finally:
            stop()


def _within(least: int, wanted: float, most: int) -> int:
    return int(min(max(least, wanted), most))
