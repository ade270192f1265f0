"""How long to wait: a moment on a clock, and a rule that finds it from how long earlier waits took.

One knob, `patience`, scales every adaptive deadline; nobody sets timeouts one by one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import msgspec

from shoal.core.clock import SYSTEM_CLOCK, Clock, running_clock
from shoal.core.errors import DeadlineExceeded, UsageError


class Deadline(msgspec.Struct, frozen=True):
    """A moment after which a wait is over."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    def __repr__(self) -> str:
        return f"Deadline(in {self.at_s - self.clock.now_s():.3f} s)"

    @classmethod
    def after(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        """The moment `seconds` from now, by the running loop's clock; infinity means never."""
        if math.isnan(seconds):
            raise UsageError(
                "A deadline of NaN seconds means nothing.", next_step="give a number of seconds."
            )
        clock = clock or running_clock()
        return cls(clock.now_s() + seconds, clock)

    @classmethod
    def never(cls) -> Deadline:
        """For waits that something else bounds."""
        return cls(math.inf)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        left_s = self.at_s - self.clock.now_s()
        return left_s if left_s > 0 else 0.0

    @property
    def timeout_s(self) -> float | None:
        """Seconds left as asyncio's timeouts take them: None when it never passes."""
        return None if math.isinf(self.at_s) else self.remaining_s

    @property
    def is_past(self) -> bool:
        """Whether the time is over."""
        return self.clock.now_s() >= self.at_s

    def earlier(self, other: Deadline) -> Deadline:
        """The one that comes first; both must be on the same clock."""
        return self if self.at_s <= other.at_s else other

    def check(self, what: str) -> None:
        """Raise DeadlineExceeded, naming `what` was waited for, once the time is over."""
        if self.is_past:
            raise DeadlineExceeded(f"{what}: the deadline has passed.")


class AdaptiveDeadline:
    """median + k·MAD of the last waits, plus bytes over the measured bandwidth, times `patience`.

    Before it has seen five waits it answers `initial_s`. Waits that ended in a timeout are told by
    `missed`, which doubles the answer until one succeeds: a network that became slower is followed.
    """

    def __init__(
        self,
        *,
        patience: float = 1.0,
        initial_s: float = 10.0,
        floor_s: float = 0.05,
        k: float = 6.0,
        window: int = 64,
    ) -> None:
        if not patience > 0:
            raise UsageError(
                f"patience must be above 0, not {patience}.",
                next_step="1 is the default; 2 waits twice as long.",
            )
        self.patience = patience
        self._initial_s = initial_s
        self._floor_s = floor_s
        self._k = k
        self._waits_s: deque[float] = deque(maxlen=window)
        self._bulk_waits_s: deque[float] = deque(maxlen=window)
        self._bytes_per_s: deque[float] = deque(maxlen=window)
        self._usual_s: float | None = None
        self._misses_in_a_row = 0
        self._num_unseen = 0

    def observe(self, wait_s: float, size_bytes: int = 0) -> None:
        """Tell how long a wait took that succeeded, and how many bytes it moved."""
        self._misses_in_a_row = 0
        if size_bytes >= _BULK_BYTES and wait_s > 0:
            self._bulk_waits_s.append(wait_s)
            self._bytes_per_s.append(size_bytes / wait_s)
            return  # its time is mostly bytes: it teaches bandwidth, not latency
        self._waits_s.append(wait_s)
        self._num_unseen += 1
        if self._num_unseen >= _SEEN_EVERY or len(self._waits_s) < _ENOUGH * _SEEN_EVERY:
            self._usual_s = None

    def missed(self) -> None:
        """Tell that a wait ran into its deadline."""
        self._misses_in_a_row = min(self._misses_in_a_row + 1, 10)

    def timeout_s(self, size_bytes: int = 0) -> float:
        """Seconds that the next wait for `size_bytes` deserves."""
        if len(self._waits_s) + len(self._bytes_per_s) < _ENOUGH:
            base_s = self._initial_s
        elif not self._waits_s:
            # of latency nothing is known, except that a call takes no longer than a larger one did
            likely_s = max(statistics.median(self._bulk_waits_s), self._transfer_s(size_bytes))
            base_s = max(self._floor_s, 3 * likely_s)
        else:
            base_s = self._usual_s or self._find_usual()
            if size_bytes and self._bytes_per_s:
                base_s += 3 * self._transfer_s(size_bytes)
            elif size_bytes >= _BULK_BYTES:
                base_s += self._initial_s
        return base_s * self.patience * float(2**self._misses_in_a_row)

    def _find_usual(self) -> float:
        """What a wait for a few bytes deserves, as far as the last waits tell."""
        self._num_unseen = 0
        self._usual_s = self._floor_s
        # no median is above the longest wait: mostly the floor is enough, and nothing has to be sorted
        if max(3.0, 1.0 + self._k) * max(self._waits_s) > self._floor_s:
            median_s = statistics.median(self._waits_s)
            mad_s = statistics.median(abs(wait_s - median_s) for wait_s in self._waits_s)
            # three medians at least: the MAD of a few equal waits is zero
            self._usual_s = max(self._floor_s, median_s + self._k * mad_s, 3 * median_s)
        return self._usual_s

    def _transfer_s(self, size_bytes: int) -> float:
        return size_bytes / statistics.median(self._bytes_per_s)

    def next(self, size_bytes: int = 0, clock: Clock | None = None) -> Deadline:
        """The deadline of the next wait, from now."""
        return Deadline.after(self.timeout_s(size_bytes), clock)


_ENOUGH = 5  # below five waits a median says little
_SEEN_EVERY = 8  # waits between two looks at many: sorting them takes 60 µs
_BULK_BYTES = 1 << 18  # a quarter MiB: from here on time is bytes over bandwidth
