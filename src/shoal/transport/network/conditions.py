"""All that a network does to its links: a profile and a fault script, set in motion by a seed and a loop.

Links in memory and shaped sockets both ask here. Each direction between two peers draws its own random
numbers, from the seed and both addresses, so that what happens on one does not depend on the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal, TypeVar

from shoal.core import Address, Clock, UsageError
from shoal.transport.network.distributions import Draws
from shoal.transport.network.faults import (
    Event,
    FaultScript,
    Kill,
    Schedule,
    Skew,
    Slow,
)
from shoal.transport.network.links import DownLine, Effects, FaultyLink, UpLine, WayLink, effects_on
from shoal.transport.network.pipes import Loop, Timer, nothing
from shoal.transport.network.profiles import Profile, Way

_NOBODY: tuple[str | None, ...] = ()
_ANY = Address("any", 0)
T = TypeVar("T")


class Conditions:
    """A network's links, its clocks, and who is dead. Link times are those of the loop."""

    def __init__(
        self, profile: Profile | None = None, script: FaultScript | None = None, *, seed: int = 0
    ) -> None:
        self.profile = profile or Profile()
        self.seed = seed
        self.version = 0
        """Grows whenever other faults hold."""
        self.next_change_s = math.inf
        self._schedule: Schedule | None = None
        if script is not None:
            script.check_names(self.profile.places)
            script.refuse_changes()
            self._schedule = Schedule(script, seed)
        # where all ways are alike, it need not be looked for again for each of a simulation's links
        self._only_way = None if self.profile.ways.between else self.profile.way_between(_ANY, _ANY)
        self._links: dict[tuple[Address | None, Address | None, str], WayLink] = {}
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
        self._started_s = self._loop.time()
        if self._schedule is not None and not self._is_stopped:
            self.next_change_s = self._started_s + self._schedule.next_change_s
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
        if self._schedule is not None:
            self._turn()

    def catch_up(self, now_s: float) -> None:
        """Have the faults of a time hold; those who wait for a change are told by the loop, not in here."""
        if self._schedule is None or self._is_stopped:
            return
        if self._schedule.advance(now_s - self._started_s, self._step):
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
            event.is_active and isinstance(event.fault, Kill) and event.concerns(self._names(address))
            for event in self._events()
        )

    def clock_for(self, address: Address, clock: Clock) -> Clock:
        """The clock that this peer sees: its wall time may be wrong, its waits never are."""
        skews = [
            event
            for event in self._events()
            if isinstance(event.fault, Skew) and event.concerns(self._names(address))
        ]
        return _SkewedClock(self, clock, skews) if skews else clock

    def now_s(self) -> float:
        """The seconds since the script's time began."""
        return 0.0 if self._loop is None else self._loop.time() - self._started_s

    # --- links ---

    def link(self, source: Address, target: Address) -> WayLink:
        """The whole way: one's line up, the way between, the other's line down."""
        return self._link(source, target, "whole")

    def leaving(self, here: Address, target: Address | None) -> WayLink:
        """What a sender shapes itself: its line up, and the way to a peer that it knows."""
        return self._link(here, target, "leaving")

    def arriving(self, source: Address | None, here: Address) -> WayLink:
        """What a receiver shapes itself: its line down, and the way from a peer that it has dialed."""
        return self._link(source, here, "arriving")

    def _link(
        self, source: Address | None, target: Address | None, part: Literal["whole", "leaving", "arriving"]
    ) -> WayLink:
        if self._loop is None and self._schedule is not None:
            self.start()
        key = (source, target, part)
        link = self._links.get(key)
        if link is None:
            up = self._up_line(source) if source and part != "arriving" else None
            down = self._down_line(target) if target and part != "leaving" else None
            way = Way()
            if source and target:
                way = self._only_way or self.profile.way_between(source, target)
            if source == target:  # a peer reaches itself through no network
                up, down, way = None, None, Way()
            draws = Draws(self.seed, "link", str(source), str(target))
            if self._schedule is None:
                link = WayLink(way, up, down, draws)
            else:
                link = FaultyLink(self, (source, target), way, (up, down), draws)
            self._links[key] = link
        return link

    def concern_line(self, here: Address) -> bool:
        """Whether anything is to be done for what reaches or leaves a peer, apart from ways to others."""
        place = self.profile.line_of(here)
        return self._schedule is not None or bool(place.up_mbit_s or place.down_mbit_s)

    def _up_line(self, peer: Address) -> UpLine | None:
        if peer not in self._up:
            place = self.profile.line_of(peer)
            self._up[peer] = line = UpLine(place.up_mbit_s, place.queue_ms) if place.up_mbit_s else None
            if line is not None:
                line.slowness = self._slowness(peer)
        return self._up[peer]

    def _down_line(self, peer: Address) -> DownLine | None:
        if peer not in self._down:
            place = self.profile.line_of(peer)
            self._down[peer] = line = (
                DownLine(place.down_mbit_s, place.queue_ms) if place.down_mbit_s else None
            )
            if line is not None:
                line.slowness = self._slowness(peer)
        return self._down[peer]

    # --- faults ---

    def _events(self) -> list[Event]:
        return [] if self._schedule is None else self._schedule.events

    def _names(self, peer: Address | None) -> tuple[str | None, ...]:
        if peer is None or self._schedule is None:
            return _NOBODY
        return self._schedule.names_of(peer, self.profile.place_of(peer))

    def _slow_lines(self) -> None:
        for lines in (self._up, self._down):
            for peer, line in lines.items():
                if line is not None:
                    line.slowness = self._slowness(peer)

    def _slowness(self, peer: Address) -> float:
        """How many times slower a peer's own line is now."""
        slowness = 1.0
        for event in self._events():
            fault = event.fault
            if event.is_active and isinstance(fault, Slow) and not (fault.link or fault.between):
                slowness *= fault.factor if event.concerns(self._names(peer)) else 1.0
        return slowness

    def effects_on(self, source: Address | None, target: Address | None) -> Effects:
        """What the script does now to a link, or, of a peer whose other side is not known, to its line."""
        return effects_on(self._events(), self._names(source), self._names(target), self._started_s)


def _register(table: dict[object, T], entry: T) -> Callable[[], None]:
    """Add an entry to a table; returns how to take it out again."""
    token = object()
    table[token] = entry

    def stop() -> None:
        table.pop(token, None)

    return stop


class _SkewedClock:
    """A clock that goes wrong while the script says so."""

    def __init__(self, conditions: Conditions, clock: Clock, skews: list[Event]) -> None:
        self._conditions = conditions
        self._clock = clock
        self._skews = skews

    def now_s(self) -> float:
        return self._clock.now_s()

    def wall_s(self) -> float:
        now_s = self._conditions.now_s()
        error_s = sum(
            event.fault.offset_s + event.fault.drift * (now_s - event.began_s)
            for event in self._skews
            if isinstance(event.fault, Skew) and event.is_active
        )
        return self._clock.wall_s() + error_s
