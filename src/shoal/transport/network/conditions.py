"""All that a network does to its links: a profile and a fault script, set in motion by a seed and a loop.

Links in memory and shaped sockets both ask here. Each direction between two peers draws its own random
numbers, from the seed and both addresses, so that what happens on one does not depend on the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from shoal.core import Address, Clock, UsageError
from shoal.transport.network import faults
from shoal.transport.network.distributions import Draws
from shoal.transport.network.faults import Event, FaultScript, Schedule
from shoal.transport.network.links import LEAST_RETRANSMISSION_S, DownLine, Link, Passage, UpLine, nothing
from shoal.transport.network.pipes import Loop, Timer
from shoal.transport.network.profiles import Profile, Way

PeerNames = tuple[str | None, ...]
"""All that a script may call a peer; none for one that is not known."""
LinkPart = Literal["whole", "leaving", "arriving"]
_ANY = Address("any", 0)
T = TypeVar("T")
L = TypeVar("L", UpLine, DownLine)
_HELD = Passage(math.inf, math.inf)


class Conditions:
    """A network's links, its clocks, and who is dead. Link times are those of the loop.

    In a simulated world (`is_world`) the script's time begins when `begin_script` says so, and the world has
    workers join and leave by itself.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        script: FaultScript | None = None,
        *,
        seed: int = 0,
        is_world: bool = False,
    ) -> None:
        self.profile = profile or Profile()
        self.seed = seed
        self.version = 0
        """Grows whenever other faults hold."""
        self.next_change_s = math.inf
        self._has_script = script is not None
        script = script or FaultScript()
        script.check_names(self.profile.places)
        self._has_begun = not is_world
        if not is_world:
            script.refuse_changes()
        self._schedule = Schedule(script, seed)
        # where all ways are alike, it need not be looked for again for each of a simulation's links
        self._only_way = None if self.profile.ways.between else self.profile.way_between(_ANY, _ANY)
        self._links: dict[tuple[Address | None, Address | None, str], Link] = {}
        self._up: dict[Address, UpLine | None] = {}
        self._down: dict[Address, DownLine | None] = {}
        self._subscribers: dict[object, Callable[[], None]] = {}
        self._on_kill: dict[object, tuple[Address, Callable[[], None]]] = {}
        self._loop: Loop | None = None
        self._started_s = 0.0
        self._step = 0
        self._timer: Timer | None = None
        self._has_news = False
        self._is_stopped = False

    # --- time ---

    def start(self, loop: Loop | None = None) -> None:
        """Let the script's time begin, on the running loop or another; again: nothing.

        A network that is used without this begins with its first link. UsageError for a second run: lines
        and scripts would go on where the first one has left them.
        """
        if self._loop is not None:
            self._check_run(loop)
            return
        self._loop = loop or asyncio.get_running_loop()
        self._started_s = self._loop.time() if self._has_begun else math.inf
        if not self._is_stopped:
            self.next_change_s = self._started_s + self._schedule.next_change_s
            self._turn()

    def begin_script(self) -> None:
        """Let the script's time begin now, in a world; on its loop."""
        self._has_begun = True
        if self._loop is None:
            self.start()
        else:
            self._started_s = self._loop.time()
            self._turn()

    def _check_run(self, loop: Loop | None) -> None:
        began = self._loop
        is_another = loop is None and asyncio.get_running_loop() is not began
        if is_another or (began is not None and began.is_closed()):
            raise UsageError(
                "Conditions serve one run, and these have served another.",
                next_step="make new Conditions for each run.",
            )

    def stop(self) -> None:
        """Let nothing change any more, for good."""
        self._is_stopped = True
        self.next_change_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def step(self, number: int) -> None:
        """Tell the script which step the program is at; steps go forward only."""
        self._step = max(self._step, number)
        self._turn()

    def catch_up(self, now_s: float) -> None:
        """Have the faults of a time hold; those who wait for a change are told by the loop, not in here."""
        if self._is_stopped:
            return
        script_s = now_s - self._started_s
        if now_s >= self.next_change_s:  # the difference may be rounded to a little less
            script_s = max(script_s, self._schedule.next_change_s)
        if self._schedule.advance(script_s, self._step):
            self.version += 1
            self._has_news = True
            self._slow_lines()
        self.next_change_s = self._started_s + self._schedule.next_change_s

    def _turn(self, due_s: float = -math.inf) -> None:
        """Bring everybody up to date and wait for the next change."""
        if self._loop is None or self._is_stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.catch_up(max(due_s, self._loop.time()))  # a loop's timers may be a little early
        if self.next_change_s < math.inf:
            self._timer = self._loop.call_at(self.next_change_s, self._turn, self.next_change_s)
        if self._has_news:
            self._has_news = False
            for address, callback in tuple(self._on_kill.values()):
                if self.is_dead(address):
                    callback()
            for callback in tuple(self._subscribers.values()):
                callback()

    def when_changed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called on the loop whenever other faults hold; returns how to stop that."""
        return _register(self._subscribers, callback)

    # --- peers ---

    def on_kill(self, address: Address, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called when this peer is killed, at once if it is dead; returns how to stop that."""
        if self.is_dead(address):
            callback()
            return nothing
        return _register(self._on_kill, (address, callback))

    def is_dead(self, address: Address) -> bool:
        """Whether the script has killed this peer."""
        return any(
            event.is_active and isinstance(event.fault, faults.Kill) and event.concerns(self._names(address))
            for event in self._schedule.events
        )

    def clock_for(self, where: Callable[[], Address | None], clock: Clock) -> Clock:
        """The clock that the peer there sees: its wall time may be wrong, its waits never are.

        `where` is looked at whenever the clock is, since a peer may be known by another address than before.
        """
        is_skewed = any(isinstance(event.fault, faults.Skew) for event in self._schedule.events)
        return _SkewedClock(self, where, clock) if is_skewed else clock

    def clock_error_s(self, address: Address) -> float:
        """How far the script lets a peer's wall clock be ahead now."""
        return sum(
            event.fault.offset_s + event.fault.drift * (self.now_s() - event.began_s)
            for event in self._schedule.events
            if isinstance(event.fault, faults.Skew)
            and event.is_active
            and event.concerns(self._names(address))
        )

    def now_s(self) -> float:
        """The seconds since the script's time began."""
        return 0.0 if self._loop is None else self._loop.time() - self._started_s

    # --- links ---

    def link(self, source: Address | None, target: Address | None, part: LinkPart = "whole") -> Link:
        """One's line up, the way between, the other's line down.

        `leaving` is what a sender shapes itself: its line up, and the way to a peer that it knows; `arriving`
        what a receiver does: its line down, and the way from a peer that it has dialed.
        """
        if self._loop is None and self._has_script:
            self.start()
        key = (source, target, part)
        link = self._links.get(key)
        if link is None:
            up, down, way = None, None, Way()
            if source and part != "arriving":
                up = self._line(self._up, source, self.profile.line_of(source).up_mbit_s, UpLine)
            if target and part != "leaving":
                down = self._line(self._down, target, self.profile.line_of(target).down_mbit_s, DownLine)
            if source and target:
                way = self._only_way or self.profile.way_between(source, target)
            if source == target:  # a peer reaches itself through no network
                up, down, way = None, None, Way()
            draws = Draws(self.seed, "link", str(source), str(target))
            if self._has_script:
                link = FaultyLink(self, (source, target), way, (up, down), draws)
            else:
                link = Link(way, up, down, draws)
            self._links[key] = link
        return link

    def concern_line(self, here: Address) -> bool:
        """Whether anything is to be done for what reaches or leaves a peer, apart from ways to others."""
        place = self.profile.line_of(here)
        return self._has_script or bool(place.up_mbit_s or place.down_mbit_s)

    def _line(
        self, lines: dict[Address, L | None], peer: Address, mbit_s: float | None, make: type[L]
    ) -> L | None:
        """A peer's own line up or down, which all its links share; None where it has no limit."""
        if peer not in lines:
            lines[peer] = line = make(mbit_s, self.profile.line_of(peer).queue_ms) if mbit_s else None
            if line is not None:
                line.slowness = self.slowness(peer)
        return lines[peer]

    # --- faults ---

    def _names(self, peer: Address | None) -> PeerNames:
        if peer is None:
            return ()
        return self._schedule.names_of(peer, self.profile.place_of(peer))

    def _slow_lines(self) -> None:
        for lines in (self._up, self._down):
            for peer, line in lines.items():
                if line is not None:
                    line.slowness = self.slowness(peer)

    def slowness(self, peer: Address) -> float:
        """How many times slower a peer's own line is now."""
        slowness = 1.0
        for event in self._schedule.events:
            fault = event.fault
            if event.is_active and isinstance(fault, faults.Slow) and not (fault.link or fault.between):
                slowness *= fault.factor if event.concerns(self._names(peer)) else 1.0
        return slowness

    def effects_on(self, source: Address | None, target: Address | None) -> Effects:
        """What the script does now to a link, or, of a peer whose other side is not known, to its line."""
        return effects_on(self._schedule.events, self._names(source), self._names(target), self._started_s)


