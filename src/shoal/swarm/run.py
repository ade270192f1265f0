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
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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
    VirtualLoop,
    fanout,
)
from shoal.swarm.forks import ForkKeeper
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.membership import MemberContext, SwarmSettings, crowd_factor
from shoal.swarm.optimizers import CommittedOptimizer, CommittedSGD
from shoal.swarm.reduction import HeldPart, Reduction, assemble, fetch_parts
from shoal.swarm.round import SwarmRound
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import (
    COMMITS,
    END,
    FOLLOW,
    FORK,
    JOIN,
    MEET,
    PART,
    STEP,
    TAKE,
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
    TakeReply,
    TakeRequest,
)
from shoal.tensors import Codec, Plain
from shoal.tensors.transfer import HeldState, StateDonor, StateTaker
from shoal.transport import Head, Reply, Transport
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Into

log = logging.getLogger(__name__)

NUM_KEPT = 2
"""Rounds whose commits and parts a member keeps for those who are behind."""
NUM_SINCE_PIN = 8
"""Rounds that a member keeps at most after the state that it has pinned for joiners."""
PIN_S = 5.0
"""After so long without anybody who joins a member keeps the pinned state no more."""
MAX_HISTORY = 4096
MAX_DONORS = 8
MAX_ASKED = 32
MEET_S = 10.0
"""How often a coordinator looks for other forks of its run."""
_ROUND_S = 1.0
_ASK_S = 2.0
_HOLD_S = 30.0
_TRANSFER_S = 600.0
_JOIN_TICK_S = 0.2
_FLOAT_BYTES = 4
_LINGER_S = 3.0
_ALONE_S = 10.0
"""Who was joining when the last member ended begins the run again from its state after so long."""

_REPLIES: dict[str, Any] = {
    FOLLOW: RoundStatus,
    TAKE: TakeReply,
    JOIN: JoinReply,
    COMMITS: list[Commit],
    MEET: MeetReply,
    FORK: bool,
}
_REQUESTS: dict[str, Any] = {
    FOLLOW: FollowRequest,
    PART: PartMessage,
    TAKE: TakeRequest,
    JOIN: JoinRunRequest,
    COMMITS: CommitsRequest,
    MEET: MeetRequest,
    FORK: ForkRequest,
}


@dataclass(frozen=True)
class _Finished:
    """A round that is over, as it is kept for those who are behind."""

    commit: Commit
    held: dict[tuple[int, bytes], HeldPart]


