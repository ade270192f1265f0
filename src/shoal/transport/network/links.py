"""What bytes pass on their way: a peer's line up, what lies between, the other's line down; and faults there.

Each line and link is a queue that sends one byte after another, and the next one begins to send what it
has when the first byte comes, not the last: three queues of one speed together take as long as one.
Streams and datagrams share the queues. A queue is full, for datagrams, when too many of them wait in it: a
stream waits at its sender and crowds nobody out. A stream feels a lost packet as a pause of one round trip,
in which nothing behind it arrives. Congestion control is not modelled: a stream takes all the bandwidth that
it finds. What a fault script does to a link is the second half of this file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.core import Address
from shoal.transport.network.distributions import Draws, sampler_of
from shoal.transport.network.faults import (
    Corrupt,
    Drop,
    Duplicate,
    Event,
    Fault,
    Kill,
    Partition,
    Pause,
    Reorder,
    Slow,
)
from shoal.transport.network.pipes import Passage, nothing
from shoal.transport.network.profiles import DEFAULT_QUEUE_MS, Way

if TYPE_CHECKING:
    from shoal.transport.network.conditions import Conditions

PACKET_BYTES = 1400
LEAST_RETRANSMISSION_S = 0.01  # a lost packet is missed no sooner, however near the other side is

_MAX_TRIES = 8
_LOST: tuple[Passage, ...] = ()


def seconds_per_byte(mbit_s: float | None) -> float:
    """How long a queue takes for one byte; zero without a limit."""
    return 0.0 if mbit_s is None else 8e-6 / mbit_s


class UpLine:
    """The sender's own line: what enters it, enters in order."""

    __slots__ = ("_busy_until_s", "_datagrams_until_s", "_per_byte_s", "queue_s", "slowness")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        self.queue_s = queue_ms * 1e-3
        self.slowness = 1.0
        self._per_byte_s = seconds_per_byte(mbit_s)
        self._busy_until_s = 0.0
        self._datagrams_until_s = 0.0  # as if nothing else used the line

    @property
    def bytes_per_s(self) -> float:
        """The bytes that it can carry in a second."""
        return 1 / (self._per_byte_s * self.slowness)

    def take(self, now_s: float, size_bytes: int) -> tuple[float, float]:
        """When the first and the last byte are through."""
        first_s = max(now_s, self._busy_until_s)
        self._busy_until_s = last_s = first_s + size_bytes * self._per_byte_s * self.slowness
        return first_s, last_s

    def take_datagram(self, now_s: float, size_bytes: int) -> tuple[float, float] | None:
        """The same for a packet; None when too many datagrams wait."""
        until_s = max(now_s, self._datagrams_until_s)
        if until_s - now_s > self.queue_s:
            return None
        self._datagrams_until_s = until_s + size_bytes * self._per_byte_s * self.slowness
        return self.take(now_s, size_bytes)


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


class DownLine:
    """The receiver's own line, asked at the time of sending: what comes from far is asked for before what
    comes from near and arrives first.
    """

    __slots__ = ("_busy", "_datagrams", "_per_byte_s", "queue_s", "slowness")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        self.queue_s = queue_ms * 1e-3
        self.slowness = 1.0
        self._per_byte_s = seconds_per_byte(mbit_s)
        self._busy = _BusyTimes()
        self._datagrams: _BusyTimes | None = None  # as if nothing else used the line; None while it is so

    @property
    def bytes_per_s(self) -> float:
        """The bytes that it can carry in a second."""
        return 1 / (self._per_byte_s * self.slowness)

    def take(self, now_s: float, first_s: float, last_s: float, size_bytes: int) -> float:
        """When the last byte is through, given when first and last come."""
        if self._datagrams is None:
            self._datagrams = self._busy.copy()
        through_s = self._take(self._busy, now_s, first_s, size_bytes, math.inf)
        assert through_s is not None, "it may wait for ever"
        return max(last_s, through_s)

    def take_datagram(self, now_s: float, first_s: float, last_s: float, size_bytes: int) -> float | None:
        """The same for a packet; None when too many datagrams wait."""
        queue_s = self.queue_s
        if self._datagrams is not None:
            if self._take(self._datagrams, now_s, first_s, size_bytes, queue_s) is None:
                return None
            queue_s = math.inf
        through_s = self._take(self._busy, now_s, first_s, size_bytes, queue_s)
        return None if through_s is None else max(last_s, through_s)

    def _take(
        self, busy: _BusyTimes, now_s: float, first_s: float, size_bytes: int, most_wait_s: float
    ) -> float | None:
        return busy.take(now_s, first_s, size_bytes * self._per_byte_s * self.slowness, most_wait_s)


