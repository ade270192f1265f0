"""A run as one of its members sees it: joins or founds it, goes from round to round, applies commits, leaves.

    async with SwarmRun(transport, address, "digits", parameters, optimizer, contacts=[...]) as run:
        run.add(gradient, samples)        # whenever there is something new
        await run.next_commit()           # run.state.parameters are the committed ones

It lives on one loop and reads no clock but its loop's, so that it runs unchanged on sockets and in virtual
time. A thread hashes the state that those who join take; in virtual time that happens on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch

from shoal.core import (
    Address,
    Deadline,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerRefused,
    Scope,
    ShoalError,
    StandingScope,
    fanout,
)
from shoal.core.identity import Identity
from shoal.swarm.audits import AuditKeeper
from shoal.swarm.calls import Handler, MemberCalls
from shoal.swarm.forks import ForkKeeper
from shoal.swarm.joining import (
    JOIN_BEAT_S,
    NUM_COMMITS_TRUSTED,
    JoinHelpers,
    RunStateTaker,
)
from shoal.swarm.kept import NUM_KEPT, KeptRounds
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.membership import BYTES_PER_S_OF_MBIT, MemberContext, SwarmSettings, crowd_factor
from shoal.swarm.optimizers import CommittedOptimizer, CommittedSGD
from shoal.swarm.reduction import HeldPart, Reduction, assemble, fetch_parts
from shoal.swarm.round import SwarmRound
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import (
    AUDIT,
    COMMITS,
    END,
    FOLLOW,
    FORK,
    GATHER,
    JOIN,
    MAX_CONTRIBUTORS,
    MEET,
    PART,
    STEP,
    TAKE,
    TRAINER,
    AuditMessage,
    Broadcast,
    Commit,
    CommitsRequest,
    FollowRequest,
    ForkRequest,
    JoinReply,
    JoinRunRequest,
    MeetReply,
    MeetRequest,
    PartMessage,
    RoundStatus,
    SwarmMember,
    TakeRequest,
)
from shoal.tensors import Codec, Plain
from shoal.transport import Head, Reply, ThrottledTransport, Transport
from shoal.transport.memory import BufferPool

log = logging.getLogger(__name__)

MAX_HISTORY = 4096
MAX_JOINERS = 1024
MEET_S = 10.0
"""How often a coordinator looks for other forks of its run."""
_ROUND_S = 1.0
_HOLD_S = 30.0
_JOIN_TICK_S = 0.2
_CLAIM_S, _NUM_CLAIMS = 60.0, 5
"""How often a member that is listed as a client says that others can dial it, and how many times each."""
_REACHED_S = 30.0
"""Whether somebody who is not listed could be dialed is known for so long."""
_FLOAT_BYTES = 4
_LINGER_S = 3.0
_LAST_WORD_S = 0.2
"""Answers need so long to leave this member's line."""
_REACH_S = 10.0
"""Who says that it can be dialed is given so long to answer."""
_ALONE_S = 10.0
"""Who was joining when the last member ended begins the run again from its state after so long."""


