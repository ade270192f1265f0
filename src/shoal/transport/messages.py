"""What a transport is to those who use it: calls, channels, replies, and the handlers that answer.

A transport moves a MessagePack payload and raw buffers; what the buffers mean is the business of others.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from shoal.core import (
    Address,
    Clock,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerError,
    PeerId,
    PeerRefused,
    ProtocolError,
    ShoalError,
    UsageError,
)
from shoal.core.errors import did_you_mean
from shoal.transport.frames import UNREADABLE, Mode, decode_payload, encode
from shoal.transport.memory import BufferPool, byte_view, fill

if TYPE_CHECKING:
    from typing_extensions import Buffer
log = logging.getLogger(__name__)
T = TypeVar("T")
_CALL, _CHANNEL = int(Mode.CALL), int(Mode.CHANNEL)
_NEVER = Deadline.never()


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
        """The bytes of all buffers together."""
        return sum(self.sizes)


class Reply(msgspec.Struct):
    """An answer, or an item of a channel: a payload and buffers."""

    payload: Any = None
    buffers: Sequence[Any] = ()
    on_sent: Callable[[], None] | None = None
    """Called once when the transport needs the buffers no more, sent or not: they may be used again."""


EMPTY_REPLY = Reply()
"""The answer of a handler that returns None."""

CONNECTION_ENDED = "the connection has ended"
"""What the CancelledError of a handler says whose caller did not just end its call, or run out of time."""

Allocate = Callable[[Head], "Sequence[Buffer] | None"]
"""Picks memory for a message's buffers: as many as `head.sizes`, each writable and of just that size.

None leaves it to the transport; what raises refuses the message before its buffers arrive.
"""

Target = Peer | Address
"""Whom to ask: a peer, whose id is checked where it has one, or whoever is at an address."""

Buffers = Sequence["Buffer"]

Into = Sequence[Any] | Allocate | None
"""Where a message's buffers should go: memory, what picks it, or None for memory of the transport's."""

Serve = Callable[[Head, Sequence[memoryview]], Awaitable[Reply | None] | Reply | None]
"""Answers a call. A plain function runs on the loop's thread itself and must not block.

A plain function may return a future of that loop, which costs less than a coroutine; it is cancelled when the
call is.
"""

ServeChannel = Callable[[Head, "Channel"], Awaitable[Reply | None]]
"""Answers a channel; what it returns ends the channel."""


class Channel(Protocol):
    """A conversation inside one call: items both ways, each way in order, each with back-pressure."""

    async def send(self, payload: Any = None, buffers: Buffers = ()) -> None:
        """Send an item; returns when its buffers may be changed again."""

    async def end(self) -> None:
        """Say that no more items will be sent."""

    async def receive(self) -> Reply | None:
        """The next item, or None when the other side has ended."""

    def __aiter__(self) -> AsyncIterator[Reply]:
        """All items until the other side has ended."""

    async def result(self) -> Reply:
        """For the caller: wait for the reply that ends the channel."""


class HasMethods(Protocol):
    """What has methods that others call, an endpoint or a transport. Handlers are set before it listens."""

    routes: MethodTable

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answer calls of this method; payloads that are not of `payload_type` are refused."""
        self.routes.add(method, serve, allocate, payload_type)

    def handle_channel(
        self, method: str, serve: ServeChannel, *, payload_type: Any = Any, window_bytes: int | None = None
    ) -> None:
        """Answer channels of this method, which come over streams; without a window, with the transport's."""
        self.routes.add_channel(method, serve, payload_type, window_bytes)


