"""What a member keeps of the run's past: for those who are a round behind, and for those who join.

The commits and averages of the latest two rounds are kept for whoever missed them. Who joins takes a *pinned*
state: a copy, hashed in a thread beside the loop, that is kept with all commits since as long as somebody
says that it is being taken. A joiner so never starts over, however many rounds are made meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core import PeerRefused
from shoal.core.rates import RateLimiter
from shoal.swarm.membership import BYTES_PER_S_OF_MBIT, MemberContext, crowd_factor
from shoal.swarm.reduction import HeldPart
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import Commit, JoinRunRequest
from shoal.tensors.transfer import StateDonor, hold_state
from shoal.transport import Transport

NUM_KEPT = 2
"""Rounds whose commits and parts a member keeps for those who are behind."""
NUM_SINCE_PIN = 8
"""Who begins to join takes a state that is no older; else another one is pinned."""
PIN_S = 5.0
"""What is kept for those who join is dropped when none of them has asked for so long."""
MAX_KEPT_BYTES = 2 << 30
"""The averages that a member keeps at most for those who join; those of eight rounds are always kept."""
MAX_COMMITS = 64
"""Commits that are told at once."""
DONOR_SHARE = 0.25
"""Of a member's upload that those who join get at most while values are averaged."""
_HASH_FACTOR = 4.0
"""Another member may take so many times as long to hash a state."""
_SHORTEST_PAUSE_S, _DONOR_TICK_S = 0.001, 0.2


@dataclass(frozen=True)
class FinishedRound:
    """A round that is over: its commit, and the averages that this member holds."""

    commit: Commit
    held: dict[tuple[int, bytes], HeldPart]

    @property
    def size_bytes(self) -> int:
        """How much memory its averages take."""
        return sum(memoryview(buffer).nbytes for part in self.held.values() for buffer in part.buffers)


@dataclass
class PinnedState:
    """A state that is kept for those who join, with the commits since."""

    round: int
    asked_s: float
    """When one of those who take it was last heard."""
    settled_s: float = math.inf
    """From then on all members should have it that keep it."""
    name: str = ""
    """By which `StateTaker` takes it; empty until it is hashed."""
    hashed_round: int = -1


