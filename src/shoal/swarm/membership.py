"""Who is a member, in which order, and what a member knows of itself and of others from round to round."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.core import AdaptiveDeadline
from shoal.core.limits import FailureBackoff
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.wire import Broadcast, SwarmMember
from shoal.tensors import Codec
from shoal.transport import Reply

_WATCH_S = 0.1
MAX_TENURE = 20
"""Rounds for which the same member coordinates."""
DROP_S = 5.0
"""A commit drops a member that was silent for so long."""
CLOSED_S = 1.0
"""A commit drops a member whose connection closed, and that has not come back for so long."""


class SwarmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all members of a run agree on, and what each may choose for itself."""

    target_samples: int = 0
    """A round begins when all members together have so many samples; 0: when the members say they are ready.
    """
    min_peers: int = 1
    """No round begins with fewer members."""
    patience: float = 1.0
    """Every time-out is this many times as long."""
    minority_after_s: float = 120.0
    """Members that have been without a quorum for so long go on as a fork of their own."""
    bandwidth: float = 1.0
    """This member's line, in any unit that all members share."""
    bytes_per_element: float = 4.0
    """What the codec makes of a value."""


@dataclass
class MemberPresence:
    """When a member was last heard, and when its connection closed, if it has."""

    heard_s: float
    closed_s: float | None = None

    def is_gone(self, now_s: float, patience: float) -> bool:
        """Tells whether a commit should drop it."""
        has_closed = self.closed_s is not None and now_s - self.closed_s > CLOSED_S * patience
        return has_closed or now_s - self.heard_s > DROP_S * patience


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
    presence: dict[SwarmMember, MemberPresence] = field(default_factory=dict)
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
    stalled_s: float = 0.0
    """For how long this member's own loop has been held up so far: others are not silent meanwhile."""
    changed: Broadcast = field(default_factory=Broadcast)
    """Fires when one of these has changed."""
    backoff: FailureBackoff = field(default_factory=lambda: FailureBackoff(15.0, 600.0))
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

    def now_s(self) -> float:
        """Tells the time by which silence is judged: it stands still while this member itself is held up."""
        return asyncio.get_running_loop().time() - self.stalled_s

    async def watch_stalls(self) -> None:
        """Notes how long the loop is held up, by computing or by a busy machine; ends when cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(_WATCH_S)
            late_s = loop.time() - before_s - _WATCH_S
            if late_s > _WATCH_S:
                self.stalled_s += late_s


def next_order(
    state: bytes, members: Sequence[SwarmMember], coordinator: SwarmMember, tenure: int
) -> tuple[tuple[SwarmMember, ...], int]:
    """Gives the next round's list in order, and for how many rounds its first member has coordinated.

    The coordinator stays for up to 20 rounds while it is listed; the rest, and its successor, come by a hash
    that nobody chooses. Who cannot be reached stands at the end, and after all who vote those who don't.
    """

    def rank(member: SwarmMember) -> tuple[bool, bool, bytes]:
        fact = state + member.id_bytes + member.start_number.to_bytes(8, "big")
        return not member.votes, not member.is_reachable, hashlib.sha256(fact).digest()

    ordered = sorted(members, key=rank)
    stays = coordinator in ordered and coordinator.is_reachable and tenure < MAX_TENURE
    if stays:
        ordered.remove(coordinator)
        ordered.insert(0, coordinator)
    elif len(ordered) > 1 and ordered[0] == coordinator and ordered[1].votes and ordered[1].is_reachable:
        ordered[0], ordered[1] = ordered[1], ordered[0]
    return tuple(ordered), tenure + 1 if stays else 1


def ballot_owner(members: Sequence[SwarmMember], ballot: int) -> int:
    """Gives the place of the member to whom a ballot belongs: those who can be reached take turns."""
    return ballot % (sum(member.is_reachable and member.votes for member in members) or num_voters(members))


def num_voters(members: Sequence[SwarmMember]) -> int:
    """Counts those who vote; at least one, so that a list of others alone has no quorum."""
    return sum(member.votes for member in members) or 1
