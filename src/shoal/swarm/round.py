"""One round of a run as one of its members lives through it.

    follower                                        owner of the ballot (ballot 0: the coordinator)
    follow: samples so far                ────────►  gathers, until the swarm has enough for a round
                                          ◄────────  stage: register
    follow: registration                  ────────►  closes when all are there, or at the usual time
                                          ◄────────  plan
    parts to reducers, averages back                 the same, and names reducers that are silent
                                          ◄────────  proposal: the commit
    holds every part of it, then accepts
    follow: vote                          ────────►  a quorum has voted
                                          ◄────────  decision

Who hears nothing from the owner of a ballot for a while goes on to the next ballot and tells that one's
owner, with its promise and what it has accepted so far. An owner that has promises of a quorum proposes what
the highest of them accepted; if nobody has accepted anything, it finishes the plan where it has one, and else
proposes an abort, which is a commit too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from shoal.core import Deadline, LimitExceeded, ProtocolError, Scope, ShoalError, fanout
from shoal.swarm.attendance import BEAT_S, SILENCE_S, Attendance
from shoal.swarm.ballots import (
    Acceptor,
    BallotTally,
    Promise,
    Proposal,
    Statement,
    Witness,
    sign_statement,
)
from shoal.swarm.ledger import FrozenContribution
from shoal.swarm.membership import (
    MemberContext,
    MemberPresence,
    lengthen,
    next_order,
    num_owners,
    num_voters,
    shorten,
)
from shoal.swarm.plan import make_plan
from shoal.swarm.reduction import GONE_SHARE, HeldPart, Reduction, fetch_parts, is_gone, results
from shoal.swarm.wire import (
    ABORT,
    COMMIT,
    END,
    FOLLOW,
    GATHER,
    REDUCE,
    REGISTER,
    STEP,
    Broadcast,
    Commit,
    FollowRequest,
    PartResult,
    Registration,
    RoundPlan,
    RoundStatus,
    ShortCommit,
    SwarmMember,
)
from shoal.transport import Reply
from shoal.transport.messages import CONNECTION_ENDED, Into

log = logging.getLogger(__name__)

LONGEST_SILENCE_S = 8.0
"""Who hears nothing from a ballot's owner for `SILENCE_S`, or median + 4 MAD of what answers take where that
is longer, asks the next ballot's; this doubles with every ballot of a round, up to so long."""
ADMIT_S = 1.0
"""Who wants to join or leave waits so long for a round; then a commit is made for that alone."""
MAX_BALLOTS_AHEAD = 256
"""Nobody who is honest is so far ahead; each ballot that is told of takes memory until the round is over."""
_MAX_DOUBLINGS = 16
_RETRY_S = 0.1
_TICK_S = 0.25
_LONGEST_REGISTER_S = 15.0
_SHORTEST_REDUCE_S, _LONGEST_REDUCE_S = 5.0, 60.0