class Transport(HasMethods, Protocol):
    """How bytes move between peers. Errors are Shoal's own; every wait has a deadline.

    A handler whose caller has gone, cancelled or run out of time is cancelled, and what the call held is
    freed on both sides. Over streams the CancelledError of one whose connection ended says so.
    """

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""

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
        """Ask and wait for the answer, whose buffers arrive in `into` where it is given.

        `buffers` must not change, and `into` not be read, until it returns or raises.
        """

    async def notify(
        self, peer: Target, method: str, payload: Any = None, buffers: Buffers = (), *, deadline: Deadline
    ) -> None:
        """Tell without waiting for the handler; returns when the buffers may be changed again.

        The handler's failure is not told.
        """

    def open_channel(
        self, peer: Target, method: str, payload: Any = None, *, deadline: Deadline
    ) -> AbstractAsyncContextManager[Channel]:
        """Begin a conversation; leaving the block before the end cancels it."""

    async def __aenter__(self) -> Self:
        """Begin to work on the running loop."""

    async def __aexit__(self, *error: object) -> None:
        """End every call and close every connection."""


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of one method, of calls or of channels, and how its payload is read."""

    serve: Serve | None
    serve_channel: ServeChannel | None
    allocate: Allocate | None
    decoder: msgspec.msgpack.Decoder[Any] | None
    is_plain_function: bool
    is_allocating_late: bool = False
    """Whether a plain function takes buffers that came along with their request in any memory: then
    `allocate` is only asked for those that are still to come."""
    window_bytes: int | None = None
    """What a channel's caller may have sent before it was taken; None for what the transport's limits say."""


class MethodTable:
    """The methods of one peer, and which handler answers each."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}

    def add(
        self,
        method: str,
        serve: Serve,
        allocate: Allocate | None,
        payload_type: Any,
        *,
        is_allocating_late: bool = False,
    ) -> None:
        """Register a handler of calls; see `Route`."""
        decoder, is_plain = _decoder(payload_type), not _is_async(serve)
        self._add(method, Route(serve, None, allocate, decoder, is_plain, is_allocating_late))

    def add_channel(
        self, method: str, serve: ServeChannel, payload_type: Any, window_bytes: int | None = None
    ) -> None:
        """Register a handler of channels; see `Route`."""
        decoder = _decoder(payload_type)
        self._add(
            method, Route(None, serve, None, decoder, is_plain_function=False, window_bytes=window_bytes)
        )

    def remove(self, method: str) -> None:
        """Stop answering this method."""
        self._routes.pop(method, None)

    def __contains__(self, method: str) -> bool:
        return method in self._routes

    def accept(self, request: Any, sizes: Sequence[int], peer: Peer, clock: Clock) -> tuple[Route, Head]:
        """Who answers a request of either kind; PeerRefused, for its caller to read, when nobody does."""
        method, mode, timeout_ms = request.method, request.mode, request.timeout_ms
        route = self._routes.get(method)
        if route is None:
            raise PeerRefused(
                f"this peer has no method {method[:100]!r}.{did_you_mean(method, self._routes)}",
                next_step="check that both sides run the same version.",
            )
        if route.serve is None if mode == _CALL else _is_other(mode, route):
            raise PeerRefused(
                f"{method} is {'a channel' if route.serve is None else 'a call'}.",
                next_step="use call() for calls, open_channel() for channels.",
            )
        decoder = route.decoder
        try:
            payload = decode_payload(request.payload) if decoder is None else decoder.decode(request.payload)
        except UNREADABLE as error:
            raise PeerRefused(f"the payload of {method} is not what it takes: {error}.") from error
        deadline = Deadline(clock.now_s() + timeout_ms / 1000, clock) if timeout_ms > 0 else _NEVER
        return route, Head(method, payload, sizes, peer, deadline)

    def _add(self, method: str, route: Route) -> None:
        if method in self._routes:
            raise UsageError(
                f"The method {method!r} has a handler already.", next_step="choose another name."
            )
        self._routes[method] = route


def _is_other(mode: int, route: Route) -> bool:
    """Whether a request is a channel where a call is answered, or the other way round, or nothing at all."""
    return (mode == _CHANNEL) != (route.serve is None) or not 0 <= mode <= _CHANNEL


def _decoder(payload_type: Any) -> msgspec.msgpack.Decoder[Any] | None:
    return None if payload_type is Any else msgspec.msgpack.Decoder(payload_type)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# --- what callers and handlers give to be sent or filled ---


