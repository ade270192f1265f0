"""The stream transport: calls over TCP, to and from many peers, on one loop thread or several."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerError,
    PeerId,
    PeerUnreachable,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport.budget import ByteBudget
from shoal.transport.calling import ConnectionRetired
from shoal.transport.channel import StreamChannel
from shoal.transport.complaints import Complaints
from shoal.transport.connection import Connection
from shoal.transport.frames import GoodbyeHead, Kind, Mode, encode, frame
from shoal.transport.limits import Limits
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Allocate, Channel, Reply, Serve, ServeChannel
from shoal.transport.routes import Routes

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_BACKLOG = 4096
_SWEEP_S = 1.0
_MAX_CLOSING_TURNS = 100
_DIAL_ATTEMPTS = 3  # a connection may be retired by its peer between being picked and being used


class StreamTransport:
    """Calls over TCP; open it with `async with` on the loop that it should live on.

    `helpers` are further loop threads that take accepted connections in turn: sockets copy without the
    interpreter's lock, so a server with many busy clients moves more bytes through several. Handlers of those
    connections run on the helpers' threads.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId | None = None,
        limits: Limits | None = None,
        helpers: Sequence[LoopThread] = (),
    ) -> None:
        self.peer_id = peer_id
        self.limits = limits or Limits()
        self.routes = Routes()
        self.budget = ByteBudget(self.limits.max_bytes_in_flight)
        self.pool = BufferPool()
        self._helpers = helpers
        self._shards: list[_Shard] = []
        self._dialed: dict[Peer, Connection] = {}
        self._dialing: dict[Peer, asyncio.Task[Connection | ShoalError]] = {}
        self._next_shard = 0
        self._complaints = Complaints(log)
        self._is_open = False

    # --- opening and closing ---

    async def __aenter__(self) -> Self:
        home = _Shard(self, asyncio.get_running_loop())
        await home.open()
        self._shards = [home]
        for helper in self._helpers:
            shard = _Shard(self, helper.loop)
            await helper.run_from_async(shard.open())
            self._shards.append(shard)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        home, *others = self._shards
        for helper, shard in zip(self._helpers, others, strict=True):
            await helper.run_from_async(shard.close())
        await home.close()
        self._complaints.flush()
        self.pool.clear()

    @property
    def num_connections(self) -> int:
        """Connections that are open, dialed and accepted."""
        return sum(len(shard.connections) for shard in self._shards)

    @property
    def num_calls(self) -> int:
        """Calls under way over all connections, both ways."""
        return sum(connection.num_open for shard in self._shards for connection in tuple(shard.connections))

    # --- answering ---

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answer calls of this method; payloads that are not of `payload_type` are refused."""
        self.routes.add(method, serve, allocate, payload_type)

    def handle_channel(self, method: str, serve: ServeChannel, *, payload_type: Any = Any) -> None:
        """Answer channels of this method."""
        self.routes.add_channel(method, serve, payload_type)

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""
        self._require_open()
        listener = await _bind(address)
        close_in_children(listener.fileno())
        self._shards[0].scope.start_soon(self._accept(listener), name=f"accept on {address}")
        return Address(*listener.getsockname()[:2])

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, origin = await loop.sock_accept(listener)
                except OSError as error:
                    # out of descriptors, most likely: calls under way go on, newcomers wait in the backlog
                    log.warning("cannot accept connections right now: %s", error)
                    await asyncio.sleep(_SWEEP_S)
                else:
                    self._place(accepted, Peer(Address(origin[0], origin[1])))
        finally:
            keep_in_children(listener.fileno())
            listener.close()

    def _place(self, accepted: socket.socket, peer: Peer) -> None:
        if self.num_connections >= self.limits.max_connections and not self._evict_silent():
            reason = f"all {self.limits.max_connections} connections are taken."
            with contextlib.suppress(OSError), accepted:
                accepted.setblocking(False)
                accepted.send(frame(Kind.GOODBYE, 0, encode(GoodbyeHead("busy", reason, 0))))
            self._complaints.add("refused a connection", peer, reason)
            return
        shard = self._shards[self._next_shard % len(self._shards)]
        self._next_shard += 1
        shard.loop.call_soon_threadsafe(shard.adopt, accepted, peer)

    def _evict_silent(self) -> bool:
        """Make room by closing the oldest connection that has not even said hello."""
        for shard in self._shards:
            for connection in tuple(shard.connections):
                if not connection.is_dialer and not connection.ready.done():
                    shard.connections.pop(connection, None)
                    shard.loop.call_soon_threadsafe(connection.abort)
                    self._complaints.add(
                        "dropped a silent connection", connection.peer, "its place was needed."
                    )
                    return True
        return False

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
        for attempt in range(_DIAL_ATTEMPTS):
            connection = self._dialed.get(peer) if type(peer) is Peer else None
            if connection is None or not connection.is_usable:
                connection = await self._connect(peer, deadline)
            calling = connection.calling
            try:
                if calling.is_full:
                    await calling.wait_for_place(method, deadline)
                call = calling.begin(method, payload, buffers, deadline, into, Mode.CALL)
                try:
                    return await call.answer
                finally:
                    calling.end(call)
            except ConnectionRetired:
                if attempt == _DIAL_ATTEMPTS - 1:
                    raise connection.error_for(method) from None
        raise AssertionError("unreachable")

    async def notify(
        self,
        peer: Peer | Address,
        method: str,
        payload: Any = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
    ) -> None:
        """Tell without waiting for the handler; returns when the buffers may be changed again."""
        connection = await self._connect(peer, deadline)
        try:
            await connection.calling.notify(method, payload, buffers, deadline)
        except ConnectionRetired:
            raise connection.error_for(method) from None

    @contextlib.asynccontextmanager
    async def open_channel(
        self, peer: Peer | Address, method: str, payload: Any = None, *, deadline: Deadline
    ) -> AsyncIterator[Channel]:
        """Begin a conversation; leaving the block before the end cancels it."""
        connection = await self._connect(peer, deadline)
        try:
            call, end = await connection.calling.open_channel(method, payload, deadline)
        except ConnectionRetired:
            raise connection.error_for(method) from None
        call.channel = StreamChannel(connection, call.id, call.answer)
        call.channel.open_window()
        try:
            yield call.channel
        finally:
            end()

    async def _connect(self, target: Peer | Address, deadline: Deadline) -> Connection:
        """A connection that new calls may use; concurrent callers share one attempt to make it."""
        self._require_open()
        peer = target if isinstance(target, Peer) else Peer(target)
        connection = self._dialed.get(peer)
        if connection is not None and connection.is_usable:
            return connection
        dialing = self._dialing.get(peer)
        if dialing is None:
            dialing = self._shards[0].scope.start(self._dial(peer), name=f"dial {peer}")
            self._dialing[peer] = dialing
            dialing.add_done_callback(lambda _: self._dialing.pop(peer, None))
        try:
            async with asyncio.timeout(None if math.isinf(deadline.at_s) else deadline.remaining_s):
                outcome = await asyncio.shield(dialing)
        except TimeoutError:
            raise _no_answer(peer) from None
        if isinstance(outcome, ShoalError):
            raise outcome
        return outcome

    async def _dial(self, peer: Peer) -> Connection | ShoalError:
        """An error is returned, not raised: it concerns those who wait for this peer and nobody else."""
        home = self._shards[0]
        connection = home.connection(peer, is_dialer=True)
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await home.loop.create_connection(lambda: connection, peer.address.host, peer.address.port)
                home.connections[connection] = None
                await connection.ready
        except ShoalError as error:
            return error
        except TimeoutError:
            return _no_answer(peer)
        except OSError as error:
            return _unreachable(peer, error)
        finally:
            if not connection.is_usable:
                connection.abort()
        self._dialed[peer] = connection
        return connection

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError("The transport is not open.", next_step="use it inside 'async with'.")

    # --- what connections tell ---

    def on_ready(self, connection: Connection) -> None:
        """The hello of the other side has come."""

    def on_lost(self, connection: Connection) -> None:
        """The connection is over."""
        for shard in self._shards:
            shard.connections.pop(connection, None)
        if connection.is_dialer:
            for peer, dialed in tuple(self._dialed.items()):
                if dialed is connection:
                    del self._dialed[peer]

    def complain(self, connection: Connection, error: ShoalError) -> None:
        """The other side misbehaved and was cut off."""
        self._complaints.add("closed a connection", connection.peer, error.what)


class _Shard:
    """The connections that live on one loop."""

    def __init__(self, transport: StreamTransport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self.connections: dict[Connection, None] = {}
        self._standing = StandingScope("stream transport")
        self.scope = self._standing.scope

    async def open(self) -> None:
        """Begin to own tasks on this loop."""
        await self._standing.open()
        self.scope.start_soon(self._sweep(), name="sweep")

    async def close(self) -> None:
        """Say goodbye to everybody and end every task."""
        for connection in tuple(self.connections):
            connection.leave("the peer is stopping.")
            connection.close()
        await self._standing.close()
        # what could not be flushed is cut off; asyncio tells of the end in the next turns of the loop
        for connection in tuple(self.connections):
            connection.abort()
        for _ in range(_MAX_CLOSING_TURNS):
            if not self.connections:
                break
            await asyncio.sleep(0.001)

    def connection(self, peer: Peer, *, is_dialer: bool) -> Connection:
        """A new protocol for a socket of this loop."""
        return Connection(self.transport, self.scope, peer, is_dialer=is_dialer)

    def adopt(self, accepted: socket.socket, peer: Peer) -> None:
        """Serve an accepted socket."""
        try:
            self.scope.start_soon(self._serve(accepted, peer), name="adopt")
        except ShoalError:  # closing
            accepted.close()

    async def _serve(self, accepted: socket.socket, peer: Peer) -> None:
        connection = self.connection(peer, is_dialer=False)
        self.connections[connection] = None
        try:
            await self.loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # gone already
            accepted.close()
            self.connections.pop(connection, None)
        except BaseException:
            self.connections.pop(connection, None)
            raise

    async def _sweep(self) -> None:
        """Look after stalled and idle connections."""
        limits = self.transport.limits
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self.loop.time()
            for connection in tuple(self.connections):
                connection.check_progress(now_s)
                if connection.num_open:
                    connection.used_at_s = now_s
                elif now_s - connection.used_at_s > limits.idle_s * (1 if connection.is_dialer else 3):
                    connection.leave("the connection was idle.")


async def _bind(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, bound = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {address}: {error}.", next_step="give an address of this machine."
        ) from error
    try:
        if os.name == "posix":  # elsewhere the option lets two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bound)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {address}: {error.strerror}.",
            cause="another program uses the port, or the address is not of this machine.",
            next_step="choose another port, or 0 for any free one.",
        ) from error
    return listener


def _unreachable(peer: Peer, error: OSError) -> PeerError:
    if isinstance(error, ConnectionRefusedError):
        cause = "nothing listens there: the peer has not started, has ended, or uses another port."
    elif isinstance(error, socket.gaierror):
        cause = f"the name {peer.address.host!r} is not known here."
    else:
        cause = f"{error.strerror or error}."
    return PeerUnreachable(
        f"Cannot connect to {peer}.",
        peer=peer,
        cause=cause,
        next_step="check the address, and that the peer runs.",
    )


def _no_answer(peer: Peer) -> ShoalError:
    return DeadlineExceeded(
        f"No connection to {peer} before the deadline.",
        cause="the host is down, a firewall drops the packets, or what listens there is no Shoal peer.",
        next_step="check the address, and that its port is reachable.",
    )