class KeptRounds:
    """The finished rounds and pinned states of one member, and who may have them.

    `is_averaging` says whether values of a round are on their way, which come before what joiners take.
    """

    def __init__(
        self,
        state: CommittedState,
        context: MemberContext,
        transport: Transport,
        start_soon: Callable[..., None],
        is_averaging: Callable[[], bool],
    ) -> None:
        self.finished: dict[int, FinishedRound] = {}
        """By their numbers, the oldest first."""
        self.pins: list[PinnedState] = []
        """The oldest first."""
        self.donor = StateDonor(transport, self._pause_s)
        self._state = state
        self._context = context
        self._start_soon = start_soon
        self._is_averaging = is_averaging
        self._limiter = RateLimiter(0.0, 0.0)
        self._donated_bytes_per_s = 0.0

    def add(self, commit: Commit, held: dict[tuple[int, bytes], HeldPart]) -> None:
        """Keeps a round that is over."""
        self.finished[commit.round] = FinishedRound(commit, held)

    def commits_from(self, number: int) -> list[Commit]:
        """Gives the commits from a round on, as many as are told at once; PeerRefused for older ones."""
        numbers = range(number, min(self._state.round, number + MAX_COMMITS))
        if any(number not in self.finished for number in numbers):
            raise PeerRefused("This member does not keep commits that old.")
        return [self.finished[number].commit for number in numbers]

    def pin(self) -> None:
        """Keeps the state as it is now for those who join."""
        pin = PinnedState(self._state.round, asyncio.get_running_loop().time())
        self.pins.append(pin)
        self._context.wants_pin = False
        self._start_soon(self._hold_pinned(pin, self._state.snapshot()), name="hash a state")

    async def _hold_pinned(self, pin: PinnedState, snapshot: Any) -> None:
        """Hashes a state beside the loop, and gives it to those who ask from then on."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        held = await hold_state(snapshot)
        if pin in self.pins:
            self.donor.hold(held)
            pin.name, pin.hashed_round = held.name, self._state.round
            pin.asked_s = loop.time()
            others_s = PIN_S + _HASH_FACTOR * (pin.asked_s - began_s)
            pin.settled_s = pin.asked_s + others_s * self._context.settings.patience

    def pin_for(self, request: JoinRunRequest) -> PinnedState | None:
        """Gives the state that a joiner should take: the one that it is taking, or one that is new enough."""
        named = [pin for pin in self.pins if pin.name and pin.name == request.state]
        fresh = [pin for pin in self.pins if pin.name and self._is_fresh(pin)]
        return next(iter([*named, *reversed(fresh)]), None)

    def should_pin(self) -> bool:
        """Whether all should keep another state, since a joiner has found none that most of them keep.

        Not while one is new: others may still be hashing it. But one that is fresh here may be kept by nobody
        else any more, because those who took it have asked only here.
        """
        now_s = asyncio.get_running_loop().time()
        return not any(self._is_fresh(pin) and now_s < pin.settled_s for pin in self.pins)

    def _is_fresh(self, pin: PinnedState) -> bool:
        return not pin.name or self._state.round - pin.hashed_round <= NUM_SINCE_PIN

    def forget(self, num_members: int) -> None:
        """Drops what nobody needs any more: rounds, and states that none of those who join takes."""
        loop_s, number = asyncio.get_running_loop().time(), self._state.round
        now_s = self._context.now_s()
        lease_s = PIN_S * self._context.settings.patience * crowd_factor(num_members)
        joiners = self._context.joiners
        joiners = {key: one for key, one in joiners.items() if now_s - one[0] < lease_s}
        self._context.joiners = joiners

        def is_taken(pin: PinnedState) -> bool:
            return loop_s - max(pin.asked_s, self.donor.asked_s.get(pin.name, 0.0)) < lease_s

        wanted = [pin.round for pin in self.pins if not pin.name or is_taken(pin)]
        first = min([number - NUM_KEPT, *wanted, *(one[1] for one in joiners.values())])
        kept: dict[int, FinishedRound] = {}
        num_bytes = 0
        for key in sorted((key for key in self.finished if key >= first), reverse=True):
            num_bytes += self.finished[key].size_bytes
            if number - key > NUM_SINCE_PIN and num_bytes > MAX_KEPT_BYTES:
                break
            kept[key] = self.finished[key]
        self.finished = dict(reversed(kept.items()))
        for pin in list(self.pins):
            # without the commits since it is of no use
            if pin.round not in wanted or not all(key in kept for key in range(pin.round, number)):
                self._unpin(pin)

    def _unpin(self, pin: PinnedState) -> None:
        self.pins.remove(pin)
        if all(pin.name != other.name for other in self.pins):
            self.donor.drop(pin.name)

    def forget_all(self) -> None:
        """Drops rounds, states and joiners of another fork, or from before this member took a state.

        Who is near the old fork's state is not near this one's: it would be listed without knowing, and count
        against the quorum.
        """
        self.finished.clear()
        self._context.joiners.clear()
        for pin in list(self.pins):
            self._unpin(pin)

    def _pause_s(self, num_bytes: int) -> float:
        """Says how long a joiner waits for so many bytes: the line is first of all for the round's values."""
        bandwidth = self._context.bandwidth
        if not bandwidth or not self._is_averaging():
            return 0.0
        donated = DONOR_SHARE * bandwidth * BYTES_PER_S_OF_MBIT
        if donated != self._donated_bytes_per_s:
            self._limiter = RateLimiter(donated, burst=_DONOR_TICK_S * donated)
            self._donated_bytes_per_s = donated
        pause_s = self._limiter.take("state", num_bytes, asyncio.get_running_loop().time())
        # the round may end before, and so short a pause that the clock does not move would not end
        return min(max(pause_s, _SHORTEST_PAUSE_S), _DONOR_TICK_S) if pause_s else 0.0