def fitting_views(given: Sequence[Any], sizes: Sequence[int]) -> list[memoryview]:
    """Byte views of the memory that was picked for a message; PeerError when it does not fit the message."""
    views = byte_views(given)
    if [len(view) for view in views] != list(sizes):
        raise PeerError(
            f"The message has buffers of {_list(sizes)} bytes, "
            f"the memory given for it {_list([len(view) for view in views])}.",
            cause="the two sides disagree on what is exchanged.",
            next_step="compare the shapes and dtypes that both sides use.",
        )
    if any(view.readonly for view in views):
        raise UsageError(
            "The memory given for a message is read-only.", next_step="give a bytearray or writable array."
        )
    return views


def memory_for(head: Head, given: Into, pool: BufferPool) -> list[memoryview]:
    """Memory for a message's buffers: what was given for it, or the pool's."""
    memory = given(head) if callable(given) else given
    return pool.allocate_all(head.sizes) if memory is None else fitting_views(memory, head.sizes)


def received(head: Head, given: Into, pool: BufferPool, body: memoryview) -> list[memoryview]:
    """The same for a message that is here: memory that holds the bytes of `body`."""
    if given is None:
        return pool.copy_in(head.sizes, body)
    views = memory_for(head, given, pool)
    if views:
        fill(views, body)
    return views


def byte_views(buffers: Sequence[Any]) -> list[memoryview]:
    """The bytes of buffers that are to be sent or filled; UsageError when one of them has none."""
    try:
        return list(map(byte_view, buffers))
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"A buffer cannot be used: {error}.",
            cause="buffers are contiguous bytes-like objects.",
            next_step="pack tensors with shoal.tensors.pack first.",
        ) from error


def time_left(method: str, peer: Peer | Address, deadline: Deadline) -> tuple[float, int]:
    """The seconds that a call has, and the milliseconds as its request tells them, 0 for no end."""
    remaining_s = deadline.at_s - deadline.clock.now_s()
    if remaining_s <= 0:
        raise DeadlineExceeded(f"{method} at {peer}: the deadline had passed before it was sent.")
    return remaining_s, 0 if remaining_s == math.inf else int(remaining_s * 1000) or 1


def encode_head(method: str, head: Any, max_bytes: int) -> bytes:
    """A message's head as it travels; UsageError when its payload cannot, or is more than any peer takes."""
    try:
        encoded = encode(head)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"The payload of {method} cannot be sent: {error}",
            cause="payloads carry what MessagePack carries; tensors and arrays travel as buffers.",
        ) from error
    if len(encoded) > max_bytes:
        raise UsageError(
            f"The payload of {method} takes {len(encoded):,} bytes; {max_bytes:,} are allowed.",
            next_step="send large things as buffers.",
        )
    return encoded


def unusable_answer(error: Exception, peer: Peer, method: str) -> Exception:
    """What a caller is told of an answer that could not be taken in: ProtocolError for a peer's nonsense."""
    if isinstance(error, ShoalError) or not isinstance(error, UNREADABLE):
        return error
    return ProtocolError(f"The answer of {peer} to {method} cannot be read: {error}.")


def read_answer(reply: Reply, kind: type[T], method: str) -> T:
    """An answer's payload; ProtocolError when it is none of this kind."""
    try:
        return msgspec.convert(reply.payload, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"The answer to {method} is not as it should be: {error}",
            next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
        ) from error


def other_peer(target: Peer, found: PeerId | None) -> PeerRefused:
    """The error for a target whose address another peer has."""
    other = found.short if found else "nobody in particular"
    expected = target.id.short if target.id else "nobody in particular"
    return PeerRefused(
        f"The peer at {target.address} is {other}, not {expected}.",
        peer=target,
        cause="another peer has taken that address.",
        next_step="look the peer up again.",
    )


def checked_reply(returned: Any) -> Reply:
    """What a handler returned; TypeError when it is no reply."""
    if returned is None:
        return EMPTY_REPLY
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("a plain function answered with a coroutine; make the handler itself 'async def'")
    if not isinstance(returned, Reply):
        raise TypeError(f"a handler answers with a Reply or None, not with a {type(returned).__name__}")
    return returned


def release(reply: Reply) -> None:
    """Tell a reply's owner that its buffers are free again."""
    if reply.on_sent is not None:
        try:
            reply.on_sent()
        except Exception:
            log.exception("on_sent of a reply failed")


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "") if sizes else "no"