# --- what a fault script does to a link ---


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

    def add(self, fault: faults.Fault) -> None:
        """Take one more fault into account."""
        if isinstance(fault, faults.Partition):
            self.is_cut = True
        elif isinstance(fault, faults.Slow):
            self.factor *= fault.factor
        elif isinstance(fault, faults.Drop):
            self.passes *= 1 - fault.probability
            self.is_cut |= self.passes == 0
        elif isinstance(fault, faults.Corrupt):
            self.is_right *= 1 - fault.probability
        elif isinstance(fault, faults.Duplicate):
            self.duplicate = max(self.duplicate, fault.probability)
        elif isinstance(fault, faults.Reorder):
            self.reorder = max(self.reorder, fault.probability)
            self.reorder_by_s = max(self.reorder_by_s, fault.by_ms * 1e-3)


def effects_on(events: Sequence[Event], source: PeerNames, target: PeerNames, started_s: float) -> Effects:
    """What they do now between two peers; one whose other side is not known (no names) feels its own only."""
    effects = Effects()
    ends = [end for end in (source, target) if end]
    for event in events:
        fault = event.fault
        if event.is_over:
            continue
        if isinstance(fault, faults.Pause):
            if event.is_active and any(map(event.concerns, ends)):
                effects.resumes_s = max(effects.resumes_s, started_s + event.ends_s)
            elif target and event.concerns(target):
                effects.pauses.append((started_s + event.began_s, started_s + event.ends_s))
        elif event.is_active and isinstance(fault, faults.Kill):
            effects.is_dead |= any(map(event.concerns, ends))
        elif event.is_active and len(ends) == 2 and event.touches(source, target):
            effects.add(fault)
    effects.pauses.sort()
    return effects


