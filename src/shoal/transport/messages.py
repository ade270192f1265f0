"""What a transport is to those who use it: calls, channels, handlers and replies.

A transport moves a MessagePack payload and raw buffers; what the buffers mean is the business of others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from shoal.core import Address, Deadline, Peer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Head(msgspec.Struct, frozen=True):
    """What is known of a message before its buffers arrive."""

    method: str
    payload: Any
    sizes: Sequence[int]
    """Bytes of each buffer that follows."""
    peer: Peer
    """Who sent it; the id is proven only where the transport authenticates."""
    deadline: Deadline
    """When the sender stops waiting, on this peer's clock."""

    @property
    def total_bytes(self) -> int:
        """All buffers together."""
        return sum(self.sizes)


class Reply(msgspec.Struct):
    """An answer, or an item of a channel: a payload and buffers."""

    payload: Any = None
    buffers: Sequence[Any] = ()
    on_sent: Callable[[], None] | None = None
    """Called once when the transport needs the buffers no more, sent or not: they may be used again."""


Allocate = Callable[[Head], "Sequence[Buffer]"]
"""Picks memory for a message's buffers: as many as `head.sizes`, each writable and of just that size."""

Serve = Callable[[Head, Sequence[memoryview]], Awaitable[Reply | None] | Reply | None]
"""Answers a call. A plain function runs on the loop's thread itself and must not block.

A plain function may return a future of that loop, which costs less than a coroutine; it is cancelled when the
call is.
"""

ServeChannel = Callable[[Head, "Channel"], Awaitable[Reply | None]]
"""Answers a channel; what it returns ends the channel."""


class Channel(Protocol):
    """A conversation inside one call: items both ways, each way in order, each with back-pressure."""

    async def send(self, payload: Any = None, buffers: Sequence[Buffer] = ()) -> None:
        """Send an item; returns when its buffers may be changed again."""

    async def end(self) -> None:
        """Say that no more items will be sent."""

    async def receive(self) -> Reply | None:
        """The next item, or None when the other side has ended."""

    def __aiter__(self) -> AsyncIterator[Reply]:
        """All items until the other side has ended."""

    async def result(self) -> Reply:
        """For the caller: wait for the reply that ends the channel."""


class Transport(Protocol):
    """How bytes move between peers. Errors are Shoal's own; every wait has a deadline.

    Handlers are set before `listen`. A handler whose caller has gone, cancelled or run out of time is
    cancelled, and what the call held is freed on both sides.
    """

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answer calls of this method; payloads that are not of `payload_type` are refused."""

    def handle_channel(self, method: str, serve: ServeChannel, *, payload_type: Any = Any) -> None:
        """Answer channels of this method."""

    async def call(
        self,
        peer: Peer | Address,
        method: str,
        payload: Any = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
        into: Sequence[Buffer] | Allocate | None = None,
    ) -> Reply:
        """Ask and wait for the answer, whose buffers arrive in `into` where it is given.

        `buffers` must not change, and `into` not be read, until it returns or raises.
        """

    async def notify(
        self,
        peer: Peer | Address,
        method: str,
        payload: Any = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
    ) -> None:
        """Tell without waiting for the handler; returns when the buffers may be changed again.

        The handler's failure is not told.
        """

    def open_channel(
        self, peer: Peer | Address, method: str, payload: Any = None, *, deadline: Deadline
    ) -> AbstractAsyncContextManager[Channel]:
        """Begin a conversation; leaving the block before the end cancels it."""

    async def __aenter__(self) -> Self:
        """Begin to work on the running loop."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every call and close every connection."""
