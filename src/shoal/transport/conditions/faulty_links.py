"""Links under a fault script: held up, slowed, dropping, damaging, repeating and reordering."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.core import Address
from shoal.transport.conditions.distributions import Draws
from shoal.transport.conditions.faults import (
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
from shoal.transport.conditions.lines import LEAST_RETRANSMISSION_S, DownLine, UpLine, WayLink
from shoal.transport.conditions.profiles import Way
from shoal.transport.networks.pipes import Passage

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
        """Feel one more."""
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


class Script(Protocol):
    """What a link needs of the conditions that it lives under."""

    version: int
    next_change_s: float

    def catch_up(self, now_s: float) -> None:
        """Have the faults of this time hold."""

    def effects_on(self, source: Address | None, target: Address | None) -> Effects:
        """What holds now between two peers."""

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called when other faults hold."""


class FaultyLink(WayLink):
    """A link that a script may hurt; while it does not, it costs two comparisons more."""

    def __init__(
        self,
        script: Script,
        ends: tuple[Address | None, Address | None],
        way: Way,
        lines: tuple[UpLine | None, DownLine | None],
        draws: Draws,
    ) -> None:
        super().__init__(way, *lines, draws)
        self._script = script
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
        return self._script.when_changed(callback)

    def _effects_at(self, now_s: float) -> Effects | None:
        """What holds now; None for nothing."""
        script = self._script
        if now_s >= script.next_change_s:
            script.catch_up(now_s)
        if self._version != script.version:
            self._version = script.version
            self._feel(script.effects_on(*self._ends))
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
