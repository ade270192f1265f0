"""A transport that sends and is sent no more in a second than it was told to."""

from __future__ import annotations

import asyncio
import inspect
import math
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from shoal.core import Address, Deadline
from shoal.core.rates import RateLimiter
from shoal.transport.messages import (
    Allocate,
    Buffers,
    Channel,
    Head,
    Into,
    Reply,
    Serve,
    Target,
    Transport,
    checked_reply,
)

HEAD_BYTES = 256
"""What a message is taken to have beside its buffers."""
_SMALL_BYTES = 4096
_BURST_S = 0.1
_LEAST_BURST_BYTES = 16 << 10


class Throttle:
    """Bytes in one direction: who has asked first goes first, and small messages wait for nobody."""

    def __init__(self, bytes_per_s: float) -> None:
        self._is_limited = math.isfinite(bytes_per_s)
        self._limiter = RateLimiter(bytes_per_s, max(_LEAST_BURST_BYTES, _BURST_S * bytes_per_s))
        self._turn = asyncio.Lock()

    async def pass_on(self, num_bytes: int, deadline: Deadline) -> None:
        """Waits until so many bytes may go, or the deadline has come."""
        if not self._is_limited:
            return
        clock = asyncio.get_running_loop().time
        if num_bytes < _SMALL_BYTES:
            self._limiter.take_anyway(None, num_bytes + HEAD_BYTES, clock())
            return
        async with self._turn:
            while pause_s := self._limiter.take(None, num_bytes + HEAD_BYTES, clock()):
                left_s = deadline.remaining_s
                if left_s <= 0:
                    return  # the call itself says that it is too late
                await asyncio.sleep(min(max(pause_s, 1e-4), left_s))


class ThrottledTransport(Transport):
    """Another transport's calls at a limited rate: what is sent waits before, what has come waits after it.

    Who sends is answered later where too much has come, and so sends less: on average over what senders have
    under way at once. Opening, listening and closing are the other transport's own.
    """

    def __init__(self, transport: Transport, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        self.routes = transport.routes
        self._transport = transport
        self._up = Throttle(up_bytes_per_s)
        self._down = Throttle(down_bytes_per_s)

    async def listen(self, address: Address) -> Address:
        """Has the other transport listen."""
        return await self._transport.listen(address)

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answers calls of this method, at the limited rate."""

        async def serve_later(head: Head, buffers: Any) -> Reply:
            await self._down.pass_on(head.total_bytes, head.deadline)
            answer = serve(head, buffers)
            reply = checked_reply(await answer if inspect.isawaitable(answer) else answer)
            await self._up.pass_on(_num_bytes(reply.buffers), head.deadline)
            return reply

        self._transport.handle(method, serve_later, allocate=allocate, payload_type=payload_type)

    async def call(
        self,
        peer: Target,
        method: str,
        payload: Any = None,
        buffers: Buffers = (),
        *,
        deadline: Deadline,
        into: Into = None,
    ) -> Reply:
        """Asks, once what is to be sent may go, and answers once what has come may."""
        await self._up.pass_on(_num_bytes(buffers), deadline)
        reply = await self._transport.call(peer, method, payload, buffers, deadline=deadline, into=into)
        await self._down.pass_on(_num_bytes(reply.buffers), deadline)
        return reply

    async def notify(
        self, peer: Target, method: str, payload: Any = None, buffers: Buffers = (), *, deadline: Deadline
    ) -> None:
        """Tells, once what is to be sent may go."""
        await self._up.pass_on(_num_bytes(buffers), deadline)
        await self._transport.notify(peer, method, payload, buffers, deadline=deadline)

    def open_channel(
        self, peer: Target, method: str, payload: Any = None, *, deadline: Deadline
    ) -> AbstractAsyncContextManager[Channel]:
        """Opens a channel, whose items are not counted."""
        return self._transport.open_channel(peer, method, payload, deadline=deadline)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


def _num_bytes(buffers: Buffers) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
