"""Who takes part in a round, as the owner of a ballot sees it: who is there, who is gone, who comes next.

A member is *present* while it is heard, be it in the round before; who is not is not waited for. It is *gone*
once a commit should drop it. What members say with their calls (samples, that their local steps are done,
that they leave) tells when a round should begin, and whether a commit is needed for members alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.swarm.ballots import is_quorum
from shoal.swarm.membership import MemberContext, MemberPresence, crowd_factor, num_voters
from shoal.swarm.reduction import GONE_SHARE
from shoal.swarm.robust import capped
from shoal.swarm.wire import MAX_SAMPLES, FollowRequest, Registration, SwarmMember

BEAT_S = 0.3
"""The owner of a ballot answers at least so often."""
SILENCE_S = 1.0
"""Who is not heard for so long is not waited for; see `SwarmRound` for what follows from an owner's."""
_LOOK_S = 0.1


class Follower(msgspec.Struct):
    """What a member has said of itself in this round."""

    registration: Registration | None = None
    samples: int = 0
    is_ready: bool = False
    is_leaving: bool = False


class Attendance:
    """What one member knows of all members of a round."""

    def __init__(self, context: MemberContext, members: Sequence[SwarmMember], me: int, number: int) -> None:
        self.followers: dict[int, Follower] = {}
        """By place, those that have called this member."""
        self.suspects: dict[int, None] = {}
        """The places of owners of ballots that this member has followed in vain."""
        self.crowd = crowd_factor(len(members))
        """How many times as long all waits are, because there are so many members."""
        self._context = context
        self._members = members
        self._me = me
        self._number = number
        self._num_voters = num_voters(members)
        self._quorum_seen: tuple[float, bool] = (-_LOOK_S, False)

    @property
    def patient_s(self) -> float:
        """After so long something that is on its way to this member alone is late."""
        return SILENCE_S * self._context.settings.patience

    @property
    def leaving(self) -> list[SwarmMember]:
        """Those who have told this member that they leave."""
        return [self._members[place] for place, one in self.followers.items() if one.is_leaving]

    @property
    def all_leave(self) -> bool:
        """Whether this member leaves, and all others have said that they do."""
        return self._context.is_leaving and len(self.leaving) == len(self._members) - 1

    def hear(self, place: int, request: FollowRequest) -> bool:
        """Notes what a member says of itself; False where nothing of it is new."""
        follower = self.followers.setdefault(place, Follower())
        known = msgspec.structs.astuple(follower)
        follower.registration = follower.registration or request.registration
        follower.samples, follower.is_ready = request.samples, request.is_ready
        follower.is_leaving = request.is_leaving
        return msgspec.structs.astuple(follower) != known

    # --- who is there ---

    def presence_of(self, place: int, now_s: float) -> MemberPresence:
        """Says when a member was heard; one that was not heard yet has as long as others from now on.

        So one that was just listed is waited for: else a fast coordinator would go on without it, round after
        round, and it would never catch up.
        """
        return self._context.presence.setdefault(self._members[place], MemberPresence(now_s))

    def is_present(self, place: int, now_s: float, factor: float = 1.0) -> bool:
        """Whether a member has been heard lately."""
        if place == self._me:
            return True
        presence = self.presence_of(place, now_s)
        # a follower ends its call to make another one when it has something new to tell
        grace_s = GONE_SHARE * self.patient_s
        has_closed = presence.closed_s is not None and now_s - presence.closed_s > grace_s
        limit_s = (factor * self.patient_s + BEAT_S) * self.crowd
        return not has_closed and now_s - presence.heard_s < limit_s

    def present_quorum(self) -> bool:
        """Whether a quorum has been heard lately; looked at anew every tenth of a second."""
        now_s = self._context.now_s()
        seen_s, is_there = self._quorum_seen
        if now_s - seen_s >= _LOOK_S:
            present = [place for place in range(len(self._members)) if self.is_present(place, now_s)]
            is_there = is_quorum(self._num_voters, present)
            self._quorum_seen = now_s, is_there
        return is_there

    def is_gone(self, place: int, now_s: float) -> bool:
        """Whether a commit should drop a member, as far as it is there."""
        if place == self._me:
            return False
        presence = self.presence_of(place, now_s)
        is_suspect = place in self.suspects and place not in self.followers
        since_s = self._context.leads_since_s or 0.0  # before, they had somebody else to speak to
        return is_suspect or presence.is_gone(now_s, since_s, self._context.settings.patience, self.crowd)

    # --- what should be done ---

    def is_enough(self) -> bool:
        """Whether the members together have what a round needs."""
        context, now_s = self._context, self._context.now_s()
        if self._num_voters < context.settings.min_peers or not self.present_quorum():
            return False
        if now_s < context.not_before_s:
            return False
        samples, is_ready = [context.ledger.num_ready], [context.is_ready]
        for place, follower in self.followers.items():
            is_left_out = context.is_left_out(self._members[place], now_s)
            if self._members[place].votes and self.is_present(place, now_s) and not is_left_out:
                samples.append(min(max(follower.samples, 0), MAX_SAMPLES))
                is_ready.append(follower.is_ready)
        target = context.settings.target_samples
        if context.settings.robust:
            samples = capped(samples, target // self._num_voters)
        if target:
            return sum(samples) >= target
        return any(samples) and any(is_ready) and 2 * sum(is_ready) >= len(is_ready)

    def needs_commit(self) -> bool:
        """Whether somebody waits to join or leave, is gone, or the fork should end."""
        context, now_s = self._context, self._context.now_s()
        gone = any(self.is_gone(place, now_s) for place in range(len(self._members)))
        return (
            context.is_leaving
            or bool(self.leaving)
            or gone
            or context.wants_pin
            or bool(self._admissible(now_s))
            or context.end is not None
        )

    def next_members(self) -> list[SwarmMember]:
        """Lists who should be a member of the next round; nobody where no voter is left."""
        now_s = self._context.now_s()
        kept = [
            self._context.as_reached(member)
            for place, member in enumerate(self._members)
            if not self._is_dropped(place, now_s)
        ]
        added = self._admissible(now_s)[: max(len(kept), 1)]
        started_anew = [member.id_bytes for member in added]  # a peer is listed once
        kept = [member for member in kept if member.id_bytes not in started_anew] + added
        return kept if any(member.votes for member in kept) else []

    def _is_dropped(self, place: int, now_s: float) -> bool:
        if place == self._me:
            return self._context.is_leaving
        follower = self.followers.get(place)
        return (follower is not None and follower.is_leaving) or self.is_gone(place, now_s)

    def _admissible(self, now_s: float) -> list[SwarmMember]:
        """Lists those who want to join, or to be listed in another way, and are at most one commit behind.

        Who says that others can dial it is dialed first, and listed as what came of it.
        """
        context, limit_s = self._context, 2 * SILENCE_S * self.crowd
        latest: dict[bytes, SwarmMember] = {}
        for joiner, (heard_s, number) in sorted(context.joiners.items(), key=lambda one: one[1][0]):
            if joiner in self._members or number < self._number - 1 or now_s - heard_s >= limit_s:
                continue
            if context.bans.is_paused(joiner.id_bytes, now_s):
                continue
            if joiner.is_reachable and joiner not in context.reached:
                context.try_to_reach(joiner)
                continue
            if (member := context.as_reached(joiner)) not in self._members:
                latest[member.id_bytes] = member
        return sorted(latest.values())