class FaultyLink(Link):
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
        per_byte_s = 0.0 if self._way is None else self._way.per_byte_s
        self._without_faults = self._sample_s, self._jitter_s, self._loss, per_byte_s

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
            self._apply(conditions.effects_on(*self._ends))
        return self._effects

    def _apply(self, effects: Effects) -> None:
        sample_s, jitter_s, loss, per_byte_s = self._without_faults
        factor = effects.factor
        self._sample_s = sample_s if factor == 1 else lambda uniform: factor * sample_s(uniform)
        self._jitter_s = factor * jitter_s
        self._loss = 1 - (1 - loss) * effects.passes if effects.passes < 1 else loss
        if self._way is not None:
            self._way.per_byte_s = factor * per_byte_s
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


def _register(table: dict[object, T], entry: T) -> Callable[[], None]:
    """Add an entry to a table; returns how to take it out again."""
    token = object()
    table[token] = entry

    def stop() -> None:
        table.pop(token, None)

    return stop


class _SkewedClock:
    """A clock that goes wrong while the script says so."""

    def __init__(self, conditions: Conditions, where: Callable[[], Address | None], clock: Clock) -> None:
        self._conditions = conditions
        self._where = where
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.now_s()

    def wall_s(self) -> float:
        here = self._where()
        return self._clock.wall_s() + (self._conditions.clock_error_s(here) if here is not None else 0.0)
