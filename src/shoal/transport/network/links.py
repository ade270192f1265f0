"""What bytes pass on their way: a peer's line up, what lies between, the other's line down.

Each line and link is a queue that sends one byte after another, and the next one begins to send what it
has when the first byte comes, not the last: three queues of one speed together take as long as one.
Streams and datagrams share the queues. A queue is full, for datagrams, when too many of them wait in it: a
stream waits at its sender and crowds nobody out. A stream feels a lost packet as a pause of one round trip,
in which nothing behind it arrives. Congestion control is not modelled: a stream takes all the bandwidth that
it finds. What a fault script does to a link is in `conditions`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.transport.network.distributions import Draws, sampler_of
from shoal.transport.network.profiles import DEFAULT_QUEUE_MS, Way

PACKET_BYTES = 1400
LEAST_RETRANSMISSION_S = 0.01  # a lost packet is missed no sooner, however near the other side is

_MAX_TRIES = 8


class Passage(NamedTuple):
    """How a link carries something; times are those of the loop."""

    left_at_s: float
    """When the sender's queue has passed it on: bandwidth."""
    arrives_at_s: float
    """Infinity: held up, not carried; to be asked for again when the link has changed."""
    is_corrupt: bool = False


class LineQueue:
    """A queue that sends one byte after another, so many in a second."""

    __slots__ = ("per_byte_s", "queue_s", "slowness")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        self.queue_s = queue_ms * 1e-3
        self.slowness = 1.0
        self.per_byte_s = 8e-6 / mbit_s

    @property
    def bytes_per_s(self) -> float:
        """The bytes that it can carry in a second."""
        return 1 / (self.per_byte_s * self.slowness)


class UpLine(LineQueue):
    """The sender's own line, or the way between: what enters it, enters in order."""

    __slots__ = ("_busy_until_s", "_datagrams_until_s")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        super().__init__(mbit_s, queue_ms)
        self._busy_until_s = 0.0
        self._datagrams_until_s = 0.0  # as if nothing else used the line

    def take(
        self, first_s: float, last_s: float, size_bytes: int, *, is_datagram: bool
    ) -> tuple[float, float] | None:
        """When the first and the last byte are through, given when they come; None when it is full."""
        work_s = size_bytes * self.per_byte_s * self.slowness
        if is_datagram:
            until_s = max(first_s, self._datagrams_until_s)
            if until_s - first_s > self.queue_s:
                return None
            self._datagrams_until_s = until_s + work_s
        first_s = max(first_s, self._busy_until_s)
        self._busy_until_s = last_s = max(last_s, first_s + work_s)
        return first_s, last_s


class _BusyTimes:
    """When something is busy: what is asked for later may come sooner, and fills the gaps."""

    __slots__ = ("_begins_s", "_ends_s")

    def __init__(self) -> None:
        self._begins_s: list[float] = []  # in order, never touching
        self._ends_s: list[float] = []

    def copy(self) -> _BusyTimes:
        copied = _BusyTimes()
        copied._begins_s, copied._ends_s = self._begins_s[:], self._ends_s[:]
        return copied

    def take(self, now_s: float, first_s: float, work_s: float, most_wait_s: float) -> float | None:
        """The end of so much free time from `first_s` on, which is free no more; None for too long a wait."""
        begins_s, ends_s = self._begins_s, self._ends_s
        if ends_s and ends_s[0] <= now_s:
            num_past = bisect_right(ends_s, now_s)
            del begins_s[:num_past], ends_s[:num_past]
        index = place = bisect_right(ends_s, first_s)
        left_s, at_s = work_s, first_s
        while place < len(begins_s) and begins_s[place] - at_s < left_s:
            left_s -= max(0.0, begins_s[place] - at_s)
            at_s = ends_s[place]
            place += 1
        through_s = at_s + left_s
        if through_s - work_s - first_s > most_wait_s:
            return None
        if index < place:  # one stretch, with those that it has filled the gaps between
            begins_s[place - 1] = min(first_s, begins_s[index])
            ends_s[place - 1] = through_s
            del begins_s[index : place - 1], ends_s[index : place - 1]
        else:
            begins_s.insert(index, first_s)
            ends_s.insert(index, through_s)
        return through_s