class WayLink:
    """A link that a profile describes: lines of both ends, where they have a limit, and the way between."""

    def __init__(self, way: Way, up: UpLine | None, down: DownLine | None, draws: Draws) -> None:
        self._up = up
        self._down = down
        self._uniform = draws.uniform
        self._sample_s = sampler_of(way.delay_ms or 0.0)
        self._has_one_delay = not way.delay_ms or isinstance(way.delay_ms, int | float)
        self._jitter_s = (way.jitter_ms or 0.0) * 1e-3
        self._loss = way.loss or 0.0
        self._per_byte_s = seconds_per_byte(way.mbit_s)
        self._queue_s = (way.queue_ms or DEFAULT_QUEUE_MS) * 1e-3
        self._busy_until_s = 0.0
        self._datagrams_until_s = 0.0  # as if nothing else used the link

    @property
    def bytes_per_s(self) -> float:
        """What the narrowest part can carry; infinity without a limit."""
        lines = [line.bytes_per_s for line in (self._up, self._down) if line is not None]
        return min([*lines, 1 / self._per_byte_s if self._per_byte_s else math.inf])

    def carry_stream(self, now_s: float, size_bytes: int) -> Passage:
        """For bytes that must arrive."""
        first_s = left_s = now_s
        if self._up is not None:
            first_s, left_s = self._up.take(now_s, size_bytes)
        if self._per_byte_s:
            first_s = max(first_s, self._busy_until_s)
            through_s = first_s + size_bytes * self._per_byte_s
            left_s = max(left_s, through_s)
            self._busy_until_s = left_s
        delay_s = self._sample_s(0.5 if self._has_one_delay else self._uniform())
        if self._jitter_s:
            delay_s = self._shaken(delay_s)
        if self._loss and self.happens(self._loss, size_bytes):
            delay_s += self._retransmission_s(delay_s)
        arrives_s = left_s + delay_s
        if self._down is not None:
            through_down_s = self._down.take(now_s, first_s + delay_s, arrives_s, size_bytes)
            if through_down_s > arrives_s:
                # a stream does not run ahead of its receiver: what waits there, waits at the sender
                arrives_s, left_s = through_down_s, through_down_s - delay_s
        return Passage(left_s, arrives_s)

    def carry_datagram(self, now_s: float, size_bytes: int) -> Sequence[Passage]:
        """For a packet: lost by chance, and where a queue is full of datagrams."""
        first_s = left_s = now_s
        if self._up is not None:
            taken = self._up.take_datagram(now_s, size_bytes)
            if taken is None:
                return _LOST
            first_s, left_s = taken
        if self._per_byte_s:
            work_s = size_bytes * self._per_byte_s
            datagrams_until_s = max(first_s, self._datagrams_until_s)
            if datagrams_until_s - first_s > self._queue_s:
                return _LOST
            self._datagrams_until_s = datagrams_until_s + work_s
            first_s = max(first_s, self._busy_until_s)
            through_s = first_s + work_s
            left_s = max(left_s, through_s)
            self._busy_until_s = left_s
        delay_s = self._sample_s(0.5 if self._has_one_delay else self._uniform())
        if self._jitter_s:
            delay_s = self._shaken(delay_s)
        if self._loss and self.happens(self._loss, size_bytes):
            return _LOST
        arrives_s = left_s + delay_s
        if self._down is not None:
            through_down_s = self._down.take_datagram(now_s, first_s + delay_s, arrives_s, size_bytes)
            if through_down_s is None:
                return _LOST
            arrives_s = through_down_s
        return (Passage(left_s, arrives_s),)

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Nothing is ever held up."""
        return nothing

    def happens(self, probability: float, size_bytes: int) -> bool:
        """Whether what befalls a packet with this probability befalls one of a message."""
        if size_bytes > PACKET_BYTES:
            num_packets = -(-size_bytes // PACKET_BYTES)
            probability = 1 - (1 - probability) ** num_packets
        return self._uniform() < probability

    def _shaken(self, delay_s: float) -> float:
        delay_s += (2 * self._uniform() - 1) * self._jitter_s
        return delay_s if delay_s > 0 else 0.0

    def _retransmission_s(self, delay_s: float) -> float:
        """Until a lost packet has been missed and sent again, as often as that is lost too."""
        round_trip_s = max(2 * delay_s, LEAST_RETRANSMISSION_S)
        num_tries = 1
        while num_tries < _MAX_TRIES and self._uniform() < self._loss:
            num_tries += 1
        return num_tries * round_trip_s


# --- under a fault script ---

_HELD = Passage(math.inf, math.inf)


@dataclass(slots=True)
class Effects:
    """What faults do to one direction between two peers at one time."""

    is_cut: bool = False
    is_dead: bool = False
    """One end is no more: datagrams are lost; streams carry what the operating system says of its end."""
    resumes_s: float = -math.inf
    """While either end is paused: until when; infinity when nobody knows."""
    factor: float = 1.0
    passes: float = 1.0
    """The probability that a packet is not dropped."""
    is_right: float = 1.0
    """The probability that one is not damaged."""
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_by_s: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When the receiver will be paused."""

    def add(self, fault: Fault) -> None:
        """Take one more fault into account."""
        if isinstance(fault, Partition):
            self.is_cut = True
        elif isinstance(fault, Slow):
            self.factor *= fault.factor
        elif isinstance(fault, Drop):
            self.passes *= 1 - fault.probability
            self.is_cut |= self.passes == 0
        elif isinstance(fault, Corrupt):
            self.is_right *= 1 - fault.probability
        elif isinstance(fault, Duplicate):
            self.duplicate = max(self.duplicate, fault.probability)
        elif isinstance(fault, Reorder):
            self.reorder = max(self.reorder, fault.probability)
            self.reorder_by_s = max(self.reorder_by_s, fault.by_ms * 1e-3)


