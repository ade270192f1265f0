"""What a peer puts up with: its limits, bytes and slots that calls share, and lines of the log.

How often something may happen is limited by `core.rates`, for peers of the DHT in `dht/protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.core import SYSTEM_CLOCK, Clock, Deadline, LimitExceeded, Peer, ProtocolError, UsageError
from shoal.core.rates import RateLimiter
from shoal.core.untrusted import visible_line

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_MAX_LINES_A_S = 10
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a transport, with defaults that a home machine survives.

    Every peer has its own, and says those that concern callers in its hello.
    """

    max_connections: int = 1024
    """Accepted connections; one more makes the oldest that has said nothing go, or is refused."""
    max_calls: int = 1024
    """Calls that one connection may have open in one direction; a caller waits for a free place."""
    max_head_bytes: int = 1 * MIB
    """A call's method and payload; what is larger belongs into buffers."""
    max_message_bytes: int = 256 * MIB
    """All buffers of one message; what is larger goes through a channel."""
    max_buffers: int = 16_384
    """Buffers of one message."""
    max_bytes_in_flight: int = 1 * GIB
    """Buffers and large payloads of requests that are received or served, over all connections; callers
    beyond it wait."""
    channel_window_bytes: int = 8 * MIB
    """What a channel's sender may have sent before the receiver has taken it."""
    handshake_s: float = 10.0
    """Time from connection to a complete hello."""
    frame_s: float = 10.0
    """Time for a frame to arrive once it has begun, beside its bytes at `min_bytes_per_s`; thrice this for a
    message to come on, and for a peer to read what it was sent."""
    min_bytes_per_s: int = 4 * KIB
    """A sender or reader slower than this is cut off."""
    idle_s: float = 60.0
    """A connection without calls is closed by the dialing side after this time, by the other after thrice."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"The limit {name} must be above 0, not {getattr(self, name)}.")
        if self.max_message_bytes > self.max_bytes_in_flight:
            raise UsageError(
                "max_message_bytes is above max_bytes_in_flight: the largest message could never arrive.",
                next_step="raise max_bytes_in_flight to at least max_message_bytes.",
            )

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """LimitExceeded when a message's buffers are more than this peer takes, ProtocolError below zero."""
        if sizes and min(sizes) < 0:
            raise ProtocolError("A message announced a buffer of negative size.")
        total_bytes = sum(sizes)
        if total_bytes > self.max_message_bytes or len(sizes) > self.max_buffers:
            raise LimitExceeded(
                f"a message of {total_bytes:,} bytes in {len(sizes):,} buffers is above the limit of "
                f"{self.max_message_bytes:,} bytes in {self.max_buffers:,}.",
                next_step="send it in parts through a channel, or raise the receiver's limits.",
            )


class ByteBudget:
    """Bytes that all connections of a transport share, first come, first served. For any thread.

    What has arrived already may pass the line, and use `spare_bytes` more: it takes memory as it is.
    What asks for more than the whole budget is the caller's mistake: limits are checked before.
    """

    def __init__(self, max_bytes: int, spare_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._spare_bytes = spare_bytes
        self.used_bytes = 0
        """The bytes that are taken now."""
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}  # in order of asking
        self._lock = threading.Lock()

    def try_take(self, size_bytes: int, *, may_pass: bool = False) -> bool:
        """Take bytes now, if there are as many and nobody stands in line for them."""
        with self._lock:
            max_bytes = self.max_bytes + self._spare_bytes if may_pass else self.max_bytes
            if self.used_bytes + size_bytes > max_bytes or (self._waiting and not may_pass):
                return False
            self.used_bytes += size_bytes
            return True

    def join_queue(self, ticket: object, size_bytes: int, when_granted: Callable[[], None]) -> None:
        """Wait for bytes; whoever gives some back calls `when_granted` once these are taken."""
        with self._lock:
            self._waiting[ticket] = (size_bytes, when_granted)
        self._grant()

    def leave_queue(self, ticket: object) -> bool:
        """Stop waiting; False when it did not wait (any more) and so holds its bytes."""
        with self._lock:
            was_waiting = self._waiting.pop(ticket, None) is not None
        self._grant()
        return was_waiting

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken."""
        with self._lock:
            self.used_bytes -= size_bytes
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        """Take the bytes of those who are first in line, as far as there are as many, and tell them."""
        granted = []
        with self._lock:
            while self._waiting:
                ticket, (size_bytes, when_granted) = next(iter(self._waiting.items()))
                if self.used_bytes + size_bytes > self.max_bytes:
                    break
                del self._waiting[ticket]
                self.used_bytes += size_bytes
                granted.append(when_granted)
        for when_granted in granted:
            when_granted()


class CallSlots:
    """Slots that are given in order of asking; there may be fewer than are taken already."""

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
            if place.done() and not place.cancelled():
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


class Complaints:
    """Logs what misbehaving peers did, ten lines a second at most, and counts the rest. For any thread."""

    def __init__(self, log: logging.Logger, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log = log
        self._clock = clock
        self._lines = RateLimiter(_MAX_LINES_A_S, _MAX_LINES_A_S)
        self._num_left_out = 0
        self._lock = threading.Lock()

    def add(self, what: str, peer: Peer, why: str) -> None:
        """Say what was done to whom, and why."""
        with self._lock:
            num_lines = 2 if self._num_left_out else 1  # one says how many were left out
            if self._lines.take(None, num_lines, self._clock.now_s()):
                self._num_left_out += 1
                return
            self._summarize()
        # what a stranger sent may be part of it: it must not look like further lines of the log
        self._log.warning("%s (%s): %s", what, peer, visible_line(why[:_MAX_TEXT])[:_MAX_TEXT])

    def flush(self) -> None:
        """Tell what was left out so far."""
        with self._lock:
            self._summarize()

    def _summarize(self) -> None:
        if self._num_left_out:
            self._log.warning("and %d more complaints of this kind", self._num_left_out)
            self._num_left_out = 0
