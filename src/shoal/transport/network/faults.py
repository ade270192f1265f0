"""Fault scripts: what goes wrong in a network, when, and for whom.

A script is written in TOML (`docs/networks.md`). `Schedule` says what holds at a time and step; what that
does to bytes and clocks is `conditions`'s business: a new kind of fault is a class here, in `AnyFault`, and a
case in `conditions.Effects`. Times count from the start of the network.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Self

import msgspec

from shoal.core import Address
from shoal.transport.network import documents
from shoal.transport.network.distributions import Draws, NotNegative, Positive, digest_of
from shoal.transport.network.profiles import Probability, is_pattern, patterns_of

Names = Annotated[list[str], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Step = Annotated[int, msgspec.Meta(ge=0)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """When, and for whom. Without `for_s` and `for_steps` it holds to the end, without names for everybody.

    `count` picks so many of `peers`, or of all that the script names; `chance` is that it happens at all.
    """

    at_s: NotNegative | None = None
    at_step: Step | None = None
    for_s: Positive | None = None
    for_steps: Count | None = None
    peer: str | None = None
    peers: Names | None = None
    count: Count | None = None
    chance: Probability = 1.0

    why_for_good: ClassVar[str] = ""
    """Why it ends with the script alone, where it does: then it takes neither `for_s` nor `for_steps`."""

    def groups(self) -> list[list[str]]:
        """The names, in the groups that they stand in; none for everybody."""
        if self.peer is not None:
            return [[self.peer]]
        return [] if self.peers is None else [self.peers]

    def check(self) -> str:
        """Why it contradicts itself, or nothing."""
        if self.at_s is not None and self.at_step is not None:
            return "'at_s' and 'at_step' exclude each other"
        if self.why_for_good and (self.for_s is not None or self.for_steps is not None):
            return self.why_for_good
        if self.for_s is not None and self.for_steps is not None:
            return "'for_s' and 'for_steps' exclude each other"
        given = [name for name in ("peer", "peers", "link", "between") if getattr(self, name, None)]
        if len(given) > 1:
            return f"'{given[0]}' and '{given[1]}' exclude each other"
        if self.count is not None and given and given != ["peers"]:
            return f"'count' picks among 'peers', not of '{given[0]}'"
        return ""


class LinkFault(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One that links feel: those of the peers that are named, one link, or those between groups."""

    link: Annotated[list[str], msgspec.Meta(min_length=2, max_length=2)] | None = None
    between: Annotated[list[Names], msgspec.Meta(min_length=2)] | None = None
    one_way: bool = False
    """Only from the first end of `link` or group of `between` to the later ones."""

    separates: ClassVar[bool] = False
    """Whether links among the peers that are named are spared."""

    def groups(self) -> list[list[str]]:
        """The names, in the groups that they stand in."""
        if self.link is not None:
            return [[end] for end in self.link]
        return super().groups() if self.between is None else self.between

    def check(self) -> str:
        """Why it contradicts itself, or nothing."""
        if self.one_way and self.link is None and self.between is None:
            return "'one_way' needs 'link' or 'between'"
        return super().check()


