"""Who is a member, in which order, and what a member knows of itself and of others from round to round."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.core import AdaptiveDeadline, Peer
from shoal.core.identity import Identity
from shoal.core.rates import FailureBackoff
from shoal.swarm.ballots import Equivocation
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.wire import (
    Broadcast,
    Commit,
    RoundPlan,
    ShortCommit,
    SwarmMember,
    from_bitmap,
    to_bitmap,
)
from shoal.tensors import Codec
from shoal.transport import Reply

_WATCH_S = 0.1
MAX_TENURE = 20
"""Rounds for which the same member coordinates."""
DROP_S = 5.0
"""A commit drops a member that was silent for so long."""
PAUSE_S = 15.0, 600.0
"""Who is broken or lies is left out for so long, twice as long each time, up to the second."""
MANY_MEMBERS = 64
"""From here on members speak less often, so that their coordinator hears as much as from so many."""
BYTES_PER_S_OF_MBIT = 1e6 / 8
MAX_MBIT_S = 1000.0
"""A line that is faster holds up no round: then it is the processor that is measured."""
_STRETCH_SHARE = 2 / 3
_MEASURED_BYTES = 128 << 10
"""What passes in a round must be so much for it to say something of the line."""
CLOSED_S = 1.0
"""A commit drops a member whose connection closed, and that has not come back for so long."""

CallPeer = Callable[[Peer, str, Any, float], Coroutine[Any, Any, Any]]
"""Calls a peer, a member or not: method, payload, seconds to wait; gives the payload of the answer."""


class SwarmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all members of a run agree on, and what each may choose for itself."""

    target_samples: int = 0
    """A round begins when all members together have so many samples; 0: when the members say they are ready.
    """
    robust: str = ""
    """How contributions are averaged: by `centered-clip` or `median`; empty for the mean. See `robust`."""
    min_peers: int = 1
    """No round begins with fewer members."""
    patience: float = 1.0
    """Every time-out is this many times as long."""
    minority_after_s: float = 120.0
    """Members that have been without a quorum for so long go on as a fork of their own."""
    bandwidth: float = 0.0
    """This member's line in Mbit/s, the slower direction, until rounds have measured it; 0: not known."""
    upload_limit: float = math.inf
    """In Mbit/s, what this member sends at most for the run, all counted."""
    download_limit: float = math.inf
    """In Mbit/s, what this member lets others send to it for the run, on average over a second or so."""
    bytes_per_element: float = 4.0
    """What the codec makes of a value."""
    num_fragments: int = 1
    """A round averages one of so many fragments of the parameters, in turn. What is added are then
    differences, and a fragment's add up from one of its rounds to the next.
    """


@dataclass
class MemberPresence:
    """When a member was last heard, and when its connection closed, if it has."""

    heard_s: float
    closed_s: float | None = None

    def is_gone(self, now_s: float, since_s: float, patience: float, crowd: float = 1.0) -> bool:
        """Tells whether a commit should drop it, by one to whom all have come to speak since then."""
        closed_s = self.closed_s
        has_closed = closed_s is not None and since_s <= closed_s < now_s - CLOSED_S * patience
        return has_closed or now_s - max(self.heard_s, since_s) > DROP_S * patience * crowd


class LineMeter:
    """Measures one direction of a member's line: what passes of a round's values while any do.

    Of a round the fastest stretch from its beginning counts that had two thirds of the bytes: at the end one
    waits for whoever is slow on the other side, which says nothing of this line. For the same reason nothing
    counts that begins in one round and ends in another.
    """

    def __init__(self) -> None:
        self.mbit_s: float | None = None
        """What the latest rounds have shown, the latest one by half."""
        self._num_rounds = self._num_active = self._num_bytes = 0
        self._began_s = self._busy_s = 0.0
        self._seen: list[tuple[float, int]] = []

    def begin(self, now_s: float) -> int:
        """Notes that something is on its way; `end` takes what this gives."""
        if not self._num_active:
            self._began_s = now_s
        self._num_active += 1
        return self._num_rounds

    def end(self, begun: int, now_s: float, num_bytes: int) -> None:
        """Notes that it has passed, or with 0 bytes that it has not."""
        if begun != self._num_rounds:
            return
        self._num_active -= 1
        self._num_bytes += num_bytes
        busy_s = self._busy_s + now_s - self._began_s
        self._seen.append((busy_s, self._num_bytes))
        if not self._num_active:
            self._busy_s = busy_s

    def note(self, num_bytes: int) -> None:
        """Counts what has passed beside, with no beginning that is known; nothing while nothing else does."""
        if self._num_active:
            self._num_bytes += num_bytes

    def finish_round(self) -> None:
        """Takes in what a round has shown, if it was enough."""
        least = max(_MEASURED_BYTES, _STRETCH_SHARE * self._num_bytes)
        found = [
            num / busy_s / BYTES_PER_S_OF_MBIT for busy_s, num in self._seen if num >= least and busy_s > 0
        ]
        if found:
            best = min(max(found), MAX_MBIT_S)
            self.mbit_s = best if self.mbit_s is None else (self.mbit_s + best) / 2
        self._num_rounds += 1
        self._num_active, self._num_bytes, self._busy_s = 0, 0, 0.0
        self._seen.clear()


