"""Taking the state of a run: who has it, which one to believe, and that it is kept as long as it is taken.

    who joins, or saves checkpoints                  members
    look_around: swarm.join to those it knows ────►  three answer: fork, round, list, who is listed for long
    ask_for_pin: no state is kept for joiners ────►  a commit has all members keep the state that it makes
    take: swarm.join to up to 32              ────►  the name of the state that each keeps
          leaves from up to eight of them     ────►  `shoal.tensors.transfer`
    tell: what is still needed, every second  ────►  it is kept, with the commits since

Nobody is believed alone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from shoal.core import Deadline, Peer, Scope, fanout
from shoal.swarm.calls import ask
from shoal.swarm.kept import NUM_KEPT
from shoal.swarm.membership import CallPeer, MemberContext
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import (
    COMMITS,
    JOIN,
    Commit,
    CommitsRequest,
    JoinReply,
    JoinRunRequest,
    SwarmMember,
)
from shoal.tensors.transfer import StateTaker
from shoal.transport import Transport

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_DONORS = 8
MAX_ASKED = 32
JOIN_BEAT_S = 1.0
"""How often those who keep something for a joiner hear of it."""
NUM_COMMITS_TRUSTED = 10
"""Members that are listed for so many commits say what the run's state is, where there are any."""
NUM_REPLIES, NUM_TELLERS = 3, 5
"""So many answers that are alike are enough; and so many are asked for commits at once."""
_ASK_S = 2.0
_SLOW_S = 10.0
"""A joiner that falls behind for so long says so."""
_TRANSFER_S = 600.0