class Kill(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kill"):
    """The peer ends and does not come back."""

    why_for_good: ClassVar[str] = "who is killed stays dead; 'pause' holds a peer for some time"


class JoinWorld(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="join"):
    """So many workers as `count` says, one without it, come to a simulated world while it trains.

    They are called by the numbers after those of the workers before them, in the order of the script.
    """

    why_for_good: ClassVar[str] = "who joins stays; let it 'leave' later"

    def check(self) -> str:
        """Why it contradicts itself, or nothing."""
        if self.peer is not None or self.peers is not None:
            return "who joins has no name before: it gets the next number; 'count' says how many join"
        if self.at_step is not None:
            return "who is not there yet does no steps; say 'at_s'"
        return super().check()


class LeaveWorld(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="leave"):
    """The worker of a simulated world leaves it in order, between two steps."""

    why_for_good: ClassVar[str] = "who leaves does not come back; a 'join' brings another worker"

    def check(self) -> str:
        """Why it contradicts itself, or nothing."""
        if self.peer is None and self.peers is None and self.count is None:
            return "it does not say who leaves: give 'peer', 'peers', or 'count' of those in [peers]"
        return super().check()


class Pause(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pause"):
    """Nothing leaves the peer and nothing reaches it; afterwards everything does."""


class Skew(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="skew"):
    """The peer's wall clock is wrong by `offset_s`, and by `drift` more seconds every second."""

    offset_s: float = 0.0
    drift: float = 0.0


class Slow(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="slow"):
    """Delays are `factor` times as long and bandwidths so many times smaller, those of peers' lines too."""

    factor: Positive


class Partition(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="partition"):
    """Groups that cannot reach each other; with `peers`, those on one side and all others on the other."""

    separates: ClassVar[bool] = True


class Drop(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drop"):
    """Packets are lost, on top of what the profile loses."""

    probability: Probability


class Corrupt(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="corrupt"):
    """Packets arrive with one wrong byte that no checksum below us has found."""

    probability: Probability


class Duplicate(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="duplicate"):
    """Datagrams arrive twice; streams do not feel it."""

    probability: Probability


class Reorder(LinkFault, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reorder"):
    """Datagrams are held back by up to `by_ms`, so that later ones overtake; streams do not feel it."""

    probability: Probability
    by_ms: Positive = 50.0


AnyFault = (
    Kill | Pause | Skew | Slow | Partition | Drop | Corrupt | Duplicate | Reorder | JoinWorld | LeaveWorld
)


class FaultScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults, and names for peers; a fault names a peer so, by its address, as HOST:*, or by its place."""

    name: str = ""
    description: str = ""
    peers: dict[str, str] = {}
    fault: list[AnyFault] = []

    @property
    def num_joining(self) -> int:
        """How many workers it lets join."""
        return sum(fault.count or 1 for fault in self.fault if isinstance(fault, JoinWorld))

    @property
    def changes_workers(self) -> bool:
        """Whether it lets workers join or leave."""
        return any(isinstance(fault, JoinWorld | LeaveWorld) for fault in self.fault)

    def refuse_changes(self, what: str = "The fault script") -> None:
        """UsageError for a script that lets workers join or leave, where the members are fixed."""
        for index, fault in enumerate(self.fault):
            if isinstance(fault, JoinWorld | LeaveWorld):
                kind = fault.__struct_config__.tag
                reason = f"workers {kind} in worlds of virtual time alone, as those of `shoal compare` are"
                documents.refuse(what, f"fault[{index}]", reason)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a script from a TOML file."""
        return documents.read_file(Path(path), cls, "The fault script")._checked(
            f"The fault script {str(path)!r}"
        )

    @classmethod
    def parse(cls, text: str, what: str = "The fault script") -> Self:
        """Read TOML; UsageError says which key is wrong."""
        return documents.read(text, cls, what)._checked(what)

    def check_names(self, places: Iterable[str], what: str = "The fault script") -> None:
        """Refuse names that are neither this script's, nor a place, nor an address."""
        known = [*self.peers, *places]
        for index, fault in enumerate(self.fault):
            for name in (name for group in fault.groups() for name in group):
                if name not in known and not is_pattern(name):
                    near = documents.suggest(name, known)
                    documents.refuse(what, f"fault[{index}]", f"no peer is called {name!r}, {near}")

    def _checked(self, what: str) -> Self:
        for name, peer in self.peers.items():
            if not is_pattern(peer):
                documents.refuse(what, f"peers.{name}", f"{peer!r} is no address, write HOST:PORT or HOST:*")
        for index, fault in enumerate(self.fault):
            reason = fault.check()
            candidates = fault.peers or list(self.peers)
            is_picked = fault.count is not None and not isinstance(fault, JoinWorld)
            if not reason and is_picked and (fault.count or 0) > len(candidates):
                reason = f"it cannot pick {fault.count} of {len(candidates)} peers"
            if reason:
                documents.refuse(what, f"fault[{index}]", reason)
        return self


class Event:
    """One fault of a script, with what the seed has decided and how far it has come."""

    def __init__(self, fault: AnyFault, groups: list[list[str]]) -> None:
        self.fault = fault
        self.began_s = math.inf if fault.at_step is not None else (fault.at_s or 0.0)
        self.ends_s = self.began_s + (fault.for_s or math.inf)
        self.is_active = False
        self.is_over = False
        self._groups = [dict.fromkeys(group) for group in groups]
        self._began_step: int | None = None

    def concerns(self, names: tuple[str | None, ...]) -> bool:
        """Whether a peer that is called so is among those named."""
        return not self._groups or any(self._is_in(group, names) for group in range(len(self._groups)))

    def touches(self, source: tuple[str | None, ...], target: tuple[str | None, ...]) -> bool:
        """Whether it holds for the link between two peers, in this direction."""
        num_groups = len(self._groups)
        fault = self.fault
        if not isinstance(fault, LinkFault):
            return False
        if num_groups == 0:
            return True
        if num_groups == 1:
            is_source_in, is_target_in = self._is_in(0, source), self._is_in(0, target)
            return is_source_in != is_target_in if fault.separates else is_source_in or is_target_in
        pairs = [(first, later) for first in range(num_groups) for later in range(num_groups)]
        return any(
            (first < later or (first > later and not fault.one_way))
            and self._is_in(first, source)
            and self._is_in(later, target)
            for first, later in pairs
        )

    def _is_in(self, group: int, names: tuple[str | None, ...]) -> bool:
        members = self._groups[group]
        return any(name in members for name in names)

    def advance(self, now_s: float, step: int) -> bool:
        """Move on to a time and step; whether anything changed."""
        if self.is_over:
            return False
        fault, was_active = self.fault, self.is_active
        if fault.at_step is not None and step >= fault.at_step and self._began_step is None:
            self._began_step = fault.at_step
            self.began_s = now_s
            self.ends_s = now_s + (fault.for_s or math.inf)
        if now_s >= self.began_s:
            self.is_active = True
            if self._began_step is None:
                self._began_step = step
            if now_s >= self.ends_s or (
                fault.for_steps is not None and step >= self._began_step + fault.for_steps
            ):
                self.is_active, self.is_over = False, True
        return self.is_active != was_active or self.is_over

    @property
    def next_change_s(self) -> float:
        """The next time at which it changes by itself."""
        if self.is_over:
            return math.inf
        return self.ends_s if self.is_active else self.began_s


class Schedule:
    """What holds when; moves forward only. The seed alone decides which faults happen and whom they pick."""

    def __init__(self, script: FaultScript, seed: int) -> None:
        self._names: dict[str, list[str]] = {}
        for name, pattern in script.peers.items():
            self._names.setdefault(pattern, []).append(name)
        self.events = [
            Event(fault, _pick_peers(fault, list(script.peers), seed, index))
            for index, fault in enumerate(script.fault)
            if fault.chance > Draws(seed, "chance", str(index)).uniform()
        ]
        self.next_change_s = min((event.next_change_s for event in self.events), default=math.inf)

    def names_of(self, peer: Address, place: str | None) -> tuple[str | None, ...]:
        """All that a script may call a peer."""
        patterns = patterns_of(peer)
        return (*patterns, place, *(name for each in patterns for name in self._names.get(each, ())))

    def advance(self, now_s: float, step: int) -> bool:
        """Move on to a time (since the start) and step; whether anything changed."""
        changes = [event.advance(now_s, step) for event in self.events]
        self.next_change_s = min((event.next_change_s for event in self.events), default=math.inf)
        return any(changes)


def _pick_peers(fault: AnyFault, everybody: list[str], seed: int, index: int) -> list[list[str]]:
    if fault.count is None or isinstance(fault, JoinWorld):
        return fault.groups()
    choice = random.Random(digest_of(seed, "count", str(index)))
    return [choice.sample(fault.peers or everybody, fault.count)]