class SwarmRun:
    """A member of a run, from `async with` until the end of the block, or until it has left in order.

    Others call it at `address`, whose port is 0 where they cannot: then it is a client, which only dials out.
    `is_reachable` says that they can dial it; a coordinator tries that before it lists it.
    """

    def __init__(
        self,
        transport: Transport,
        address: Address,
        run: str,
        parameters: torch.Tensor,
        optimizer: CommittedOptimizer | None = None,
        *,
        settings: SwarmSettings | None = None,
        codec: Codec | None = None,
        contacts: Sequence[Peer] = (),
        find: Callable[[], Awaitable[Sequence[Peer]]] | None = None,
        may_found: bool = True,
        kind: str = TRAINER,
        is_reachable: bool = True,
        choice: random.Random | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Joins nobody yet. Without an `identity`, whose id is the transport's, it signs nothing."""
        self.run = run
        self.choice = choice or random.SystemRandom()
        self.state = CommittedState(parameters, optimizer or CommittedSGD(), b"")
        self.state.has_values = kind == TRAINER
        self.settings = settings or SwarmSettings()
        self.members: tuple[SwarmMember, ...] = ()
        self.round: SwarmRound | None = None
        self.history: deque[tuple[bytes, int, bytes]] = deque(maxlen=MAX_HISTORY)
        """Fork, round and the state's name after it, of the latest commits that this member has applied."""
        self.num_commits = 0
        self.num_failed = 0
        """Rounds that had a plan and came to nothing, as far as this member was there."""
        self.has_left = False
        self._address = address
        self._is_reachable = is_reachable
        self._kind = kind
        self._id_bytes = (transport.peer_id or _id_of(address)).digest  # type: ignore[attr-defined]
        limits = self.settings.upload_limit, self.settings.download_limit
        if math.isfinite(min(limits)):
            transport = ThrottledTransport(transport, *(BYTES_PER_S_OF_MBIT * limit for limit in limits))
        self.transport = transport
        """Through which it talks to others, within its limits."""
        self._contacts = list(contacts)
        self._find = find
        self.may_found = may_found
        """Whether it begins the run where it finds nobody."""
        self._tenure = 0
        self._was_listed = False
        self._told: dict[SwarmMember, int] = {}
        """The latest round whose decision a member has from this one, while it leaves."""
        self._listed_since: dict[SwarmMember, int] = {}
        """For the members of the list: the round before which this member first saw them there."""
        self.taker = RunStateTaker(transport, run, self.choice)
        """Takes the run's state; empty-handed while this member has one."""
        self._changed = Broadcast()
        self._moved = Broadcast()
        """Fires when this member is reached in another way."""
        self._trying: dict[SwarmMember, None] = {}
        """Members that are being dialed to see whether that can be done."""
        # the parts of the rounds that are kept, and what comes next: no more than one vector lies idle
        self._vectors = BufferPool(2 * _FLOAT_BYTES * self.state.num_elements)
        handlers: dict[str, Handler] = {
            FOLLOW: self._serve_follow,
            PART: self._serve_part,
            TAKE: self._serve_take,
            JOIN: self._serve_join,
            COMMITS: self._serve_commits,
            MEET: self._serve_meet,
            FORK: self._serve_fork,
            AUDIT: self._serve_audit,
        }
        self.calls = MemberCalls(transport, handlers, self._is_me, self._check_sender)
        codec = codec or Plain()
        self.context = MemberContext(
            me=self._new_member(),
            settings=self.settings,
            ledger=SampleLedger(self.state.num_elements, codec, adds_up=self.settings.num_fragments > 1),
            codec=codec,
            call=self.calls.call,
            upload=self.calls.upload,
            download=self.calls.download,
            vector=self._new_vector,
            random=self.choice,
            identity=identity,
        )
        self.context.try_to_reach = self._try_to_reach
        self._helpers = JoinHelpers(self.taker, self.context, self.state, self.calls.call_peer)
        self._forks = ForkKeeper(run, self.context, self.state, self.calls.call_peer)
        self._standing = StandingScope(f"run {run}")
        self.audits = AuditKeeper(self.context, self._start_soon)
        self.kept = KeptRounds(self.state, self.context, transport, self._start_soon, self._is_averaging)

    # --- for the user ---

    @property
    def ledger(self) -> SampleLedger:
        """What became of this member's samples."""
        return self.context.ledger

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of parts and averages that went to other members."""
        return self.calls.num_sent_bytes

    @property
    def problem(self) -> str:
        """What keeps this peer from becoming a member, if anything does."""
        return self._helpers.problem

    @property
    def blamed(self) -> dict[Peer, str]:
        """Donors that sent wrong bytes while this member joined."""
        return self.taker.blamed

    @property
    def is_member(self) -> bool:
        """Whether it is listed now."""
        return self.context.me in self.members

    def add(self, mean: torch.Tensor, samples: int) -> None:
        """Takes the mean gradient, or the difference from the committed parameters, of so many samples."""
        self.ledger.add(mean, samples)
        self._wake()

    def set_ready(self, is_ready: bool = True) -> None:
        """Says that this member's local steps are done; a round begins when half of the members say so."""
        self.context.is_ready = is_ready
        self._wake()

    async def next_commit(self, deadline: Deadline | None = None) -> int:
        """Waits for the next commit; gives the round that comes then."""
        known = self.num_commits
        while self.num_commits == known and not self.has_left:
            if deadline is not None:
                deadline.check("waiting for a commit")
            await self._changed.wait(None if deadline is None else deadline.remaining_s)
        return self.state.round

    async def next_change(self, timeout_s: float) -> None:
        """Waits until this member is in another round, or listed in another way, at most so long."""
        await self._changed.wait(timeout_s)

    async def leave(self, deadline: Deadline) -> None:
        """Leaves in order: returns once a commit has taken this member off the list."""
        self.context.is_leaving = True
        self._wake()
        while not self.has_left:
            deadline.check("leaving the run")
            await self._changed.wait(deadline.remaining_s)
        # who has decided that it is off the list tells the others: alone they might be no quorum
        round_, told_by = self.round, Deadline.after(_LINGER_S * self.settings.patience)
        while round_ is not None and round_.coordinator == self.context.me and not told_by.is_past:
            others = [*self.members, *round_.leaving]
            if not others:
                break
            if all(self._told.get(member, -1) >= round_.number for member in others):
                await asyncio.sleep(_LAST_WORD_S * self.settings.patience)
                break
            await self._changed.wait(min(_JOIN_TICK_S, told_by.remaining_s))

    async def __aenter__(self) -> Self:
        scope = await self._standing.open()
        scope.start(self._drive(), name="rounds")
        scope.start_soon(self.context.watch_stalls(), name="watch stalls")
        scope.start_soon(self._tell_where(), name="tell where it is reached")
        if self._find is not None:
            scope.start_soon(self._meet(), name="meet other forks")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._standing.close()
        finally:
            # another run may use the transport afterwards
            self.kept.donor.close()
            self.calls.close()

    # --- from round to round ---

    async def _drive(self) -> None:
        while not self.has_left:
            if not self.is_member:
                await self._join()
            previous = (self.state.fork, self.state.round, self.state.name)
            span = self.state.fragment(self.settings.num_fragments)
            round_ = self.round = SwarmRound(self.context, self.members, previous, self._tenure, span)
            self._changed.fire()
            commit = await self._play(round_)
            if commit is None:
                self.num_failed += 1
                self._leave_round(round_)
            else:
                self._apply(commit, round_.held, round_.me)

    async def _play(self, round_: SwarmRound) -> Commit | None:
        """Lives through a round; None where this member must go on in a fork, or join anew."""
        commit = None
        async with Scope(f"round {round_.number}") as scope:
            try:
                while (commit := await round_.play(scope)) is None:
                    if await self._forks.propose(round_) or not self.context.me.votes:
                        break
                if commit is not None:
                    await round_.wait_arriving(commit)
                    if not await self._hold(commit, round_.held, round_.members):
                        commit = None
            except LimitExceeded as error:
                log.warning("%s", error)
            scope.cancel()
        if round_.reduction is not None:
            round_.reduction.close()
        return commit

    async def _hold(
        self, commit: Commit, held: dict[tuple[int, bytes], HeldPart], members: Sequence[SwarmMember]
    ) -> bool:
        """Has all parts of a commit; False where nobody gives them any more."""
        if not self.state.has_values:
            return True
        asked = list(dict.fromkeys([*members, *commit.members]))
        fetching = fetch_parts(self.calls.call, self.context.me, asked, commit, held)
        outcome = await fanout([fetching], Deadline.after(_HOLD_S * self.settings.patience))
        return not isinstance(outcome[0], Exception)

    def _leave_round(self, round_: SwarmRound) -> None:
        """Goes on under another name, or as another member that joins."""
        begun, self._forks.begun = self._forks.begun, None
        if round_.plan is None:
            self.ledger.take_back()  # nothing of it was sent
        else:
            self.ledger.give_up(f"the outcome of round {round_.number} is not known")
        if begun is not None:
            self.kept.forget_all()
            self.state.branch(begun[0])
            self.members, self._tenure = begun[1], 1
        else:
            self._become_another()

    def _become_another(self) -> None:
        """Is another member from now on: the old one never votes again."""
        self.context.me = self._new_member()
        self._contacts = _peers_of(self.members) or self._contacts
        self.members = ()

    def _apply(self, commit: Commit, held: dict[tuple[int, bytes], HeldPart], place: int) -> None:
        is_step = commit.kind == STEP and self.state.has_values
        average = assemble(commit.plan, commit.parts, held) if is_step and commit.plan else None
        self.state.apply(commit, average)
        round_ = self.round
        if place >= 0 and self.state.has_values and round_ is not None and commit.round == round_.number:
            reduction = round_.reduction
            is_this = reduction is not None and reduction.plan == commit.plan
            sent = self.ledger.sent if is_this else {}
            receipts = reduction.receipts if reduction is not None and is_this else {}
            self.audits.begin(commit, round_.members, place, held, sent, receipts)
        self.ledger.settle(commit, place)
        self.history.append((self.state.fork, commit.round, self.state.name))
        self.num_commits += 1
        self._was_listed = self._was_listed or place >= 0
        self.kept.add(commit, held)
        self.members, self._tenure = commit.members, commit.tenure
        if commit.should_pin and self.state.has_values:
            self.kept.pin()
        self.kept.forget(len(self.members))
        context = self.context
        for meter in (context.upload, context.download):
            meter.finish_round()
        context.is_ready = context.is_asked = False
        if commit.kind != STEP and self.round is not None and self.round.plan is not None:
            self.num_failed += 1
        listed = dict.fromkeys(commit.members)
        # the commit says how others reach this member
        context.me = next(filter(context.me.is_same, listed), context.me)
        context.presence = {member: one for member, one in context.presence.items() if member in listed}
        context.joiners = {member: one for member, one in context.joiners.items() if member not in listed}
        now_s = context.now_s()
        context.reached = {
            member: one
            for member, one in context.reached.items()
            if member in listed or now_s - one[1] < _REACHED_S
        }
        since = self._listed_since
        self._listed_since = {member: since.get(member, commit.round + 1) for member in listed}
        if commit.kind == END:
            context.end = None
            self._contacts = _peers_of(commit.winner_members)
            self.members = commit.winner_members
            self._become_another()
        elif context.me not in commit.members and place >= 0:
            self.has_left = context.is_leaving
            if not self.has_left:
                self._become_another()
        self._changed.fire()

    def _is_averaging(self) -> bool:
        return self.round is not None and self.round.stage != GATHER

    def _is_me(self, member: SwarmMember) -> bool:
        return member == self.context.me

    def _wake(self) -> None:
        if self.round is not None:
            self.round.wake()

    def _start_soon(self, coroutine: Any, *, name: str) -> None:
        self._standing.scope.start_soon(coroutine, name=name)

    def _new_vector(self) -> Any:
        view = self._vectors.allocate(_FLOAT_BYTES * self.state.num_elements)
        return np.frombuffer(view, np.float32)

    def _new_member(self) -> SwarmMember:
        return self._as_claimed(self.choice.getrandbits(62))

    def _as_claimed(self, number: int) -> SwarmMember:
        """Makes this member as it describes itself; the commit that lists it says whether others reach it."""
        host, port, is_relayed = self._address.host, self._address.port, self._address.is_relayed
        is_reachable = self._is_reachable and port != 0
        return SwarmMember(self._id_bytes, number, host, port, is_reachable, self._kind, is_relayed)

    # --- how others reach this member, and this one others ---

    def be_at(self, address: Address, *, is_reachable: bool) -> None:
        """Says where others call this member from now on, with port 0 nowhere, and whether they dial it
        there; a commit takes it up.
        """
        self._address, self._is_reachable = address, is_reachable
        if not self.is_member:
            self.context.me = self._as_claimed(self.context.me.start_number)
        self._moved.fire()

    async def _tell_where(self) -> None:
        """Asks to be listed as this member is reached now, where that is not so yet; seldom where a
        coordinator has tried in vain. Ends when cancelled.
        """
        context = self.context
        while True:
            await self._moved.wait(_CLAIM_S * self.settings.patience)
            claim = self._as_claimed(context.me.start_number)
            for _ in range(_NUM_CLAIMS):
                if not self.is_member or context.me == claim:
                    break
                state = self.state
                context.joiners[claim] = context.now_s(), state.round
                self._wake()
                self.taker.helpers = [one.peer for one in self._others(self.members)][:3]
                await self._helpers.tell(JoinRunRequest(self.run, claim, state.fork, state.round))
                await asyncio.sleep(JOIN_BEAT_S)

    def _try_to_reach(self, member: SwarmMember) -> None:
        """Dials a member, beside all else, and notes whether it could be reached."""
        if member.is_same(self.context.me):
            self.context.reached[member] = True, self.context.now_s()
        elif member not in self._trying:
            self._trying[member] = None
            self._standing.scope.start_soon(self._reach(member), name="reach a member")

    async def _reach(self, member: SwarmMember) -> None:
        is_reached, wait_s = True, _REACH_S * self.settings.patience
        try:
            await self.calls.call_peer(member.peer, JOIN, JoinRunRequest(self.run), wait_s)
        except ShoalError as error:
            is_reached = isinstance(error, PeerRefused | PeerBusy)
        finally:
            del self._trying[member]
        self.context.reached[member] = is_reached, self.context.now_s()
        self._wake()

    # --- joining ---

    async def _join(self) -> None:
        """Becomes a member: takes the state from several donors, catches up, and waits to be listed."""
        alone_s = self.context.now_s()
        while not self.is_member:
            found = await self._look_around()
            if found is None:
                if self._may_begin(alone_s):
                    self._found()
                    return
                await asyncio.sleep(_JOIN_TICK_S)
                continue
            alone_s = self.context.now_s()
            async with Scope("join") as scope:
                scope.start_soon(self._helpers.keep_told(found, scope), name="keep helpers told")
                try:
                    await self._come_closer(found)
                except ShoalError as error:
                    self._helpers.problem = error.what
                scope.cancel()
            if not self.is_member:
                await self._changed.wait(_JOIN_TICK_S * crowd_factor(len(found.members)))
        self._helpers.problem = ""
        self.ledger.reconcile(self.state.descends_from)

    def _may_begin(self, alone_s: float) -> bool:
        """Whether this member, which finds nobody since then, begins the run: anew, or from the state it has.

        Who has a state waits: the others may be cut off, and two forks lose the samples of one.
        """
        if not self.state.fork:
            return self.may_found
        wait_s = self.settings.minority_after_s if self._was_listed else _ALONE_S
        waited_s = self.context.now_s() - alone_s
        return self.may_found and self._find is not None and waited_s > wait_s * self.settings.patience

    def _found(self) -> None:
        """Begins a run with this member alone."""
        me = self.context.me
        fact = msgspec.msgpack.encode((self.run, me))
        if self.state.fork:
            self.state.branch(hashlib.sha256(self.state.name + fact).digest())
            self.kept.forget_all()
            self.members, self._tenure = (me,), 1
            return
        self.state.found(hashlib.sha256(fact).digest())
        self.members, self._tenure = (me,), 1

    async def _look_around(self) -> JoinReply | None:
        """Asks where the run is; None where nobody answers."""
        peers = list(self._contacts)
        if self._find is not None:
            peers += await self._find()
        found = await self.taker.look_around(
            [peer for peer in dict.fromkeys(peers) if peer.address != self._address]
        )
        if found is not None:
            self.taker.helpers = [member.peer for member in self._others(found.members)][:3]
        return found

    async def _come_closer(self, found: JoinReply) -> None:
        """Takes the run's state where it must, applies the commits since, and asks to be listed."""
        state = self.state
        asked = self._others(found.members)
        is_ours = state.fork == found.fork
        commits = await self._helpers.commits_since(asked) if is_ours else []
        is_near = is_ours and found.round - state.round <= NUM_KEPT
        if not commits and not is_near and not state.has_values:
            self.kept.forget_all()
            state.follow(found.fork, found.round, found.name)
            state.num_samples, state.num_steps = found.samples, found.steps
        elif not commits and not is_near:
            taken = await self.taker.take(found)
            if taken is None:
                await self._helpers.tell(JoinRunRequest(self.run, self.context.me, found.fork, -1))
                return
            self.state.restore(taken)
            known = [member for member in found.members if member.peer in self.taker.trusted]
            self._listed_since = dict.fromkeys(known, state.round - NUM_COMMITS_TRUSTED)
            self._helpers.newest = -1
            self.kept.forget_all()
            self.kept.pin()
            commits = await self._helpers.commits_since(asked)
        while commits:
            for commit in commits:
                if commit.kind == END or not await self._hold_slowly(commit, asked):
                    return
                if self.is_member:
                    return
            asked = self._others(commit.members)
            commits = await self._helpers.commits_since(asked)
        await self._helpers.tell(JoinRunRequest(self.run, self.context.me, state.fork, state.round))

    def _others(self, members: Sequence[SwarmMember]) -> list[SwarmMember]:
        """Lists those that this peer can ask: one that is listed and does not know it must not ask itself."""
        return [one for one in members if one.is_callable and one.id_bytes != self._id_bytes]

    async def _hold_slowly(self, commit: Commit, members: Sequence[SwarmMember]) -> bool:
        """Applies a commit once all its parts are here; False where they come no more, or it is none."""
        if not commit.fits(MAX_CONTRIBUTORS, self.state.num_elements):
            return False
        held: dict[tuple[int, bytes], HeldPart] = {}
        num_held = -1
        while not await self._hold(commit, held, members):
            if num_held == len(held):
                return False
            num_held = len(held)
        self._apply(commit, held, -1)
        return True

    async def _meet(self) -> None:
        """Looks for other forks of the run while this member coordinates."""
        assert self._find is not None
        while True:
            await asyncio.sleep(MEET_S)
            if self.is_member and self.members[0] == self.context.me:
                with contextlib.suppress(ShoalError):
                    await self._forks.meet(await self._find(), self.members)
                self._wake()

    # --- answers ---

    def _check_sender(self, head: Head) -> None:
        """PeerRefused for a message in another's name: members speak for themselves."""
        message = head.payload
        claimed = getattr(message, "member", None)
        round_ = self.round
        if isinstance(message, PartMessage) and round_ is not None and round_.number == message.round:
            claimed = next(iter(round_.members[message.contributor :][:1]), None)
        if claimed is not None and head.peer.id is not None and head.peer.id.digest != claimed.id_bytes:
            raise PeerRefused("A member speaks for itself alone.")

    async def _round_of(self, fork: bytes, number: int) -> SwarmRound:
        """Gives the round that a message is about; PeerBusy when this member is not there soon."""
        until = Deadline.after(_ROUND_S)
        while not until.is_past:
            round_ = self.round
            if round_ is not None and round_.fork == fork and round_.number == number:
                return round_
            if self.state.fork == fork and self.state.round > number:
                break
            await self._changed.wait(until.remaining_s)
        raise PeerBusy(f"This member is not in round {number}.")

    async def _serve_follow(self, request: FollowRequest, buffers: Sequence[memoryview]) -> RoundStatus:
        status = await self._status_of(request)
        if (status.decision or status.decided or status.finished) and self.context.is_leaving:
            self._told[request.member] = request.round
            self._changed.fire()
        return status

    async def _status_of(self, request: FollowRequest) -> RoundStatus:
        is_ours = request.fork == self.state.fork
        if is_ours and request.round < self.state.round:
            finished = self.kept.finished.get(request.round)
            if finished is None:
                return RoundStatus(problem="too old")
            digest = finished.commit.digest
            is_known = request.accepted_digest == digest
            return RoundStatus(decided=digest) if is_known else RoundStatus(finished=finished.commit)
        if not is_ours and self.state.descends_from(request.fork, request.round + 1):
            return RoundStatus(problem="too old")
        try:
            round_ = await self._round_of(request.fork, request.round)
        except PeerBusy:
            return RoundStatus(problem="not there yet")
        return await round_.serve_follow(request)

    async def _serve_part(self, message: PartMessage, buffers: Sequence[memoryview]) -> bytes | None:
        return (await self._reduction_of(message.fork, message.round)).receive(message, buffers)

    async def _reduction_of(self, fork: bytes, number: int) -> Reduction:
        """Gives the averaging of a round; PeerBusy when there is no plan soon."""
        round_ = await self._round_of(fork, number)
        until = Deadline.after(_ROUND_S)
        while round_.reduction is None and not until.is_past:
            await round_.wait_news(until.remaining_s)
        if round_.reduction is None:
            raise PeerBusy("This member has no plan yet.")
        return round_.reduction

    async def _serve_take(self, request: TakeRequest, buffers: Sequence[memoryview]) -> Reply:
        finished = self.kept.finished.get(request.round) if request.fork == self.state.fork else None
        if finished is not None or request.digest:
            held = finished.held if finished else {}
            round_ = self.round
            if round_ is not None and (round_.fork, round_.number) == (request.fork, request.round):
                held = round_.held
            found = held.get((request.part, request.digest))
            if found is None:
                raise PeerBusy("This member does not hold that part.")
            return found.reply
        reduction = await self._reduction_of(request.fork, request.round)
        return await reduction.serve_take(request.part, request.attempt)

    async def _serve_join(self, request: JoinRunRequest, buffers: Sequence[memoryview]) -> JoinReply:
        if request.run != self.run or not self.is_member:
            raise PeerRefused(f"This peer is no member of the run {request.run[:100]!r}.")
        pin = self.kept.pin_for(request)
        if request.member is not None and request.fork == self.state.fork:
            is_mine = self.members[0] == self.context.me and request.member.is_reachable
            if is_mine and request.member not in self.context.reached:
                self._try_to_reach(request.member)  # while it still takes the state
            if request.round >= 0:
                self._note_joiner(request.member, request.round)
            elif not request.state and self.kept.should_pin():
                self.context.wants_pin = True
            self._wake()
        if pin is not None and request.round < 0:
            pin.asked_s = asyncio.get_running_loop().time()
        trusted_round = self.state.round - NUM_COMMITS_TRUSTED
        since = [self._listed_since.get(member, self.state.round) for member in self.members]
        return JoinReply(
            self.run,
            self.state.fork,
            self.state.round,
            self.members,
            self.state.num_samples,
            pin.round if pin else -1,
            pin.name if pin else "",
            name=self.state.name,
            steps=self.state.num_steps,
            trusted=tuple(place for place, number in enumerate(since) if number <= trusted_round),
        )

    def _note_joiner(self, member: SwarmMember, number: int) -> None:
        """Notes that a peer wants to be listed; it is one member, whatever it says."""
        joiners, name = self.context.joiners, member.id_bytes
        for known in [one for one in joiners if one.id_bytes == name and one != member]:
            del joiners[known]
        if member not in joiners and len(joiners) >= MAX_JOINERS:
            raise PeerBusy("Too many want to join at once.")
        joiners[member] = (self.context.now_s(), min(number, self.state.round))

    async def _serve_commits(self, request: CommitsRequest, buffers: Sequence[memoryview]) -> list[Commit]:
        if request.fork != self.state.fork or not self.is_member:
            raise PeerRefused("This member is in another fork, or joins.")
        return self.kept.commits_from(request.round)

    async def _serve_audit(self, message: AuditMessage, buffers: Sequence[memoryview]) -> None:
        if not self.audits.is_on:
            raise PeerRefused("Nothing is audited in this run.")
        await self.audits.serve_audit(message, buffers)

    async def _serve_fork(self, request: ForkRequest, buffers: Sequence[memoryview]) -> bool:
        if self.round is None or not self.is_member:
            return False
        return self._forks.serve_fork(request, self.round, self.context.now_s())

    async def _serve_meet(self, request: MeetRequest, buffers: Sequence[memoryview]) -> MeetReply:
        if not self.is_member:
            raise PeerRefused("This peer is no member of a run.")
        return self._forks.serve_meet(request, self.members, self.context.now_s())


def _peers_of(members: Sequence[SwarmMember]) -> list[Peer]:
    return [member.peer for member in members if member.is_callable]


def _id_of(address: Address) -> Any:
    from shoal.core import PeerId

    return PeerId.of_public_key(hashlib.sha256(str(address).encode()).digest())