class RunStateTaker:
    """Takes the state that a run's members keep for those who join; what has come stays when it fails."""

    def __init__(self, transport: Transport, run: str, choice: random.Random | None = None) -> None:
        self.blamed: dict[Peer, str] = {}
        """Donors that sent wrong bytes."""
        self.helpers: list[Peer] = []
        """Those who keep something: the first three members in the order, and the donors."""
        self._transport = transport
        self._run = run
        self._choice = choice or random.SystemRandom()
        self.trusted: dict[Peer, None] = {}
        """Members that are listed for long, as most of those say who were asked."""
        self._taker: tuple[str, StateTaker] | None = None

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._run

    @property
    def taking(self) -> str:
        """The name of the state that is being taken; empty for none."""
        return self._taker[0] if self._taker else ""

    @property
    def num_bytes(self) -> int:
        """How much of it has come."""
        return sum(self._taker[1].received_bytes.values()) if self._taker else 0

    async def look_around(self, peers: Sequence[Peer]) -> JoinReply | None:
        """Asks where the run is, and believes what most say; None where nobody answers.

        Three that say the same are enough, else all are waited for. Of forks that are named equally often,
        the one with more samples counts.
        """
        request = JoinRunRequest(self._run, state=self.taking)
        answers = await fanout(
            [self._ask(peer, request, _ASK_S) for peer in peers],
            Deadline.after(2 * _ASK_S),
            is_enough=lambda done: agree([(reply.fork, reply.members) for reply in _replies(done)]),
        )
        replies = [reply for reply in _replies(answers) if reply.run == self._run]
        if not replies:
            return None
        forks = [reply.fork for reply in replies]
        ranks = {reply.fork: (forks.count(reply.fork), reply.samples, reply.fork) for reply in replies}
        replies = [reply for reply in replies if reply.fork == max(ranks, key=lambda fork: ranks[fork])]
        self.trusted = dict.fromkeys(_named_by_most([_trusted(reply) for reply in replies]))
        # neither the one that says least nor, where there are three, the one that says most
        replies.sort(key=lambda reply: (reply.round, reply.samples))
        found = replies[len(replies) // 2]
        if len(replies) >= NUM_REPLIES:  # of two that differ nobody can say which is right
            known = dict.fromkeys(
                _named_by_most([[one.id_bytes for one in reply.members] for reply in replies])
            )
            members = tuple(member for member in found.members if member.id_bytes in known)
            found = msgspec.structs.replace(found, members=members)
        self.helpers = [member.peer for member in found.members if member.is_callable][:3]
        return found

    async def take(self, found: JoinReply) -> dict[str, Any] | None:
        """Takes the state from up to eight that keep it, leaf by leaf; None where nobody keeps one.

        PeerLost and DeadlineExceeded when it does not come; called again it goes on.
        """
        peers = [member.peer for member in found.members if member.is_callable]
        if len(peers) > MAX_DONORS:  # not all joiners from the same ones, nor from the coordinator
            peers = self._choice.sample(peers[1:], len(peers) - 1)
        peers.sort(key=lambda peer: peer not in self.trusted)
        request = JoinRunRequest(self._run, state=self.taking)
        calls = [self._ask(peer, request, _ASK_S) for peer in peers[:MAX_ASKED]]
        answers = await fanout(calls, Deadline.after(2 * _ASK_S))
        kept = {
            peer: reply.pinned_state
            for peer, reply in zip(peers, answers, strict=False)
            if isinstance(reply, JoinReply) and reply.fork == found.fork
        }
        # what most of them hold: one that lies about the state's name is in the minority
        trusted = [name for peer, name in kept.items() if peer in self.trusted]
        names = [name for name in trusted or kept.values() if name]
        if not names:
            self._taker = None
            return None
        name = max(dict.fromkeys(names), key=names.count)
        if self.taking in names:
            name = self.taking
        elif 2 * names.count(name) <= len(trusted):
            return None  # the others keep none yet, or are about to keep another one
        donors = [peer for peer in kept if kept[peer] == name][:MAX_DONORS]
        if self._taker is None or self._taker[0] != name:  # what has come stays, whoever gave it
            if self._taker is not None:
                log.warning("run %s: nobody keeps the state any more that was being taken", self._run)
            self._taker = (name, StateTaker(self._transport, name))
        self.helpers = list(dict.fromkeys([*self.helpers, *donors]))
        taker = self._taker[1]
        try:
            taken: dict[str, Any] = await taker.take(donors, Deadline.after(_TRANSFER_S))
        finally:
            self.blamed.update(taker.blamed)
        self._taker = None
        return taken

    async def tell(self, request: JoinRunRequest, wait_s: float = _ASK_S) -> list[JoinReply]:
        """Tells the helpers what is needed."""
        calls = [self._ask(peer, request, wait_s) for peer in self.helpers]
        return _replies(await fanout(calls, Deadline.after(wait_s)))

    async def _ask(self, peer: Peer, request: JoinRunRequest, wait_s: float) -> JoinReply:
        reply: JoinReply = await ask(self._transport, peer, JOIN, request, wait_s)
        return reply


class JoinHelpers:
    """Those who keep what a joiner needs: they hear how far it is, and give the commits that it lacks."""

    def __init__(
        self, taker: RunStateTaker, context: MemberContext, state: CommittedState, call_peer: CallPeer
    ) -> None:
        self.problem = ""
        """What keeps this peer from becoming a member, if anything does."""
        self.newest = -1
        """The latest round of the fork that they have told of."""
        self._taker = taker
        self._context = context
        self._state = state
        self._call_peer = call_peer

    async def commits_since(self, members: Sequence[SwarmMember]) -> list[Commit]:
        """Fetches the commits that are not applied here, as most of a few say that keep them."""
        request = CommitsRequest(self._state.fork, self._state.round)
        peers = list(dict.fromkeys([*self._taker.helpers, *(member.peer for member in members[:MAX_ASKED])]))
        while peers:
            some, peers = peers[:NUM_TELLERS], peers[NUM_TELLERS:]
            answers = await fanout(
                [self._call_peer(peer, COMMITS, request, _ASK_S) for peer in some],
                Deadline.after(2 * _ASK_S),
                is_enough=lambda done: agree([one for one in done if isinstance(one, list)]),
            )
            told = [answer for answer in answers if isinstance(answer, list)]
            if told:
                return agreed_commits(told)
        return []

    async def tell(self, request: JoinRunRequest, wait_s: float = _ASK_S) -> None:
        """Tells the first members in the order, the coordinator among them, and the donors."""
        for reply in await self._taker.tell(request, wait_s):
            if reply.fork == self._state.fork:
                self.newest = max(self.newest, reply.round)

    async def keep_told(self, found: JoinReply, scope: Scope) -> None:
        """Has them keep what this member still needs, and says when it falls behind; ends when cancelled."""
        loop, state = asyncio.get_running_loop(), self._state
        since: tuple[float, int, int] | None = None
        while True:
            await asyncio.sleep(JOIN_BEAT_S)
            taking = self._taker.taking
            if taking or state.fork != found.fork:
                since, number = None, -1
            else:
                self.newest = max(self.newest, state.round)
                since, number = since or (loop.time(), state.round, self.newest), state.round
            if taking or since:
                request = JoinRunRequest(self._taker.run, self._context.me, found.fork, number, taking)
                # while the line is full answers come late, and the requests must not
                scope.start_soon(self.tell(request, _SLOW_S), name="tell helpers")
            if since is None or loop.time() - since[0] < _SLOW_S:
                continue
            num_s, num_own, num_made = loop.time() - since[0], state.round - since[1], self.newest - since[2]
            if num_made > max(num_own, NUM_KEPT) and self.newest - state.round > NUM_KEPT:
                self.problem = (
                    f"The run has made {num_made} rounds in {num_s:.0f} s, and this peer could take only "
                    f"{num_own}: its line, or that of those who give, is too slow for them. Let rounds be "
                    "rarer (target_samples, local_steps) or smaller (codec)."
                )
                log.warning("%s", self.problem)
                since = None


async def take_committed(
    transport: Transport, run: str, peers: Sequence[Peer], me: SwarmMember, deadline: Deadline
) -> dict[str, Any]:
    """Takes a run's newest committed state, for who is no member and will be none; see `CommittedState`."""
    taker = RunStateTaker(transport, run)

    async def keep(fork: bytes) -> None:
        while True:
            await asyncio.sleep(JOIN_BEAT_S)
            if taker.taking:
                await taker.tell(JoinRunRequest(run, me, fork, -1, taker.taking), JOIN_BEAT_S)

    while True:
        deadline.check(f"taking the state of the run {run!r}")
        found = await taker.look_around(peers)
        if found is not None:
            async with Scope("take the state of a run") as scope:
                scope.start_soon(keep(found.fork), name="keep the state")
                taken = await taker.take(found)
                scope.cancel()
            if taken is not None:
                return taken
            await taker.tell(JoinRunRequest(run, me, found.fork, -1))
        await asyncio.sleep(JOIN_BEAT_S / 5)


def _replies(answers: Sequence[Any]) -> list[JoinReply]:
    return [answer for answer in answers if isinstance(answer, JoinReply)]


def agree(answers: Sequence[Any]) -> bool:
    """Whether three have answered, and all alike: then nobody else needs to be heard."""
    return len(answers) >= NUM_REPLIES and all(answer == answers[0] for answer in answers)


def agreed_commits(told: Sequence[Sequence[Commit]]) -> list[Commit]:
    """Gives the commits that more than half of those who were asked tell alike, as far as they go."""
    made: list[Commit] = []
    while True:
        following = [
            commits[len(made)]
            for commits in told
            if len(commits) > len(made) and commits[: len(made)] == made
        ]
        named = [commit.digest for commit in following]
        most = next((one for one in following if 2 * named.count(one.digest) > len(told)), None)
        if most is None:
            return made
        made.append(most)


def _named_by_most(lists: Sequence[Sequence[T]]) -> list[T]:
    """Lists what is in more than half of the lists."""
    named = [one for each in lists for one in dict.fromkeys(each)]
    return [one for one in dict.fromkeys(named) if 2 * named.count(one) > len(lists)]


def _trusted(reply: JoinReply) -> list[Peer]:
    return [reply.members[place].peer for place in reply.trusted if 0 <= place < len(reply.members)]
