"""The datagram transport: small calls over UDP, and over streams what is not small."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerId,
    PeerLost,
    UsageError,
)
from shoal.transport.datagrams.connecting import ConnectingHub
from shoal.transport.datagrams.outcomes import AskOverStream
from shoal.transport.datagrams.packets import MAX_FRAME_BYTES
from shoal.transport.datagrams.parking import PARKED
from shoal.transport.datagrams.pending import PendingCall, State
from shoal.transport.frames import Mode
from shoal.transport.limits import ByteBudget, Limits
from shoal.transport.messages import (
    Allocate,
    Channel,
    Head,
    Reply,
    Routes,
    Serve,
    ServeChannel,
    Transport,
    byte_views,
    encode_head,
)
from shoal.transport.network.sockets import Network, SocketNetwork
from shoal.transport.trust.membership import Membership, check_may_listen

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shoal.transport.streams.transport import StreamTransport

_MAX_REST_BYTES = MAX_FRAME_BYTES - 10  # of a request, without its tag and id
_CALL, _ONE_WAY = int(Mode.CALL), int(Mode.ONE_WAY)


class DatagramTransport(ConnectingHub):
    """Calls over UDP; open it with `async with` on the loop that it should live on.

    A request that does not fit into a datagram goes over `streams` to the same address, as does an answer
    that does not fit into a few; without streams such calls fail with LimitExceeded or PeerRefused. A handler
    runs once for a call, however often its request arrives.
    """

    def __init__(
        self,
        *,
        membership: Membership | None = None,
        is_insecure: bool = False,
        peer_id: PeerId | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        routes: Routes | None = None,
        streams: StreamTransport | None = None,
    ) -> None:
        limits = limits or Limits()
        budget = streams.budget if streams is not None else ByteBudget(limits.max_bytes_in_flight)
        super().__init__(
            network or SocketNetwork(),
            membership,
            peer_id,
            limits,
            routes or (streams.routes if streams is not None else Routes()),
            budget,
            has_streams=streams is not None,
        )
        self.streams = streams
        self._is_insecure = is_insecure or self.network.is_simulated
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.is_open:
            raise UsageError("The transport is open already.", next_step="open it in one place only.")
        await self._closing.enter_async_context(self._opened())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, both ways."""
        return len(self.sessions)

    @property
    def num_calls(self) -> int:
        """Calls under way, both ways, and those of the streams below."""
        own = sum(session.num_open for session in self.sessions.values())
        return own + (self.streams.num_calls if self.streams is not None else 0)

    def id_of(self, peer: Peer) -> PeerId | None:
        """Who has greeted back at a peer's address, as proven as greetings are; None before any has."""
        asker = self._askers.get(peer)
        return asker.peer.id if asker is not None and asker.state is State.READY else None

    # --- answering ---

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answer calls of this method; payloads that are not of `payload_type` are refused."""
        self.routes.add(method, serve, allocate, payload_type)

    def handle_channel(self, method: str, serve: ServeChannel, *, payload_type: Any = Any) -> None:
        """Answer channels of this method, which come over streams."""
        self.routes.add_channel(method, serve, payload_type)

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""
        self._require_open()
        check_may_listen(address, self._membership, is_insecure=self._is_insecure)
        port = await self._open_port(address, is_listening=True)
        return Address(*port.where[:2])

    # --- asking ---

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
        """Ask and wait for the answer, whose buffers arrive in `into` where it is given."""
        request = self._encode(peer, method, payload, buffers, deadline, _CALL)
        if request is None:
            streams = self._streams_for(method)
            return await streams.call(peer, method, payload, buffers, deadline=deadline, into=into)
        call = await self._begin(peer, method, request, deadline, into)
        try:
            return await call.answer
        except AskOverStream as parked:
            ticket, size_bytes = parked.ticket, parked.size_bytes
        finally:
            call.asker.end(call)
        streams = self._streams_for(method, f"its answer takes {size_bytes:,} bytes")
        if callable(into):
            into = functools.partial(_into, into, method)
        return await streams.call(peer, PARKED, ticket, deadline=deadline, into=into)

    async def notify(
        self,
        peer: Peer | Address,
        method: str,
        payload: Any = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
    ) -> None:
        """Tell without waiting for the handler; sent again until it has arrived or its time is over."""
        request = self._encode(peer, method, payload, buffers, deadline, _ONE_WAY)
        if request is None:
            return await self._streams_for(method).notify(peer, method, payload, buffers, deadline=deadline)
        call = await self._begin(peer, method, request, deadline, None)
        call.answer.add_done_callback(lambda _: call.asker.end(call))
        return None

    def open_channel(
        self, peer: Peer | Address, method: str, payload: Any = None, *, deadline: Deadline
    ) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Begin a conversation over a stream; UsageError where there are none."""
        if self.streams is None:
            raise UsageError(
                "Datagrams carry no channels.", next_step="give the transport streams, or use an Endpoint."
            )
        return self.streams.open_channel(peer, method, payload, deadline=deadline)

    def _encode(
        self,
        peer: Peer | Address,
        method: str,
        payload: Any,
        buffers: Sequence[Any],
        deadline: Deadline,
        mode: int,
    ) -> tuple[bytes, float] | None:
        """A request without its id, and when it ends on the loop's clock; None when it does not fit."""
        if not self.is_open:
            self._require_open()
        remaining_s = deadline.at_s - deadline.clock.now_s()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"{method} at {peer}: the deadline had passed before it was sent.")
        timeout_ms = 0 if remaining_s == math.inf else int(remaining_s * 1000) or 1
        if buffers:
            views = byte_views(buffers)
            if sum(map(len, views)) > _MAX_REST_BYTES:
                return None
            rest = encode_head(method, (timeout_ms, method, mode, payload, views), self.limits.max_head_bytes)
        else:
            rest = encode_head(method, (timeout_ms, method, mode, payload), self.limits.max_head_bytes)
        return (rest, self.loop.time() + remaining_s) if len(rest) <= _MAX_REST_BYTES else None

    async def _begin(
        self,
        target: Peer | Address,
        method: str,
        request: tuple[bytes, float],
        deadline: Deadline,
        into: Any,
    ) -> PendingCall:
        """Send a request as soon as there is a session with a place for it, and a place in the window."""
        peer = target if type(target) is Peer else Peer(target)  # type: ignore[arg-type]
        window = self.window
        while True:
            if not self.is_watching:
                self.watch()  # who is denied since is not asked
            asker = self._askers.get(peer)
            if asker is None or asker.state is not State.READY:
                asker = await self._connect(peer, deadline)
            places = asker.places
            if not places.try_take():
                await self._wait(places.take(deadline), method, peer, "its calls at once are open already")
            if not window.try_take():
                try:
                    await self._wait(window.take(deadline), method, peer, "many calls wait for answers")
                except BaseException:
                    places.give_back()
                    raise
            if asker.state is State.READY:
                return asker.ask(method, request[0], into, deadline, request[1])
            places.give_back()
            window.give_back()
            if not self.is_open:
                raise PeerLost(f"{method} at {peer}: the transport was closed before it was sent.", peer=peer)

    async def _wait(self, taking: Any, method: str, peer: Peer, cause: str) -> None:
        if not await taking:
            raise DeadlineExceeded(
                f"{method} at {peer} could not be sent before its deadline.", cause=f"{cause}."
            )

    def _streams_for(
        self, method: str, why: str = "its request does not fit into a datagram"
    ) -> StreamTransport:
        if self.streams is None:
            raise LimitExceeded(
                f"{method}: {why}, and this transport has no streams.",
                next_step="send or ask for less at once, or use an Endpoint.",
            )
        return self.streams


def _into(pick: Callable[[Head], Any], method: str, head: Head) -> Any:
    """An answer that was parked arrives under another method than the one that was called."""
    return pick(msgspec.structs.replace(head, method=method))


if TYPE_CHECKING:

    def _is_a_transport(datagrams: DatagramTransport) -> Transport:
        """Held by mypy: what this file makes is what `messages` promises."""
        return datagrams
