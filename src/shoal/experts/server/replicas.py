"""Several peers serve one expert: they find each other in the DHT, and every while two of them average.

Each peer looks up who else serves its experts and meets one of them after another, in a ring of peer ids. An
expert has one meeting at a time; whoever asks meanwhile is told 'busy', and is met another time.

Only peers that the expert's own record in the DHT named when this peer last looked may average with it. In a
swarm with a secret they are known by ids that are proven. Without one, which is on this machine alone unless
that was asked for, an id is a peer's own word, and one that gives none may average too. Any peer of the swarm
may read a state.

An expert that was never trained when it was first seen is a newcomer: it copies an older replica instead of
averaging with it. Where all are newcomers, the one with the lowest id is the one to be copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core import (
    AdaptiveDeadline,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    TensorError,
    UsageError,
    fanout,
)
from shoal.experts.server.averaging import StateHead, answer_average, answer_state, average, copy_state
from shoal.experts.server.publishing import is_in_grid, who_serves
from shoal.transport import Channel, Head, Reply

if TYPE_CHECKING:
    from shoal.dht.node import DHT
    from shoal.experts.expert import Expert
    from shoal.experts.server.server import ExpertServer

log = logging.getLogger(__name__)


AVERAGE = "expert.average"
STATE = "expert.state"
_AT_ONCE = 4  # experts that meet their replicas at the same time
_NEWCOMER_S = 2.0
_LATER = (PeerBusy, PeerUnreachable, PeerLost, DeadlineExceeded)
"""What is nobody's fault, and not worth a word: the peer is met another time, or its record expires."""

Call = Callable[["Expert", Peer, Deadline], Awaitable[bool]]


class ReplicaRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks to average an expert, or for its state."""

    uid: str


class Replicas:
    """Keeps a server's experts together with those that other peers serve under the same uid."""

    def __init__(self, server: ExpertServer, dht: DHT, every_s: float) -> None:
        if not every_s > 0:
            raise UsageError(f"Replicas cannot average every {every_s} s.", next_step="give a time above 0.")
        self._server = server
        self._dht = dht
        self._every_s = every_s
        self._random = dht.endpoint.network.random
        self._times = AdaptiveDeadline(initial_s=60.0, floor_s=5.0)
        self._peers: dict[str, dict[PeerId, list[Peer]]] = {}  # who serves an expert, this peer included
        self._newcomers: dict[str, bool] = {}
        self._met: dict[str, object] = {}  # experts that are in a meeting now
        self._turns: dict[str, int] = {}
        self.num_averaged = 0
        """Meetings that this peer began and that came to their end."""
        self.num_copied = 0
        """Experts that have become copies of others."""

    async def run(self) -> None:
        """Answer other replicas, and meet them every so many seconds, until cancelled."""
        routes = self._dht.endpoint.routes
        with contextlib.ExitStack() as closing:
            for method, serve in ((AVERAGE, self._rpc_average), (STATE, self._rpc_state)):
                routes.add_channel(method, serve, ReplicaRequest)
                closing.callback(routes.remove, method)
            while True:
                await self.sync()
                wait_s = self._every_s
                if any(self._newcomers.values()):
                    wait_s = min(wait_s, _NEWCOMER_S)
                await asyncio.sleep(wait_s * self._random.uniform(0.75, 1.25))

    async def sync(self, uids: Sequence[str] | None = None) -> int:
        """Meet one other replica of each expert (of these) now; how many were averaged or copied.

        For an expert that is added, before it is declared: it then is a copy before it is found here.
        """
        wanted = [uid for uid in (self._server.experts if uids is None else uids) if is_in_grid(uid)]
        try:
            await self._look_up(wanted)
        except ShoalError as error:
            log.warning("Who else serves the experts here could not be found out: %s", error)
            return 0
        experts = [self._server.experts[uid] for uid in wanted if uid in self._server.experts]
        meetings = [self._meet(expert) for expert in experts]
        outcomes = await fanout(meetings, Deadline.never(), limit=_AT_ONCE)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                log.error("Replicas could not meet", exc_info=outcome)
        return sum(outcome is True for outcome in outcomes)

    def is_newcomer(self, expert: Expert) -> bool:
        """Whether an expert is to become a copy of another replica before it averages with any."""
        return self._newcomers.setdefault(expert.uid, expert.num_updates == 0)

    # --- asking ---

    async def _look_up(self, uids: Sequence[str]) -> None:
        found = await who_serves(self._dht, uids)
        for uid, address in zip(uids, found, strict=True):
            peers: dict[PeerId, list[Peer]] = {}
            for peer in address.peers if address is not None else ():
                if peer.id is not None:
                    peers.setdefault(peer.id, []).append(peer)
            self._peers[uid] = peers
        for table in (self._peers, self._newcomers, self._turns):
            for uid in [uid for uid in table if uid not in self._server.experts]:
                del table[uid]

    async def _meet(self, expert: Expert) -> bool:
        uid = expert.uid
        if self._server.is_leaving:
            return False
        others = [peer_id for peer_id in sorted(self._peers[uid]) if peer_id != self._dht.peer_id]
        if self.is_newcomer(expert):
            return await self._catch_up(expert, others)
        turn = self._turns.get(uid, 0)
        first = sum(peer_id < self._dht.peer_id for peer_id in others) + turn
        for step in range(len(others)):
            other = others[(first + step) % len(others)]
            self._turns[uid] = turn + step + 1
            try:
                await self._at(expert, other, self._call_average)
            except ShoalError as error:
                _tell(error, uid, other)
                if type(error) is PeerBusy:
                    return False
            else:
                self.num_averaged += 1
                return True
        return False

    async def _catch_up(self, expert: Expert, others: Sequence[PeerId]) -> bool:
        """Copy an older replica; where it is certain that there is none, this one is a newcomer no more."""
        uid = expert.uid
        is_oldest = True
        for other in others:
            try:
                if await self._at(expert, other, self._call_state):
                    self._newcomers[uid] = False
                    self.num_copied += 1
                    return True
                is_oldest &= self._dht.peer_id < other
            except ShoalError as error:
                _tell(error, uid, other)
                is_oldest = False  # who does not answer may be older; when it is gone, its record expires
        self._newcomers[uid] = not is_oldest
        return False

    async def _at(self, expert: Expert, other: PeerId, call: Call) -> bool:
        """Call a peer at the first of its addresses that answers."""
        *first, last = self._peers[expert.uid][other]
        for peer in first:
            with contextlib.suppress(PeerUnreachable):
                return await self._timed(expert, peer, call)
        return await self._timed(expert, last, call)

    async def _timed(self, expert: Expert, peer: Peer, call: Call) -> bool:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            with self._meeting(expert.uid):
                result = await call(expert, peer, self._times.next())
        except DeadlineExceeded:
            self._times.missed()
            raise
        self._times.observe(loop.time() - began_s)
        return result

    async def _call_average(self, expert: Expert, peer: Peer, deadline: Deadline) -> bool:
        request = ReplicaRequest(expert.uid)
        streams = self._dht.endpoint.streams
        async with streams.open_channel(peer, AVERAGE, request, deadline=deadline) as channel:
            await average(expert, peer, channel, self._server.on_device)
        return True

    async def _call_state(self, expert: Expert, peer: Peer, deadline: Deadline) -> bool:
        request = ReplicaRequest(expert.uid)
        streams = self._dht.endpoint.streams
        async with streams.open_channel(peer, STATE, request, deadline=deadline) as channel:
            warnings = await copy_state(expert, peer, channel, self._server.on_device)
        if warnings is None:
            return False
        log.info("%s is a copy of the one at %s now. %s", expert.uid, peer, " ".join(warnings))
        return True

    # --- answering, on any of the endpoint's loops ---

    async def _rpc_average(self, head: Head, channel: Channel) -> Reply:
        expert = self._expert(head)
        uid, caller = expert.uid, head.peer
        is_anybody = caller.id is None and self._dht.endpoint.membership is None  # as good as any claim
        if not (is_anybody or caller.id in self._peers.get(uid, ())):
            raise PeerBusy(
                f"{caller} is not known here as one that serves {uid}.",
                cause="it has declared the expert just now, or not at all.",
                next_step="declare it, and try again later.",
            )
        if self.is_newcomer(expert):
            raise PeerBusy("this replica is new and copies another one first.", next_step="try again later.")
        with self._meeting(uid):
            try:
                await answer_average(expert, channel, self._server.on_device)
            except TensorError as error:
                log.warning("%s is not averaged with what %s has sent: %s", uid, caller, error)
                raise
        return Reply()

    async def _rpc_state(self, head: Head, channel: Channel) -> Reply:
        expert = self._expert(head)
        if self.is_newcomer(expert):
            await channel.send(StateHead(is_newcomer=True))
        else:
            with self._meeting(expert.uid):
                await answer_state(expert, channel, self._server.on_device)
        await channel.end()
        return Reply()

    def _expert(self, head: Head) -> Expert:
        if self._server.is_leaving:
            raise PeerLeaving("this server is leaving.", next_step="ask another replica.")
        uid = head.payload.uid
        expert = self._server.experts.get(uid)
        if expert is None:
            raise PeerRefused(f"the expert {uid[:100]!r} is not served here.")
        return expert

    @contextlib.contextmanager
    def _meeting(self, uid: str) -> Iterator[None]:
        mine = object()
        if self._met.setdefault(uid, mine) is not mine:  # one step: handlers run on several threads
            raise PeerBusy(f"{uid} is meeting another replica.", next_step="try again later.")
        try:
            yield
        finally:
            del self._met[uid]


def _tell(error: ShoalError, uid: str, other: PeerId) -> None:
    level = logging.DEBUG if isinstance(error, _LATER) else logging.WARNING
    log.log(level, "%s did not meet its replica at %s: %s", uid, other.short, error)