@dataclass
class MemberContext:
    """What a member's rounds share."""

    me: SwarmMember
    settings: SwarmSettings
    ledger: SampleLedger
    codec: Codec
    call: Callable[..., Coroutine[Any, Any, Reply]]
    """Calls a member: method, payload, buffers, seconds to wait, and where the answer's buffers should go."""
    vector: Callable[[], Any]
    """Gives memory for one value of each parameter; it is used again when nobody holds it any more."""
    random: random.Random
    upload: LineMeter = field(default_factory=LineMeter)
    """What this member sends to others in rounds."""
    download: LineMeter = field(default_factory=LineMeter)
    """What it takes from them: no more than they send, so what it measures counts beside that of others."""
    identity: Identity | None = None
    """This member's key; None where ids are claims, and nothing is signed."""
    proofs: dict[SwarmMember, Equivocation] = field(default_factory=dict)
    """Who has signed two statements that contradict each other, with both."""
    presence: dict[SwarmMember, MemberPresence] = field(default_factory=dict)
    leads_since_s: float | None = None
    """Since when this member has led one ballot after another; None while it follows."""
    joiners: dict[SwarmMember, tuple[float, int]] = field(default_factory=dict)
    """Who wants to be listed: when it last said so, and the round that it could take part in."""
    wants_pin: bool = False
    is_ready: bool = False
    is_leaving: bool = False
    offers_when_asked: bool = False
    """Whether its contribution is made when a round begins, or it is ready, and not added to step by step."""
    is_asked: bool = False
    """A round has begun: what this member has learned may go in now."""
    not_before_s: float = 0.0
    """No round begins before this: the latest one came to nothing."""
    end: tuple[bytes, tuple[SwarmMember, ...]] | None = None
    """The fork in whose favour this one ends with its next commit."""
    reached: dict[SwarmMember, tuple[bool, float]] = field(default_factory=dict)
    """Whether this member could dial others when it last tried, and when that was."""
    try_to_reach: Callable[[SwarmMember], None] = lambda member: None
    """Has a member dialed, and noted in `reached` whether that went well."""
    stalled_s: float = 0.0
    """For how long this member's own loop has been held up so far: others are not silent meanwhile."""
    changed: Broadcast = field(default_factory=Broadcast)
    """Fires when one of these has changed."""
    backoff: FailureBackoff = field(default_factory=lambda: FailureBackoff(*PAUSE_S))
    """Who sent what is not finite: this member leaves it out of the rounds that it coordinates."""
    bans: FailureBackoff = field(default_factory=lambda: FailureBackoff(*PAUSE_S))
    """Whose averages are proven to be wrong: it neither contributes, reduces nor coordinates, nor joins."""
    beats: AdaptiveDeadline = field(
        default_factory=lambda: AdaptiveDeadline(initial_s=1.0, floor_s=1.0, k=4.0)
    )
    """How long a coordinator's answers take: who has been silent for longer is taken over from."""
    arrivals: AdaptiveDeadline = field(
        default_factory=lambda: AdaptiveDeadline(initial_s=5.0, floor_s=0.5, k=4.0)
    )
    durations: AdaptiveDeadline = field(
        default_factory=lambda: AdaptiveDeadline(initial_s=30.0, floor_s=1.0, k=4.0)
    )

    @property
    def bandwidth(self) -> float:
        """The speed of this member's line in Mbit/s, as measured or told, within its limits; 0: not known.

        What is measured counts in steps of a fifth: shares are not to follow every chance.
        """
        settings, found = self.settings, self.settings.bandwidth or math.inf
        found = _in_steps(self.upload) or found
        found = min(found, settings.upload_limit, settings.download_limit)
        return 0.0 if math.isinf(found) else found

    @property
    def taken_mbit_s(self) -> float:
        """How fast averages have come here in the latest rounds, in Mbit/s; 0: not known."""
        return _in_steps(self.download)

    def now_s(self) -> float:
        """Tells the time by which silence is judged: it stands still while this member itself is held up."""
        return asyncio.get_running_loop().time() - self.stalled_s

    def is_left_out(self, member: SwarmMember, now_s: float) -> bool:
        """Whether a plan goes without this member for a while."""
        name = member.id_bytes
        return self.backoff.is_paused(name, now_s) or self.bans.is_paused(name, now_s)

    async def watch_stalls(self) -> None:
        """Notes how long the loop is held up, by computing or by a busy machine; ends when cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(_WATCH_S)
            late_s = loop.time() - before_s - _WATCH_S
            if late_s > _WATCH_S:
                self.stalled_s += late_s

    def as_reached(self, member: SwarmMember) -> SwarmMember:
        """Gives a member as a commit lists it: who could not be dialed takes part as a client."""
        is_reached, _ = self.reached.get(member, (True, 0.0))
        return member if is_reached else msgspec.structs.replace(member, is_reachable=False)


def _in_steps(meter: LineMeter) -> float:
    """Rounds what is measured to the next step of a fifth; 0: nothing yet."""
    return 0.0 if meter.mbit_s is None else float(2.0 ** (round(4 * math.log2(meter.mbit_s)) / 4))


def crowd_factor(num_members: int) -> float:
    """Says how many times as long a large swarm waits between beats, for silence, and to admit members."""
    return max(1.0, num_members / MANY_MEMBERS)


def next_order(
    state: bytes, members: Sequence[SwarmMember], coordinator: SwarmMember, tenure: int
) -> tuple[tuple[SwarmMember, ...], int]:
    """Gives the next round's list in order, and for how many rounds its first member has coordinated.

    The coordinator stays for up to 20 rounds while it is listed; the rest, and its successor, come by a hash
    that nobody chooses. Who cannot be reached stands at the end, and after all who vote those who don't.
    """
    ordered = list(_by_hash(state, tuple(members)))
    stays = coordinator in ordered and coordinator.is_reachable and tenure < MAX_TENURE
    if stays:
        ordered.remove(coordinator)
        ordered.insert(0, coordinator)
    elif len(ordered) > 1 and ordered[0] == coordinator and ordered[1].votes and ordered[1].is_reachable:
        ordered[0], ordered[1] = ordered[1], ordered[0]
    return tuple(ordered), tenure + 1 if stays else 1


@functools.lru_cache(maxsize=4)
def _by_hash(state: bytes, members: tuple[SwarmMember, ...]) -> tuple[SwarmMember, ...]:
    def rank(member: SwarmMember) -> tuple[bool, bool, bool, bytes]:
        fact = state + member.id_bytes + member.start_number.to_bytes(8, "big")
        is_reached = member.is_reachable, member.is_callable
        return not member.votes, not is_reached[0], not is_reached[1], hashlib.sha256(fact).digest()

    return tuple(sorted(members, key=rank))


def shorten(commit: Commit, members: tuple[SwarmMember, ...], plan: RoundPlan | None) -> ShortCommit:
    """Leaves out what members of the round know or can find out: its plan, and who stays, in which order."""
    before, after = dict.fromkeys(members), dict.fromkeys(commit.members)
    dropped = [place for place, member in enumerate(members) if member not in after]
    added = tuple(member for member in commit.members if member not in before)
    stay = tuple(member for member in members if member in after)
    first = _by_hash(commit.previous, stay + added).index(commit.members[0]) if commit.members else 0
    is_known = plan is not None and commit.plan == plan
    told = msgspec.structs.replace(commit, members=(), plan=None if is_known else commit.plan)
    return ShortCommit(told, to_bitmap(dropped, len(members)), added, first, is_known)


def lengthen(short: ShortCommit, members: tuple[SwarmMember, ...], plan: RoundPlan | None) -> Commit:
    """Makes the whole commit again."""
    dropped = dict.fromkeys(from_bitmap(short.dropped))
    stay = tuple(member for place, member in enumerate(members) if place not in dropped)
    ordered = list(_by_hash(short.commit.previous, stay + short.added))
    if ordered:
        ordered.insert(0, ordered.pop(short.first % len(ordered)))
    found = plan if short.has_known_plan else short.commit.plan
    return msgspec.structs.replace(short.commit, members=tuple(ordered), plan=found)


def num_owners(members: Sequence[SwarmMember]) -> int:
    """Counts those to whom ballots belong in turns, the first in the order: who can be dialed, and where
    nobody can, who can be called at all.

    A relayed member that took over from one that is only slow would be slower still.
    """
    voters = [member for member in members if member.votes]
    num_reachable = sum(member.is_reachable for member in voters)
    return num_reachable or sum(member.is_callable for member in voters) or len(voters) or 1


def num_voters(members: Sequence[SwarmMember]) -> int:
    """Counts those who vote; at least one, so that a list of others alone has no quorum."""
    return sum(member.votes for member in members) or 1