Names = tuple[str | None, ...]


def effects_on(events: Sequence[Event], source: Names, target: Names, started_s: float) -> Effects:
    """What they do now between two peers; one whose other side is not known (no names) feels its own only."""
    effects = Effects()
    ends = [end for end in (source, target) if end]
    for event in events:
        fault = event.fault
        if event.is_over:
            continue
        if isinstance(fault, Pause):
            if event.is_active and any(map(event.concerns, ends)):
                effects.resumes_s = max(effects.resumes_s, started_s + event.ends_s)
            elif target and event.concerns(target):
                effects.pauses.append((started_s + event.began_s, started_s + event.ends_s))
        elif event.is_active and isinstance(fault, Kill):
            effects.is_dead |= any(map(event.concerns, ends))
        elif event.is_active and len(ends) == 2 and event.touches(source, target):
            effects.add(fault)
    effects.pauses.sort()
    return effects


class FaultyLink(WayLink):
    """A link that a script may hurt; while it does not, it costs two comparisons more."""

    def __init__(
        self,
        conditions: Conditions,
        ends: tuple[Address | None, Address | None],
        way: Way,
        lines: tuple[UpLine | None, DownLine | None],
        draws: Draws,
    ) -> None:
        super().__init__(way, *lines, draws)
        self._conditions = conditions
        self._ends = ends
        self._effects: Effects | None = None
        self._version = -1
        self._was_cut = False
        self._unhurt = self._sample_s, self._jitter_s, self._loss, self._per_byte_s

    def carry_stream(self, now_s: float, size_bytes: int) -> Passage:
        """For bytes that must arrive; held up while the link is cut or one end is paused."""
        effects = self._effects_at(now_s)
        if effects is None:
            return super().carry_stream(now_s, size_bytes)
        if effects.is_cut or effects.resumes_s > now_s:
            self._was_cut |= effects.is_cut
            return _HELD
        left_s, arrives_s, _ = super().carry_stream(now_s, size_bytes)
        if self._was_cut:  # what could not pass is sent again when the sender tries the next time
            self._was_cut = False
            arrives_s += max(LEAST_RETRANSMISSION_S, 2 * (arrives_s - left_s))
        arrives_s = _after(effects.pauses, arrives_s)
        return Passage(left_s, arrives_s, self._is_damaged(effects, size_bytes))

    def carry_datagram(self, now_s: float, size_bytes: int) -> Sequence[Passage]:
        """For a packet; one that meets a paused peer waits where it is known how long."""
        effects = self._effects_at(now_s)
        if effects is None:
            return super().carry_datagram(now_s, size_bytes)
        if effects.is_cut or effects.is_dead or effects.resumes_s == math.inf:
            return ()
        held_s = max(0.0, effects.resumes_s - now_s)  # what waits for a paused peer holds up nobody else
        passages: list[Passage] = []
        is_twice = effects.duplicate and self._uniform() < effects.duplicate
        for _ in range(2 if is_twice else 1):
            for left_s, in_order_s, _ in super().carry_datagram(now_s, size_bytes):
                is_late = effects.reorder and self._uniform() < effects.reorder
                late_s = effects.reorder_by_s * self._uniform() if is_late else 0.0
                arrives_s = _after(effects.pauses, in_order_s + held_s + late_s)
                if arrives_s < math.inf:
                    is_damaged = self._is_damaged(effects, size_bytes)
                    passages.append(Passage(left_s + held_s, arrives_s, is_damaged))
        return passages

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called whenever what was held up may pass; returns how to stop that."""
        return self._conditions.when_changed(callback)

    def _effects_at(self, now_s: float) -> Effects | None:
        """What holds now; None for nothing."""
        conditions = self._conditions
        if now_s >= conditions.next_change_s:
            conditions.catch_up(now_s)
        if self._version != conditions.version:
            self._version = conditions.version
            self._feel(conditions.effects_on(*self._ends))
        return self._effects

    def _feel(self, effects: Effects) -> None:
        sample_s, jitter_s, loss, per_byte_s = self._unhurt
        factor = effects.factor
        self._sample_s = sample_s if factor == 1 else lambda uniform: factor * sample_s(uniform)
        self._jitter_s = factor * jitter_s
        self._loss = 1 - (1 - loss) * effects.passes if effects.passes < 1 else loss
        self._per_byte_s = factor * per_byte_s
        is_quiet = effects == Effects() and not self._was_cut
        self._effects = None if is_quiet else effects

    def _is_damaged(self, effects: Effects, size_bytes: int) -> bool:
        return effects.is_right < 1 and self.happens(1 - effects.is_right, size_bytes)


def _after(pauses: Sequence[tuple[float, float]], arrives_s: float) -> float:
    """When something can be heard by a receiver that will be paused then."""
    for begins_s, ends_s in pauses:
        if begins_s <= arrives_s < ends_s:
            arrives_s = ends_s
    return arrives_s