class SwarmRound:
    """One round: follows and leads ballots until there is a decision, and serves those who follow."""

    def __init__(
        self,
        context: MemberContext,
        members: tuple[SwarmMember, ...],
        previous: tuple[bytes, int, bytes],
        tenure: int,
        span: tuple[int, int],
    ) -> None:
        self.members = members
        self._span = span
        self.fork, self.number, self.state = previous
        self.me = members.index(context.me)
        self._num_voters = num_voters(members)
        self._num_owners = num_owners(members)
        self.decision: Commit | None = None
        self.stage = GATHER
        self.plan: RoundPlan | None = None
        self.held: dict[tuple[int, bytes], HeldPart] = {}
        self.reduction: Reduction | None = None
        self.acceptor = Acceptor()
        self.ballot = 0
        """The ballot that this member follows or leads."""
        self._context = context
        self._attendance = Attendance(context, members, self.me, self.number)
        self._tenure = tenure
        self._tallies: dict[int, BallotTally] = {}
        self._witness = Witness()
        self._signed: dict[Statement, bytes] = {}
        """What this member has said in ballots, with its signature; empty once it was heard."""
        self._proposed: dict[int, bytes] = {}
        """By ballot: its owner's signature of what it proposed."""
        self._wanted_s: dict[int, float] = {}
        """Ballots of this member's that others have gone on to, and since when."""
        self._shortened: dict[bytes, ShortCommit] = {}
        self._considered: dict[int, None] = {}
        self._frozen: FrozenContribution | None = None
        self._registration: Registration | None = None
        self._changed = Broadcast()
        self._news = Broadcast()
        """Fires when there is something new to answer; what is only heard wakes no follower."""
        self._version = 0
        self._scope: Scope | None = None
        self._quorum_s = context.now_s()

    # --- what others may know ---

    @property
    def quorum_s(self) -> float:
        """When this member last had a sign of a quorum."""
        return self._quorum_s

    @property
    def coordinator(self) -> SwarmMember:
        """Whom this member takes for the coordinator now."""
        return self.members[self._owner_of(self.ballot)]

    @property
    def leaving(self) -> list[SwarmMember]:
        """Those who have told this member that they leave, too."""
        return self._attendance.leaving

    def _owner_of(self, ballot: int) -> int:
        """Gives the place of the member to whom a ballot belongs."""
        return ballot % self._num_owners

    def _now(self) -> float:
        return self._context.now_s()

    # --- living through it ---

    async def play(self, scope: Scope) -> Commit | None:
        """Takes part until there is a decision; None when there was no quorum for too long."""
        self._scope = scope
        while self.decision is None and not self.acceptor.is_closed:
            owner, context = self._owner_of(self.ballot), self._context
            if owner == self.me:
                if context.leads_since_s is None:
                    context.leads_since_s = self._now()
                await self._lead(self.ballot)
            else:
                context.leads_since_s = None
                await self._follow(self.ballot, owner)
            if self.decision is None:
                if self._is_without_quorum():
                    return None
                self.ballot = max(self.ballot, self.acceptor.promised)
        return self.decision

    def _is_without_quorum(self) -> bool:
        settings = self._context.settings
        return self._now() - self._quorum_s > settings.minority_after_s * settings.patience

    def decide(self, commit: Commit) -> None:
        """Learns the round's commit."""
        is_ours = (commit.fork, commit.round, commit.previous) == (self.fork, self.number, self.state)
        if self.decision is None and is_ours:
            self.decision = commit
            self._tell()

    async def wait_news(self, timeout_s: float) -> None:
        """Waits for a plan, a proposal or a decision, at most so long."""
        await self._news.wait(timeout_s)

    def wake(self) -> None:
        """Has the member's own facts looked at again."""
        if self.stage == REGISTER:
            self._register()  # it may have been asked, and have something now
        self._changed.fire()

    def _tell(self) -> None:
        """Answers all followers that wait."""
        self._version += 1
        self._news.fire()
        self._changed.fire()

    def _silence_s(self, ballot: int) -> float:
        context = self._context
        base_s: float = min(max(SILENCE_S, context.beats.timeout_s()), LONGEST_SILENCE_S)
        return (
            context.settings.patience
            * self._attendance.crowd
            * min(base_s * float(2 ** min(ballot, _MAX_DOUBLINGS)), LONGEST_SILENCE_S)
        )

    # --- following ---

    async def _follow(self, ballot: int, owner: int) -> None:
        """Follows a ballot until there is a decision or a reason to go on to a higher one."""
        self.acceptor.promise(ballot)
        heard_s, seen, has_ended = self._now(), -1, False
        while self.decision is None and self.acceptor.promised <= ballot and not self._is_without_quorum():
            silence_s = self._silence_s(ballot) * (GONE_SHARE if has_ended else 1.0)
            left_s = heard_s + silence_s - self._now()
            wanted = self._wanted_ballot()
            if ballot < self._num_voters and self._context.bans.is_paused(
                self.members[owner].id_bytes, self._now()
            ):
                left_s = 0.0  # a liar coordinates nothing, unless all others do not answer
            if left_s <= 0 or wanted is not None:
                # the owner is silent, or others wait for this member to lead a higher ballot
                if left_s <= 0:
                    self._attendance.suspects.setdefault(owner)
                self.ballot = ballot + 1 if wanted is None else wanted
                return
            asked_s, statement = self._now(), self._promise(ballot)
            outcomes = await fanout(
                [
                    self._call(owner, FOLLOW, self._request(statement, seen), (), left_s),
                    self._own_change(self._facts()),
                ],
                Deadline.after(left_s + _TICK_S),
                is_enough=bool,
            )
            answer = outcomes[0]
            has_ended = isinstance(answer, Exception) and is_gone(answer)
            if isinstance(answer, Reply):
                status: RoundStatus = answer.payload
                if not status.problem:
                    self._context.beats.observe(self._now() - asked_s)
                    heard_s, seen = self._now(), status.version
                    if statement in self._signed:
                        self._signed[statement] = b""
                    self._attendance.suspects.pop(owner, None)
                    try:
                        self._take_in(ballot, status)
                    except (ProtocolError, ValueError) as error:
                        log.warning("round %d: %s: %s", self.number, self.members[owner].short, error)
                        heard_s = -math.inf  # as if it were silent
                    continue
                if status.problem == "too old":
                    raise LimitExceeded(f"The run has left round {self.number} behind.")
            if not isinstance(outcomes[1], Exception):
                continue  # something new to tell
            await self._changed.wait(_RETRY_S)

    async def _own_change(self, told: tuple[Any, ...]) -> bool:
        """Waits until this member has something new to tell its owner."""
        while self._facts() == told:
            await self._changed.wait(_TICK_S)
        return True

    def _facts(self) -> tuple[Any, ...]:
        context = self._context
        is_told = self._attendance.crowd == 1  # else many tell of it, with their beats
        return (
            self.decision is not None,
            self.acceptor.promised,
            self.acceptor.accepted_ballot,
            self._registration,
            context.ledger.num_ready if is_told else None,
            context.is_ready,
            context.is_leaving,
            self._wanted_ballot(),
        )

    def _promise(self, ballot: int) -> Promise:
        """States what this member has promised and accepted so far."""
        acceptor = self.acceptor
        digest = acceptor.accepted.digest if acceptor.accepted else b""
        return Promise(self.fork, self.number, ballot, acceptor.accepted_ballot, digest)

    def _sign(self, statement: Statement) -> bytes:
        """Signs a statement of this member's, once; nothing where it has no key."""
        identity = self._context.identity
        if identity is not None and statement not in self._signed:
            self._signed[statement] = sign_statement(identity, statement, self._context.me)
        return self._signed.get(statement, b"")

    def _has_heard(self, member: SwarmMember, statement: Statement, signature: bytes) -> bool:
        """Notes what a member says in a ballot; False where it has not signed it.

        Who has signed something that contradicts it is named and banned, and the proof is kept.
        """
        if self._context.identity is None or self._witness.knows(member, statement):
            return True
        try:
            proof = self._witness.hear(member, statement, signature)
        except ShoalError as error:
            log.warning("round %d: %s", self.number, error)
            return False
        if proof is not None and member not in self._context.proofs:
            self._context.proofs[member] = proof
            self._context.bans.failed(member.id_bytes, self._now())
            log.warning("%s lies in round %d: %s.", member.short, self.number, proof.reason)
        return True

    def _request(self, statement: Promise, seen: int) -> FollowRequest:
        acceptor, context = self.acceptor, self._context
        is_own = acceptor.accepted_ballot == statement.ballot
        return FollowRequest(
            fork=self.fork,
            round=self.number,
            state=self.state,
            member=context.me,
            ballot=statement.ballot,
            seen=seen,
            has_plan=self.plan is not None,
            accepted_ballot=statement.accepted_ballot,
            accepted_digest=statement.accepted_digest,
            accepted=None if is_own else acceptor.accepted,
            signature=self._sign(statement),
            proposed=b"" if is_own else self._proposed.get(statement.accepted_ballot, b""),
            registration=self._registration,
            samples=context.ledger.num_ready,
            is_ready=context.is_ready,
            is_leaving=context.is_leaving,
        )

    def _take_in(self, ballot: int, status: RoundStatus) -> None:
        """Acts on what the owner of a ballot said."""
        if status.has_quorum:
            self._quorum_s = self._now()
        if status.ballot > self.ballot + MAX_BALLOTS_AHEAD:
            raise ProtocolError(f"It tells of ballot {status.ballot}.")
        if status.ballot > ballot:
            self.acceptor.promise(status.ballot)
        if status.stage == REGISTER:
            self._register()
        if status.plan is not None:
            self._begin(status.plan)
        if status.lost and self.reduction is not None:
            self.reduction.name_lost(status.lost)
        accepted = self.acceptor.accepted
        if status.finished is not None:
            self.decide(self._checked(status.finished))
        elif status.decided and accepted is not None and accepted.digest == status.decided:
            self.decide(accepted)
        elif status.decision is not None:
            self.decide(self._checked(lengthen(status.decision, self.members, self.plan)))
        elif (
            status.proposal is not None
            and self._context.me.votes
            and ballot not in self._considered
            and self._scope is not None
        ):
            proposal = self._checked(lengthen(status.proposal, self.members, self.plan))
            if self._is_proposed(ballot, proposal, status.proposed):
                self._considered[ballot] = None
                self._proposed[ballot] = status.proposed
                self._scope.start_soon(self._consider(ballot, proposal), name="consider a proposal")
        self.stage = status.stage

    def _checked(self, commit: Commit) -> Commit:
        """Gives back a commit that this round can have; ProtocolError for another one."""
        is_ours = (commit.fork, commit.round, commit.previous) == (self.fork, self.number, self.state)
        if not is_ours or not commit.fits(len(self.members), self._context.ledger.num_elements):
            raise ProtocolError("A commit came that this round cannot have.")
        return commit

    def _is_proposed(self, ballot: int, value: Commit, signature: bytes) -> bool:
        """Whether the owner of a ballot has signed that it proposes this."""
        owner = self.members[self._owner_of(ballot)]
        return self._has_heard(owner, Proposal(self.fork, self.number, ballot, value.digest), signature)

    def _register(self) -> None:
        """Makes a contribution of what is pending, once a round."""
        if self._registration is None:
            context = self._context
            if context.offers_when_asked and not context.is_ready:
                context.is_asked = True
                return
            self._frozen = context.ledger.freeze(self._span)
            samples = self._frozen.samples if self._frozen else 0
            self._registration = Registration(
                samples, context.ledger.num_elements, context.bandwidth, context.taken_mbit_s
            )
            self._changed.fire()

    def _begin(self, plan: RoundPlan) -> None:
        """Starts this member's part in the averaging."""
        if self.plan is not None or self._scope is None:
            return
        if not plan.fits(len(self.members), self._context.ledger.num_elements):
            raise ProtocolError("A plan came that this round cannot have.")
        self.plan = plan
        self.reduction = Reduction(plan, self.members, self.me, (self.fork, self.number), self._context)
        self.reduction.held = self.held
        self._scope.start_soon(self.reduction.reduce(), name="reduce")
        self._scope.start_soon(self.reduction.lead(self._call), name="lead a group")
        if self._frozen is not None and self.me in plan.contributors:
            sending = self.reduction.send(self._call, self._context.ledger, self._frozen)
            self._scope.start_soon(sending, name="send parts")
        if self._owner_of(self.ballot) != self.me and self._context.me.votes:
            self._scope.start_soon(self.reduction.take_all(self._call, None), name="take parts")
        self._tell()

    async def _consider(self, ballot: int, commit: Commit) -> None:
        """Accepts a proposal once every part is here, unless a higher ballot was promised meanwhile."""
        if (commit.fork, commit.round, commit.previous) != (self.fork, self.number, self.state):
            return
        await self.hold(commit)
        if self.acceptor.accept(ballot, commit):
            self._changed.fire()

    async def hold(self, commit: Commit) -> None:
        """Fetches every part of a commit that is not here and is not on its way, from whoever has it."""
        reduction = self.reduction if commit.plan == self.plan else None
        if reduction is not None:
            await reduction.wait_taken()
        await fetch_parts(self._context.call, self._context.me, self.members, commit, self.held, reduction)

    async def wait_arriving(self, commit: Commit) -> None:
        """Waits for those parts of the decided commit that have begun to come here."""
        if self.reduction is not None and commit.plan == self.plan:
            await self.reduction.wait_taken(is_decided=True)

    # --- serving those who follow ---

    async def serve_follow(self, request: FollowRequest) -> RoundStatus:
        """Takes in what a follower says; answers as soon as there is something new, and at every beat."""
        place = self._places.get(request.member)
        if place is None:
            return RoundStatus(problem="not a member")
        if request.state != self.state:
            return RoundStatus(problem="another state")
        ballot = request.ballot
        if not 0 <= ballot <= self.ballot + MAX_BALLOTS_AHEAD or self._owner_of(ballot) != self.me:
            return RoundStatus(problem="another member's ballot")
        if request.accepted is not None:
            self._checked(request.accepted)
        if not self._is_signed(request):
            return RoundStatus(problem="not signed")
        presence = self._context.presence[request.member] = MemberPresence(self._now())
        try:
            self._hear(place, request)
            until_s = self._now() + BEAT_S * self._attendance.crowd
            while self._version == request.seen and self.decision is None and self._now() < until_s:
                await self._news.wait(until_s - self._now())
            presence.heard_s = self._now()
            return self._status(request)
        except asyncio.CancelledError as cancelled:
            # who only ends its call is there: it has something new to tell, or asks the next owner
            if cancelled.args == (CONNECTION_ENDED,):
                presence.closed_s = self._now()
            else:
                presence.heard_s = self._now()
            raise

    def _is_signed(self, request: FollowRequest) -> bool:
        """Whether a follower has signed its promise, and the owner of an earlier ballot the value that the
        follower says it has accepted there.
        """
        accepted, digest = request.accepted, request.accepted_digest
        statement = Promise(self.fork, self.number, request.ballot, request.accepted_ballot, digest)
        if not self._has_heard(request.member, statement, request.signature):
            return False
        if accepted is None:
            return True
        return accepted.digest == digest and self._is_proposed(
            request.accepted_ballot, accepted, request.proposed
        )

    @cached_property
    def _places(self) -> dict[SwarmMember, int]:
        return {member: place for place, member in enumerate(self.members)}

    def _hear(self, place: int, request: FollowRequest) -> None:
        """Notes what a follower says, and looks at what is new: most only say that they are there."""
        is_new = self._attendance.hear(place, request)
        ballot = request.ballot
        tally = self._tally(ballot)
        is_new |= tally.add_promise(place, request.accepted_ballot, request.accepted)
        if request.accepted_ballot == ballot:
            is_new |= tally.add_vote(place, request.accepted_digest)
        if ballot > self.ballot and request.member.votes:
            self._wanted_s.setdefault(ballot, self._now())
        if is_new:
            self._changed.fire()

    def _status(self, request: FollowRequest) -> RoundStatus:
        is_leading = request.ballot == self.ballot and self._owner_of(self.ballot) == self.me
        tally = self._tallies.get(request.ballot)
        proposal = tally.proposal if tally else None
        has_voted = request.accepted_ballot == request.ballot  # not: under a lower one
        decision = self.decision
        is_known = decision is not None and request.accepted_digest == decision.digest
        return RoundStatus(
            version=self._version,
            ballot=self.acceptor.promised,
            stage=self.stage if is_leading else GATHER,
            plan=None if request.has_plan else self.plan,
            lost=tuple(self.reduction.lost) if self.reduction and is_leading else (),
            proposal=None if has_voted or decision else self._short(proposal),
            num_accepted=tally.num_votes if tally else 0,
            decision=None if is_known else self._short(decision),
            decided=decision.digest if decision is not None and is_known else b"",
            has_quorum=self._attendance.present_quorum(),
            proposed=self._proposed.get(request.ballot, b""),
        )

    def _short(self, commit: Commit | None) -> ShortCommit | None:
        """Shortens a commit for members of this round, once for all of them."""
        if commit is None:
            return None
        if commit.digest not in self._shortened:
            self._shortened[commit.digest] = shorten(commit, self.members, self.plan)
        return self._shortened[commit.digest]

    def _tally(self, ballot: int) -> BallotTally:
        if ballot not in self._tallies:
            self._tallies[ballot] = BallotTally(self._num_voters, ballot)
        return self._tallies[ballot]

    def _wanted_ballot(self) -> int | None:
        """Gives a higher ballot of this member's that it should lead: too many, or some for too long, wait
        there.
        """
        for ballot in sorted(self._wanted_s, reverse=True):
            is_late = self._now() - self._wanted_s[ballot] > 2 * self._silence_s(0)
            if ballot > max(self.ballot, self.acceptor.promised) and (
                is_late or not self._tally(ballot).leaves_quorum
            ):
                return ballot
        return None

    # --- leading ---

    async def _lead(self, ballot: int) -> None:
        """Leads a ballot of this member's until there is a decision, or a higher ballot goes on."""
        tally = self._tally(ballot)
        if not self.acceptor.promise(ballot):
            self.ballot = self.acceptor.promised
            return
        tally.add_promise(self.me, self.acceptor.accepted_ballot, self.acceptor.accepted)
        self._tell()
        began_s = self._now()
        while not self._is_over(ballot, began_s):
            if tally.has_promises and (ballot == 0 or self._has_waited(tally, began_s)):
                break
            await self._wait_heard(_RETRY_S)
        else:
            return
        value = tally.bound_value() if tally.proposal is None else tally.proposal
        if value is None:
            value = await self._make_value(ballot, began_s)
        if value is None:
            return
        while tally.proposal is None:
            if not await self._hold_while_leading(value, ballot, began_s):
                return
            if self.acceptor.promised > ballot or self.acceptor.is_closed:
                return
            bound = tally.bound_value()  # a promise that came meanwhile may tell of a vote
            if bound is None or bound == value:
                tally.propose(value)
                statement = Proposal(self.fork, self.number, ballot, value.digest)
                self._proposed[ballot] = self._sign(statement)
            else:
                value = bound
        if self.acceptor.accept(ballot, value):
            tally.add_vote(self.me, value.digest)
        self.stage = COMMIT
        self._tell()
        while not self._is_over(ballot, began_s):  # every beat says 'k of n accepted', and followers wait on
            if tally.is_decided:
                self.decide(value)
                return
            await self._wait_heard(_TICK_S)

    async def _hold_while_leading(self, value: Commit, ballot: int, began_s: float) -> bool:
        """Fetches the parts of a value; False where its ballot is over before they have come.

        Nobody may have them any more: the others may be rounds ahead, and not ask for this ballot.
        """
        is_held = False

        async def fetch() -> None:
            nonlocal is_held
            await self.hold(value)
            is_held = True
            self._changed.fire()

        async with Scope("hold what is proposed") as scope:
            scope.start_soon(fetch(), name="fetch its parts")
            while not is_held and not self._is_over(ballot, began_s):
                await self._changed.wait(_RETRY_S)
            scope.cancel()
        return is_held

    def _is_over(self, ballot: int, began_s: float) -> bool:
        """Whether this ballot is no longer worth leading; chooses the next one to follow."""
        if self._attendance.present_quorum():
            self._quorum_s = self._now()
        if self.decision is not None or self.ballot > ballot:
            return True
        wanted = self._wanted_ballot()
        if self.acceptor.promised > ballot or wanted is not None:
            self.ballot = max(self.acceptor.promised, wanted or 0)
            return True
        if len(self.members) > 1 and self._now() - max(began_s, self._quorum_s) > 3 * self._silence_s(ballot):
            self.ballot = ballot + 1  # nobody follows: they may have gone on to a higher ballot
            return True
        return False

    def _has_waited(self, tally: BallotTally, began_s: float) -> bool:
        """Whether all but those who are suspected have promised, or have had the time to: else they are
        dropped.
        """
        here = dict.fromkeys([*tally.promised, *self._attendance.suspects])
        waiting = [place for place in range(len(self.members)) if place not in here]
        return not waiting or self._now() - began_s > 2 * self._attendance.patient_s * self._attendance.crowd

    async def _wait_heard(self, timeout_s: float) -> None:
        """Waits for something new. Many members say much: what has come is then looked at together."""
        await self._changed.wait(timeout_s)
        if self._attendance.crowd > 1 and self.decision is None:
            await asyncio.sleep(_TICK_S)

    async def _make_value(self, ballot: int, began_s: float) -> Commit | None:
        """Makes the commit that a free ballot proposes; None where the ballot is over."""
        if ballot == 0 and self.plan is None:
            if not await self._gather(began_s):
                return None
            if self.stage == REGISTER:
                plan = await self._close_registration(began_s)
                if self._is_over(ballot, began_s):
                    return None
                if plan is None:
                    self._context.not_before_s = self._now() + ADMIT_S
                else:
                    self.stage = REDUCE
                    self._begin(plan)
        if self.reduction is None or self.plan is None:
            return self._commit(ABORT)
        self.reduction.name_lost(
            [place for place in self._attendance.suspects if place in self.plan.reducers]
        )
        self.stage = REDUCE
        self._tell()
        taken = await self._reduce(ballot, began_s)
        if taken is None:
            return None
        for place in self.reduction.blamed(taken):
            self._context.backoff.failed(self.members[place].id_bytes, self._now())
        kind = STEP if any(taken) else ABORT
        if kind == ABORT:
            self._context.not_before_s = self._now() + ADMIT_S
        return self._commit(kind, results(taken) if kind == STEP else ())

    async def _gather(self, began_s: float) -> bool:
        """Waits until a round should begin, or a commit is needed for members alone; False: the ballot is
        over.
        """
        waits_s: float | None = None
        while not self._is_over(0, began_s):
            if self._context.end is not None:
                return True
            if self._attendance.is_enough():
                self.stage = REGISTER
                self._register()
                self._tell()
                return True
            if not self._attendance.needs_commit():
                waits_s = None
            elif self._attendance.all_leave:
                return True  # nobody is left who might leave or come in the same commit
            elif waits_s is None:
                waits_s = self._now()
            elif self._now() - waits_s > ADMIT_S * self._attendance.crowd:
                return True
            await self._wait_heard(_TICK_S)
        return False

    async def _close_registration(self, began_s: float) -> RoundPlan | None:
        """Waits for all that are there to register, at most as long as is usual, and makes the plan."""
        context, opened_s = self._context, self._now()
        limit_s = min(context.arrivals.timeout_s(), _LONGEST_REGISTER_S) * context.settings.patience
        arrived: dict[int, None] = {}
        while not self._is_over(0, began_s) and self._now() - opened_s < limit_s:
            for place, follower in self._attendance.followers.items():
                if follower.registration is not None and place not in arrived:
                    arrived[place] = None
                    context.arrivals.observe(self._now() - opened_s)
            if self._registration is not None:
                arrived.setdefault(self.me)
            awaited = [p for p in range(len(self.members)) if p not in arrived]
            if not any(self._attendance.is_present(place, self._now()) for place in awaited):
                break
            await self._wait_heard(_TICK_S)
        followers = self._attendance.followers
        registered = {place: one.registration for place, one in followers.items() if one.registration}
        if self._registration is not None:
            registered[self.me] = self._registration
        reduce_s = min(max(2 * context.durations.timeout_s(), _SHORTEST_REDUCE_S), _LONGEST_REDUCE_S)
        now_s = self._now()
        return make_plan(
            self.members,
            registered,
            context.ledger.num_elements,
            bytes_per_element=context.settings.bytes_per_element,
            reduce_s=reduce_s * context.settings.patience,
            is_robust=bool(context.settings.robust),
            left_out=[
                place for place, member in enumerate(self.members) if context.is_left_out(member, now_s)
            ],
            span=self._span,
        )

    async def _reduce(self, ballot: int, began_s: float) -> list[tuple[int, HeldPart] | None] | None:
        """Takes all parts, and names the reducers that are silent; None where the ballot is over."""
        assert self.reduction is not None
        reduction, reduce_began_s = self.reduction, self._now()
        # lines are full of what all others take
        give_up_s = self._attendance.patient_s * self._attendance.crowd
        outcomes: list[Any] = await fanout(
            [reduction.take_all(self._call, give_up_s), self._while_leading(ballot, began_s, reduction)],
            Deadline.never(),
            is_enough=bool,
        )
        if isinstance(outcomes[0], Exception):
            return None
        self._context.durations.observe(self._now() - reduce_began_s)
        for place in reduction.lost:  # it may be there, and only nobody can dial it
            if self.members[place].is_reachable and self._attendance.is_present(place, self._now()):
                self._context.try_to_reach(self.members[place])
        taken: list[tuple[int, HeldPart] | None] = outcomes[0]
        return taken

    async def _while_leading(self, ballot: int, began_s: float, reduction: Reduction) -> None:
        """Passes on which reducers and contributors are lost; ends when the ballot is over."""
        num_lost = 0
        while not self._is_over(ballot, began_s):
            plan = reduction.plan
            used = dict.fromkeys([*plan.reducers, *plan.backups, *plan.contributors, *sum(plan.leaders, ())])
            is_present = self._attendance.is_present
            silent = [place for place in used if place >= 0 and not is_present(place, self._now(), 2.0)]
            if any(place not in reduction.lost for place in silent):
                reduction.name_lost(silent)
            if len(reduction.lost) != num_lost:
                num_lost = len(reduction.lost)
                self._tell()
            await self._wait_heard(_RETRY_S)

    def _commit(self, kind: str, parts: tuple[PartResult, ...] = ()) -> Commit:
        context = self._context
        winner: bytes = b""
        winner_members: tuple[SwarmMember, ...] = ()
        if context.end is not None and kind == ABORT:
            kind = END
            winner, winner_members = context.end
        kept = self._attendance.next_members()
        members, tenure = next_order(self.state, kept, context.me, 0 if self.me else self._tenure)
        return Commit(
            fork=self.fork,
            round=self.number,
            previous=self.state,
            kind=kind,
            members=members,
            tenure=tenure,
            plan=self.plan if kind == STEP else None,
            parts=parts,
            should_pin=context.wants_pin,
            winner=winner,
            winner_members=winner_members,
        )

    async def _call(
        self,
        place: int,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        wait_s: float,
        into: Into = None,
    ) -> Reply:
        return await self._context.call(self.members[place], method, payload, buffers, wait_s, into)