class DownLine(LineQueue):
    """The receiver's own line, asked at the time of sending: what comes from far is asked for before what
    comes from near and arrives first.
    """

    __slots__ = ("_busy", "_datagrams")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        super().__init__(mbit_s, queue_ms)
        self._busy = _BusyTimes()
        self._datagrams: _BusyTimes | None = None  # as if nothing else used the line; None while it is so

    def take(
        self, now_s: float, first_s: float, last_s: float, size_bytes: int, *, is_datagram: bool
    ) -> float | None:
        """When the last byte is through, given when first and last come; None where the queue is full."""
        work_s = size_bytes * self.per_byte_s * self.slowness
        most_wait_s = self.queue_s if is_datagram else math.inf
        if not is_datagram and self._datagrams is None:
            self._datagrams = self._busy.copy()
        elif is_datagram and self._datagrams is not None:
            if self._datagrams.take(now_s, first_s, work_s, most_wait_s) is None:
                return None
            most_wait_s = math.inf
        through_s = self._busy.take(now_s, first_s, work_s, most_wait_s)
        return None if through_s is None else max(last_s, through_s)


class Link:
    """One direction between two peers: lines of both ends, where they have a limit, and the way between.

    It says when bytes leave and arrive and keeps none of them. Real and simulated networks ask the same ones.
    """

    def __init__(self, way: Way, up: UpLine | None, down: DownLine | None, draws: Draws) -> None:
        self._way = UpLine(way.mbit_s, way.queue_ms or DEFAULT_QUEUE_MS) if way.mbit_s else None
        self._queues = [queue for queue in (up, self._way) if queue is not None]
        self._down = down
        self._uniform = draws.uniform
        self._sample_s = sampler_of(way.delay_ms or 0.0)
        self._has_one_delay = not way.delay_ms or isinstance(way.delay_ms, int | float)
        self._jitter_s = (way.jitter_ms or 0.0) * 1e-3
        self._loss = way.loss or 0.0

    @property
    def bytes_per_s(self) -> float:
        """What the narrowest part can carry; infinity without a limit."""
        lines = [*self._queues, self._down] if self._down is not None else self._queues
        return min((line.bytes_per_s for line in lines), default=math.inf)

    def carry_stream(self, now_s: float, size_bytes: int) -> Passage:
        """For bytes that must arrive; the caller keeps their order."""
        passage = self._carry(now_s, size_bytes, is_datagram=False)
        assert passage is not None, "only datagrams are lost"
        return passage

    def carry_datagram(self, now_s: float, size_bytes: int) -> Sequence[Passage]:
        """For a packet: none when it is lost, by chance or for want of room; two when it is duplicated."""
        passage = self._carry(now_s, size_bytes, is_datagram=True)
        return () if passage is None else (passage,)

    def _carry(self, now_s: float, size_bytes: int, *, is_datagram: bool) -> Passage | None:
        first_s = left_s = now_s
        for queue in self._queues:
            taken = queue.take(first_s, left_s, size_bytes, is_datagram=is_datagram)
            if taken is None:
                return None
            first_s, left_s = taken
        delay_s = self._sample_s(0.5 if self._has_one_delay else self._uniform())
        if self._jitter_s:
            delay_s = max(0.0, delay_s + (2 * self._uniform() - 1) * self._jitter_s)
        if self._loss and self.happens(self._loss, size_bytes):
            if is_datagram:
                return None
            delay_s += self._retransmission_s(delay_s)
        arrives_s = left_s + delay_s
        if self._down is not None:
            through_s = self._down.take(
                now_s, first_s + delay_s, arrives_s, size_bytes, is_datagram=is_datagram
            )
            if through_s is None:
                return None
            if not is_datagram and through_s > arrives_s:
                # a stream does not run ahead of its receiver: what waits there, waits at the sender
                left_s = through_s - delay_s
            arrives_s = through_s
        return Passage(left_s, arrives_s)

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called whenever what was held up may pass, here never; returns how to stop that."""
        return nothing

    def happens(self, probability: float, size_bytes: int) -> bool:
        """Whether what befalls a packet with this probability befalls one of a message."""
        if size_bytes > PACKET_BYTES:
            num_packets = -(-size_bytes // PACKET_BYTES)
            probability = 1 - (1 - probability) ** num_packets
        return self._uniform() < probability

    def _retransmission_s(self, delay_s: float) -> float:
        """Until a lost packet has been missed and sent again, as often as that is lost too."""
        round_trip_s = max(2 * delay_s, LEAST_RETRANSMISSION_S)
        num_tries = 1
        while num_tries < _MAX_TRIES and self._uniform() < self._loss:
            num_tries += 1
        return num_tries * round_trip_s


def nothing() -> None:
    """For those who want to know of nothing, and how to stop what never begins."""


IDEAL_LINK = Link(Way(), None, None, Draws(0))
"""No delay, no limit, no loss."""
