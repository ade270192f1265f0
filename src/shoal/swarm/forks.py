"""Going on without a quorum under another name, and forks that meet again.

Members that are without a quorum for long ask all others of their list who is in the same case. The first in
the order among those that answer proposes a fork: a new name and a list. It begins when all in the list have
agreed, and who has agreed votes no more under the old name. Two islands make two names, so there is never
more than one commit for a round of one name.

Forks that meet become one again: the one with fewer committed samples (by name where they are equal) asks the
other's coordinator, which agrees, and does not end its own fork meanwhile. The smaller one ends between two
rounds by a commit that names the winner, and its members join that one by transfer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec

from shoal.core import Deadline, Peer, ShoalError, fanout
from shoal.swarm.membership import CallPeer, MemberContext
from shoal.swarm.round import SwarmRound
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import FORK, MEET, ForkRequest, MeetReply, MeetRequest, SwarmMember

ASK, AGREE, BEGIN = "ask", "agree", "begin"
_ANSWER_S = 2.0
_AGREED_S = 60.0
"""For so long a fork that has let another one end does not end itself."""
_ALSO_SHARE = 0.5
"""Who has been without a quorum for this share of the time agrees that there is none."""


class ForkKeeper:
    """What one member has proposed, agreed to and heard of forks."""

    def __init__(self, run: str, context: MemberContext, state: CommittedState, call_peer: CallPeer) -> None:
        self.begun: tuple[bytes, tuple[SwarmMember, ...]] | None = None
        """The fork that has begun and that this member is to go on with."""
        self._run = run
        self._context = context
        self._state = state
        self._call_peer = call_peer
        self._agreed: bytes = b""
        self._agreed_end_s = -_AGREED_S

    # --- without a quorum ---

    async def propose(self, round_: SwarmRound) -> bool:
        """Tries once to go on as a fork; tells whether one has begun that this member is in."""
        if self.begun is not None:
            return True
        state, me = self._state, self._context.me
        others = [member for member in round_.members if member != me and member.is_callable]
        question = ForkRequest(ASK, state.fork, state.round, state.name)
        answers = await self._ask(others, question)
        if self.has_begun():
            return True
        island = [member for member in round_.members if member == me or member in answers]
        if island[0] != me or not me.votes:  # somebody before this member in the order will propose
            await asyncio.sleep(_ANSWER_S)
            return self.has_begun()
        fact = msgspec.msgpack.encode((state.fork, state.name, island, self._context.random.getrandbits(32)))
        new_fork = hashlib.sha256(fact).digest()
        round_.acceptor.close()
        request = ForkRequest(AGREE, state.fork, state.round, state.name, new_fork, tuple(island))
        if len(await self._ask(island[1:], request)) < len(island) - 1:
            await asyncio.sleep(_ANSWER_S)  # one that is about to go on in another fork says no at once
            return self.has_begun()
        self.begun = (new_fork, tuple(island))
        await self._ask(island[1:], msgspec.structs.replace(request, stage=BEGIN))
        return True

    def has_begun(self) -> bool:
        """Tells whether there is a fork that this member is to go on with."""
        return self.begun is not None

    async def _ask(self, members: Sequence[SwarmMember], request: ForkRequest) -> list[SwarmMember]:
        """Lists those who say yes."""
        calls = [self._call_peer(member.peer, FORK, request, _ANSWER_S) for member in members]
        answers = await fanout(calls, Deadline.after(2 * _ANSWER_S))
        return [member for member, answer in zip(members, answers, strict=True) if answer is True]

    def serve_fork(self, request: ForkRequest, round_: SwarmRound, now_s: float) -> bool:
        """Answers a member that is without a quorum."""
        state, settings = self._state, self._context.settings
        if (request.fork, request.round, request.state) != (state.fork, state.round, state.name):
            return False
        limit_s = settings.minority_after_s * settings.patience * _ALSO_SHARE
        is_without = round_.decision is None and now_s - round_.quorum_s > limit_s
        if request.stage == ASK:
            return is_without or round_.acceptor.is_closed
        if self._context.me not in request.members or self.begun is not None:
            return False
        if request.stage == AGREE:
            if not (is_without or round_.acceptor.is_closed):
                return False
            round_.acceptor.close()
            round_.wake()
            self._agreed = request.new_fork
            return True
        if request.new_fork == self._agreed:
            self.begun = (request.new_fork, request.members)
            round_.acceptor.close()
            round_.wake()
            return True
        return False

    # --- forks that meet ---

    async def meet(self, peers: Sequence[Peer], members: Sequence[SwarmMember]) -> None:
        """Asks peers of other forks, and has this one end where the other is larger and agrees."""
        known = [member.peer.address for member in members]
        for peer in peers:
            if peer.address in known or self._context.end is not None:
                continue
            try:
                reply = await self._ask_other(peer, members)
                if reply is not None and not reply.agrees and reply.members and reply.members[0].is_callable:
                    reply = await self._ask_other(reply.members[0].peer, members)
            except ShoalError:
                continue
            is_free = self._context.now_s() - self._agreed_end_s > _AGREED_S
            if reply is not None and reply.agrees and is_free:
                self._context.end = (reply.fork, reply.members)
                self._context.changed.fire()

    async def _ask_other(self, peer: Peer, members: Sequence[SwarmMember]) -> MeetReply | None:
        """Asks one peer; None where it is of this fork, or of a smaller one."""
        # a fork whose members nobody can call would stay apart for ever
        is_callable = any(member.is_callable for member in members)
        request = MeetRequest(self._run, self._state.fork, self._state.num_samples if is_callable else -1)
        reply: MeetReply = await self._call_peer(peer, MEET, request, _ANSWER_S)
        is_larger = (reply.samples, reply.fork) > (request.samples, request.fork)
        return reply if reply.fork != request.fork and is_larger else None

    def serve_meet(self, request: MeetRequest, members: tuple[SwarmMember, ...], now_s: float) -> MeetReply:
        """Answers a member of another fork; only the coordinator agrees."""
        mine, theirs = (self._state.num_samples, self._state.fork), (request.samples, request.fork)
        agrees = (
            request.run == self._run
            and request.fork != self._state.fork
            and mine > theirs
            and members[0] == self._context.me
            and self._context.end is None
        )
        if agrees:
            self._agreed_end_s = now_s
        return MeetReply(agrees, self._state.fork, self._state.num_samples, members)