class SwarmRun:
    """A member of a run, from `async with` until the end of the block, or until it has left in order."""

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
        choice: random.Random | None = None,
    ) -> None:
        self.run = run
        self.choice = choice or random.SystemRandom()
        self.state = CommittedState(parameters, optimizer or CommittedSGD(), b"")
        self.settings = settings or SwarmSettings()
        self.members: tuple[SwarmMember, ...] = ()
        self.round: SwarmRound | None = None
        self.history: deque[tuple[bytes, int, bytes]] = deque(maxlen=MAX_HISTORY)
        """Fork, round and the state's name after it, of the latest commits that this member has applied."""
        self.num_commits = 0
        self.num_failed = 0
        """Rounds that had a plan and came to nothing, as far as this member was there."""
        self.num_sent_bytes = 0
        """Bytes of parts and averages that went to other members."""
        self.blamed: dict[Peer, str] = {}
        """Donors that sent wrong bytes while this member joined."""
        self.has_left = False
        self._transport = transport
        self._address = address
        self._id_bytes = (transport.peer_id or _id_of(address)).digest  # type: ignore[attr-defined]
        self._contacts = list(contacts)
        self._find = find
        self.may_found = may_found
        """Whether it begins the run where it finds nobody."""
        self._tenure = 0
        self._was_listed = False
        self._told: dict[SwarmMember, None] = {}
        """Who knows that this member has left."""
        self._finished: dict[int, _Finished] = {}
        self._donor = StateDonor(transport)
        self._pinned: tuple[int, str] | None = None
        self._join_asked_s = 0.0
        """When somebody last asked for what those who join need."""
        self._taker: tuple[str, StateTaker] | None = None
        self._changed = Broadcast()
        # the parts of the rounds that are kept, and what comes next: no more than one vector lies idle
        self._vectors = BufferPool(2 * _FLOAT_BYTES * self.state.num_elements)
        codec = codec or Plain()
        self.context = MemberContext(
            me=self._new_member(),
            settings=self.settings,
            ledger=SampleLedger(self.state.num_elements, codec),
            codec=codec,
            call=self._call,
            vector=self._new_vector,
            random=self.choice,
        )
        self._forks = ForkKeeper(run, self.context, self.state, self._call_peer)
        self._standing = StandingScope(f"run {run}")
        serve: dict[str, Any] = {
            FOLLOW: self._serve_follow,
            PART: self._serve_part,
            TAKE: self._serve_take,
            JOIN: self._serve_join,
            COMMITS: self._serve_commits,
            MEET: self._serve_meet,
            FORK: self._serve_fork,
        }
        self._serve = serve
        for method, handler in serve.items():
            transport.handle(method, self._answering(handler), payload_type=_REQUESTS[method])

    # --- for the user ---

    @property
    def ledger(self) -> SampleLedger:
        """What became of this member's samples."""
        return self.context.ledger

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
            if all(member in self._told for member in self.members):
                break
            await self._changed.wait(min(_JOIN_TICK_S, told_by.remaining_s))

    async def __aenter__(self) -> Self:
        scope = await self._standing.open()
        scope.start(self._drive(), name="rounds")
        scope.start_soon(self.context.watch_stalls(), name="watch stalls")
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
            self._donor.close()
            for method in self._serve:
                self._transport.routes.remove(method)

    # --- from round to round ---

    async def _drive(self) -> None:
        while not self.has_left:
            if not self.is_member:
                await self._join()
            previous = (self.state.fork, self.state.round, self.state.name)
            round_ = self.round = SwarmRound(self.context, self.members, previous, self._tenure)
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
                    if await self._forks.propose(round_):
                        break
                if commit is not None and not await self._hold(commit, round_.held, round_.members):
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
        asked = list(dict.fromkeys([*members, *commit.members]))
        fetching = fetch_parts(self._call, self.context.me, asked, commit, held)
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
            self._finished.clear()
            self.state.branch(begun[0])
            self.members, self._tenure = begun[1], 1
        else:
            self._become_another()

    def _become_another(self) -> None:
        """Is another member from now on: the old one never votes again."""
        self.context.me = self._new_member()
        self._contacts = [member.peer for member in self.members] or self._contacts
        self.members = ()

    def _apply(self, commit: Commit, held: dict[tuple[int, bytes], HeldPart], place: int) -> None:
        average = assemble(commit.plan, commit.parts, held) if commit.kind == STEP and commit.plan else None
        self.state.apply(commit, average)
        self.ledger.settle(commit, place)
        self.history.append((self.state.fork, commit.round, self.state.name))
        self.num_commits += 1
        self._was_listed = self._was_listed or place >= 0
        self._finished[commit.round] = _Finished(commit, held)
        self.members, self._tenure = commit.members, commit.tenure
        if commit.should_pin:
            self._pin()
        self._forget()
        context = self.context
        context.is_ready = context.is_asked = False
        if commit.kind != STEP and self.round is not None and self.round.plan is not None:
            self.num_failed += 1
        listed = commit.members
        context.presence = {member: one for member, one in context.presence.items() if member in listed}
        context.joiners = {member: one for member, one in context.joiners.items() if member not in listed}
        if commit.kind == END:
            context.end = None
            self._contacts = [member.peer for member in commit.winner_members]
            self.members = commit.winner_members
            self._become_another()
        elif context.me not in commit.members and place >= 0:
            self.has_left = context.is_leaving
            if not self.has_left:
                self._become_another()
        self._changed.fire()

    def _pin(self) -> None:
        """Keeps the state as it is now for those who join."""
        if self._pinned is not None:
            self._donor.drop(self._pinned[1])
        self._pinned = (self.state.round, "")
        self._join_asked_s = asyncio.get_running_loop().time()
        self.context.wants_pin = False
        hashing = self._hold_pinned(self.state.round, self.state.snapshot())
        self._standing.scope.start_soon(hashing, name="hash the pinned state")

    async def _hold_pinned(self, number: int, snapshot: Any) -> None:
        """Hashes a state beside the loop, and gives it to those who ask from then on."""

        def hash_it() -> HeldState:
            return HeldState(snapshot)

        is_virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        held = hash_it() if is_virtual else await asyncio.to_thread(hash_it)
        if self._pinned == (number, ""):
            self._donor.hold(held)
            self._pinned = (number, held.name)

    def _forget(self) -> None:
        """Drops rounds that nobody can need any more, and a pinned state that is too old."""
        number = self.state.round
        if self._pinned is not None and (
            number - self._pinned[0] > NUM_SINCE_PIN or not self._is_joining(self._pinned[1])
        ):
            self._donor.drop(self._pinned[1])
            self._pinned = None
        first = number - NUM_KEPT
        if self._pinned is not None:
            first = min(first, self._pinned[0])
        self._finished = {key: one for key, one in self._finished.items() if key >= first}

    def _is_joining(self, pinned: str) -> bool:
        """Whether somebody has lately asked for what those who join need."""
        asked_s = max(self._join_asked_s, self._donor.asked_s.get(pinned, 0.0))
        limit_s = PIN_S * self.settings.patience * crowd_factor(len(self.members))
        return asyncio.get_running_loop().time() - asked_s < limit_s

    def _wake(self) -> None:
        if self.round is not None:
            self.round.wake()

    def _new_vector(self) -> Any:
        view = self._vectors.allocate(_FLOAT_BYTES * self.state.num_elements)
        return np.frombuffer(view, np.float32)

    def _new_member(self) -> SwarmMember:
        number = self.choice.getrandbits(62)
        return SwarmMember(self._id_bytes, number, self._address.host, self._address.port)

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
            with contextlib.suppress(ShoalError):
                await self._come_closer(found)
            if not self.is_member:
                await self._changed.wait(_JOIN_TICK_S * crowd_factor(len(found.members)))
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
            self._finished.clear()
            self.members, self._tenure = (me,), 1
            return
        self.state = CommittedState(
            self.state.parameters, self.state.optimizer, hashlib.sha256(fact).digest()
        )
        self._forks = ForkKeeper(self.run, self.context, self.state, self._call_peer)
        self.members, self._tenure = (me,), 1

    async def _look_around(self) -> JoinReply | None:
        """Asks three peers where the run is, and believes the one that is furthest; None where nobody
        answers.
        """
        peers = list(self._contacts)
        if self._find is not None:
            peers += await self._find()
        peers = [peer for peer in dict.fromkeys(peers) if peer.address != self._address]
        calls = [self._call_peer(peer, JOIN, JoinRunRequest(self.run), _ASK_S) for peer in peers]
        answers = await fanout(
            calls, Deadline.after(2 * _ASK_S), is_enough=lambda done: len(_replies(done)) >= 3
        )
        replies = [reply for reply in _replies(answers) if reply.run == self.run]
        return max(replies, key=_how_far, default=None)

    async def _come_closer(self, found: JoinReply) -> None:
        """Takes the run's state where it must, applies the commits since, and asks to be listed."""
        state = self.state
        asked = [member for member in found.members if member.is_reachable]
        is_near = state.fork == found.fork and found.round - state.round <= NUM_KEPT
        if not is_near and not (state.fork == found.fork and 0 <= found.pinned_round <= state.round):
            if found.pinned_round < 0:
                await self._tell(asked, JoinRunRequest(self.run, self.context.me, found.fork, -1))
                return
            donors = asked
            if len(asked) > MAX_DONORS:  # not all joiners from the same ones, nor from the coordinator
                donors = self.choice.sample(asked[1:], min(MAX_ASKED, len(asked) - 1))
            await self._take_state(found, [member.peer for member in donors])
        for commit in await self._commits_since(asked):
            held: dict[tuple[int, bytes], HeldPart] = {}
            if commit.kind == END or not await self._hold(commit, held, asked):
                return
            self._apply(commit, held, -1)
            if self.is_member:
                return
        await self._tell(asked, JoinRunRequest(self.run, self.context.me, state.fork, state.round))

    async def _take_state(self, found: JoinReply, peers: Sequence[Peer]) -> None:
        """Takes the pinned state from up to eight that hold it, leaf by leaf, and holds it for others."""
        calls = [self._call_peer(peer, JOIN, JoinRunRequest(self.run), _ASK_S) for peer in peers[:MAX_ASKED]]
        answers = await fanout(calls, Deadline.after(2 * _ASK_S))
        names = [
            reply.pinned_state
            for reply in _replies(answers)
            if reply.fork == found.fork and reply.pinned_state
        ]
        # what most of them hold: one that lies about the state's name is in the minority
        name = max(dict.fromkeys(names), key=names.count, default=found.pinned_state)
        pairs = zip(peers, answers, strict=False)
        donors = [peer for peer, answer in pairs if _pinned_state(answer) == name]
        taker = self._taker
        if taker is None or taker[0] != name:  # what has come stays, whoever gave it
            taker = self._taker = (name, StateTaker(self._transport, name))
        try:
            taken = await taker[1].take(donors[:MAX_DONORS], Deadline.after(_TRANSFER_S))
        finally:
            self.blamed.update(taker[1].blamed)
        self._taker = None
        self.state.restore(taken)
        self._finished.clear()
        self._pin()

    async def _commits_since(self, members: Sequence[SwarmMember]) -> list[Commit]:
        """Fetches the commits that this member has not applied, from the first that answers."""
        request = CommitsRequest(self.state.fork, self.state.round)
        for member in members:
            with contextlib.suppress(ShoalError):
                found: list[Commit] = await self._call_peer(member.peer, COMMITS, request, _ASK_S)
                return found
        return []

    async def _tell(self, members: Sequence[SwarmMember], request: JoinRunRequest) -> None:
        """Tells the first members in the order, the coordinator among them."""
        calls = [self._call_peer(member.peer, JOIN, request, _ASK_S) for member in members[:3]]
        await fanout(calls, Deadline.after(_ASK_S))

    async def _meet(self) -> None:
        """Looks for other forks of the run while this member coordinates."""
        assert self._find is not None
        while True:
            await asyncio.sleep(MEET_S)
            if self.is_member and self.members[0] == self.context.me:
                with contextlib.suppress(ShoalError):
                    await self._forks.meet(await self._find(), self.members)
                self._wake()

    # --- calls ---

    async def _call(
        self,
        member: SwarmMember,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        wait_s: float,
        into: Into = None,
    ) -> Reply:
        """Calls a member; this one itself without a network."""
        if member == self.context.me:
            answer = await self._serve[method](payload, [memoryview(buffer) for buffer in buffers])
            return answer if isinstance(answer, Reply) else Reply(answer)
        if method == PART:
            self.num_sent_bytes += _num_bytes(buffers)
        reply = await self._transport.call(
            member.peer, method, payload, buffers, deadline=Deadline.after(max(wait_s, 0.01)), into=into
        )
        kind = _REPLIES.get(method)
        return reply if kind is None else Reply(_read(reply.payload, kind), reply.buffers)

    async def _call_peer(self, peer: Peer, method: str, payload: Any, wait_s: float) -> Any:
        reply = await self._transport.call(peer, method, payload, deadline=Deadline.after(wait_s))
        return _read(reply.payload, _REPLIES[method])

    # --- answers ---

    def _answering(self, handler: Callable[[Any, Sequence[memoryview]], Awaitable[Any]]) -> Any:
        async def serve(head: Head, buffers: Sequence[memoryview]) -> Reply:
            self._check_sender(head)
            answer = await handler(head.payload, buffers)
            if not isinstance(answer, Reply):
                return Reply(answer)
            self.num_sent_bytes += _num_bytes(answer.buffers)
            return answer

        return serve

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
        if (status.decision or status.decided or status.finished) and self.has_left:
            self._told[request.member] = None
            self._changed.fire()
        return status

    async def _status_of(self, request: FollowRequest) -> RoundStatus:
        is_ours = request.fork == self.state.fork
        if is_ours and request.round < self.state.round:
            finished = self._finished.get(request.round)
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

    async def _serve_part(self, message: PartMessage, buffers: Sequence[memoryview]) -> None:
        (await self._reduction_of(message.fork, message.round)).receive(message, buffers)

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
        finished = self._finished.get(request.round) if request.fork == self.state.fork else None
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
        if request.member is not None and request.fork == self.state.fork:
            if request.round >= 0:
                now_s = self.context.now_s()
                self.context.joiners[request.member] = (now_s, request.round)
            elif self._pinned is None:
                self.context.wants_pin = True
            self._wake()
        if request.member not in self.members:
            self._join_asked_s = asyncio.get_running_loop().time()
        number, name = self._pinned if self._pinned and self._pinned[1] else (-1, "")
        return JoinReply(
            self.run, self.state.fork, self.state.round, self.members, self.state.num_samples, number, name
        )

    async def _serve_commits(self, request: CommitsRequest, buffers: Sequence[memoryview]) -> list[Commit]:
        if request.fork != self.state.fork:
            raise PeerRefused("This member is in another fork.")
        numbers = range(request.round, self.state.round)
        if any(number not in self._finished for number in numbers):
            raise PeerRefused("This member does not keep commits that old.")
        return [self._finished[number].commit for number in numbers]

    async def _serve_fork(self, request: ForkRequest, buffers: Sequence[memoryview]) -> bool:
        if self.round is None or not self.is_member:
            return False
        return self._forks.serve_fork(request, self.round, self.context.now_s())

    async def _serve_meet(self, request: MeetRequest, buffers: Sequence[memoryview]) -> MeetReply:
        if not self.is_member:
            raise PeerRefused("This peer is no member of a run.")
        return self._forks.serve_meet(request, self.members, self.context.now_s())


def _read(payload: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise PeerRefused(f"A member answered with something else: {error}") from None


def _num_bytes(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _pinned_state(answer: Any) -> str:
    return answer.pinned_state if isinstance(answer, JoinReply) else ""


def _how_far(reply: JoinReply) -> tuple[int, bytes, int, int]:
    return reply.samples, reply.fork, reply.pinned_round, reply.round


def _replies(answers: Sequence[Any]) -> list[JoinReply]:
    return [answer for answer in answers if isinstance(answer, JoinReply)]


def _id_of(address: Address) -> Any:
    from shoal.core import PeerId

    return PeerId.of_public_key(hashlib.sha256(str(address).encode()).digest())
