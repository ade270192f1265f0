"""How a member calls others and answers them: typed, limited to what one peer may ask, counted and measured.

Every method of the protocol stands here with its request and its reply. What a peer sends is read as that and
as nothing else, whoever is wrong is refused, and a handler sees only messages in their sender's own name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.core import Deadline, Peer, PeerBusy, PeerRefused, ProtocolError
from shoal.core.rates import RateLimiter
from shoal.swarm.membership import LineMeter
from shoal.swarm.wire import (
    AUDIT,
    COMMITS,
    FOLLOW,
    FORK,
    JOIN,
    MEET,
    PART,
    TAKE,
    AuditMessage,
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
from shoal.transport import Head, Reply, Transport
from shoal.transport.limits import Complaints
from shoal.transport.messages import Into

log = logging.getLogger(__name__)

MAX_REQUESTS_A_S = 100
"""Messages of one peer, but for parts and averages; four seconds' worth at once."""
_SHORTEST_WAIT_S = 0.01

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
    AUDIT: AuditMessage,
}

Handler = Callable[[Any, Sequence[memoryview]], Awaitable[Any]]
"""Answers a message and its buffers, with a payload or a whole `Reply`."""


class MemberCalls:
    """One member's calls and answers.

    `is_me` tells this member itself, which is called without a network; `check_sender` raises PeerRefused for
    a message in another's name.
    """

    def __init__(
        self,
        transport: Transport,
        handlers: Mapping[str, Handler],
        is_me: Callable[[SwarmMember], bool],
        check_sender: Callable[[Head], None],
    ) -> None:
        self.num_sent_bytes = 0
        """Bytes of parts and averages that went to other members."""
        self.upload = LineMeter()
        self.download = LineMeter()
        self.handlers = handlers
        self._transport = transport
        self._is_me = is_me
        self._check_sender = check_sender
        self._requests = RateLimiter(MAX_REQUESTS_A_S, burst=4 * MAX_REQUESTS_A_S)
        self._complaints = Complaints(log)
        for method, handler in handlers.items():
            transport.handle(method, self._answering(handler), payload_type=_REQUESTS[method])

    def close(self) -> None:
        """Answers nobody any more."""
        for method in self.handlers:
            self._transport.routes.remove(method)

    async def call(
        self,
        member: SwarmMember,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        wait_s: float,
        into: Into = None,
    ) -> Reply:
        """Calls a member; this one itself without a network."""
        if self._is_me(member):
            answer = await self.handlers[method](payload, [memoryview(buffer) for buffer in buffers])
            return answer if isinstance(answer, Reply) else Reply(answer)
        loop, num_bytes = asyncio.get_running_loop(), _num_bytes(buffers)
        self.num_sent_bytes += num_bytes
        limit = Deadline.after(max(wait_s, _SHORTEST_WAIT_S))
        taking = -1

        def where(head: Head) -> Any:
            nonlocal taking
            assert callable(into)
            found = into(head)
            if sum(head.sizes):
                taking = self.download.begin(loop.time())  # not before: an answer may be long in coming
            return found

        sending = self.upload.begin(loop.time()) if buffers else -1
        num_sent = num_taken = 0
        try:
            reply = await self._transport.call(
                member.peer,
                method,
                payload,
                buffers,
                deadline=limit,
                into=where if callable(into) else into,
            )
            num_sent, num_taken = num_bytes, _num_bytes(reply.buffers)
        finally:
            if sending >= 0:
                self.upload.end(sending, loop.time(), num_sent)
            if taking >= 0:
                self.download.end(taking, loop.time(), num_taken)
        kind = _REPLIES.get(method)
        return reply if kind is None else Reply(_read(reply.payload, kind), reply.buffers)

    async def call_peer(self, peer: Peer, method: str, payload: Any, wait_s: float) -> Any:
        """Calls a peer, whether or not it is a member, and gives its payload."""
        return await ask(self._transport, peer, method, payload, wait_s)

    def _answering(self, handler: Handler) -> Any:
        async def serve(head: Head, buffers: Sequence[memoryview]) -> Reply:
            self._check_sender(head)
            self._check_rate(head)
            if head.method == PART:
                self.download.note(_num_bytes(buffers))
            try:
                answer = await handler(head.payload, buffers)
            except ProtocolError as error:
                raise PeerRefused(error.what) from None
            if not isinstance(answer, Reply):
                return Reply(answer)
            num_bytes = _num_bytes(answer.buffers)
            if not num_bytes:
                return answer
            self.num_sent_bytes += num_bytes
            loop = asyncio.get_running_loop()
            sending = self.upload.begin(loop.time())

            def end() -> None:
                self.upload.end(sending, loop.time(), num_bytes)

            return Reply(answer.payload, answer.buffers, end)

        return serve

    def _check_rate(self, head: Head) -> None:
        """PeerBusy where a peer asks too often; how many parts there are the plan says."""
        who = head.peer.id or head.peer.address
        if head.method in (PART, TAKE) or self._requests.allows(asyncio.get_running_loop().time(), who):
            return
        self._complaints.add(f"too many messages {head.method}", head.peer, f"{MAX_REQUESTS_A_S} a second")
        raise PeerBusy(f"This peer asks {head.method} too often.")


async def ask(transport: Transport, peer: Peer, method: str, payload: Any, wait_s: float) -> Any:
    """Asks a peer by a method of the protocol, and reads the payload of its answer; for who is no member."""
    reply = await transport.call(peer, method, payload, deadline=Deadline.after(wait_s))
    return _read(reply.payload, _REPLIES[method])


def _read(payload: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise PeerRefused(f"A member answered with something else: {error}") from None


def _num_bytes(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
