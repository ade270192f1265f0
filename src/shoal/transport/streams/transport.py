"""The stream transport: calls over TCP, to and from many peers, on one loop thread or several."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Self

from shoal.core import (
    Address,
    Deadline,
    LoopThread,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    ProtocolError,
    Scope,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.transport.frames import FrameKind, GoodbyeHead, Mode, encode, frame
from shoal.transport.limits import ByteBudget, Complaints, Limits
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Buffers, Channel, Into, MethodTable, Reply, Target, Transport, other_peer
from shoal.transport.network.sockets import Accepted, Listener, Network, SocketNetwork, no_answer, unreachable
from shoal.transport.relay import Arrived, dial_through_relay
from shoal.transport.streams.calls import ConnectionRetired
from shoal.transport.streams.channel import StreamChannel
from shoal.transport.streams.connection import Connection, ConnectionKind
from shoal.transport.trust.membership import Membership, check_may_listen
from shoal.transport.trust.tls import BUSY_ALERT, explain

log = logging.getLogger(__name__)

_SPARE_SHARE = 16  # of the bytes in flight, one in so many more for what has arrived with its request
SWEEP_S = 1.0  # how often busy connections are looked after
_IDLE_SHARE = 0.25  # of the time after which an idle connection is closed: how often one looks for them
_MAX_CLOSING_TURNS = 100
_ABSENT = object()
CONNECTION_KINDS: tuple[ConnectionKind, ...] = ("direct", "punched", "relayed")  # the best one first
_DIAL_ATTEMPTS = 3  # a connection may be retired by its peer between being picked and being used


class StreamTransport(Transport):
    """Calls over TCP; open it with `async with` on the loop that it should live on.

    `helpers` are further loop threads that take accepted connections in turn: sockets copy without the
    interpreter's lock, so a server with many busy clients moves more bytes through several. Handlers of those
    connections run on the helpers' threads.

    With a `membership` every connection is TLS between members of its swarm, and peers are who they say they
    are. Without one it listens on this machine only, unless `is_insecure`.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        routes: MethodTable | None = None,
        membership: Membership | None = None,
        is_insecure: bool = False,
        helpers: Sequence[LoopThread] = (),
    ) -> None:
        self.peer_id = membership.peer_id if membership else peer_id
        self.limits = limits or Limits()
        self.network = network or SocketNetwork()
        self._membership = None if self.network.is_simulated else membership
        self._is_insecure = is_insecure or self.network.is_simulated
        self.access = self._membership.access if self._membership else None
        self.routes = routes or MethodTable()
        in_flight = self.limits.max_bytes_in_flight
        self.budget = ByteBudget(in_flight, spare_bytes=in_flight // _SPARE_SHARE)
        self.places = ByteBudget(self.limits.max_connections)
        """What accepted connections take, one each."""
        self.pool = BufferPool()
        self.complaints = Complaints(log, self.network.clock)
        self._helpers = helpers
        self._shards: list[Shard] = []
        self._dialed: dict[Peer, Connection] = {}
        self._dialed_as: dict[Connection, Peer] = {}  # under which name: a peer's id may be known only later
        self._dialing: dict[Peer, asyncio.Task[Connection | ShoalError]] = {}
        self._next_shard = 0
        self._is_open = False
        self.home_loop: asyncio.AbstractEventLoop | None = None
        """The loop that it was opened on."""
        self.on_relayed: Callable[[Peer], None] = lambda _: None
        """Called once a peer was reached through a relay: there may be a better way."""
        self._closing = contextlib.AsyncExitStack()

    # --- opening and closing ---

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise UsageError("The transport is open already.", next_step="open it in one place only.")
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self.pool.clear)
            closing.callback(self.complaints.flush)
            self.home_loop = asyncio.get_running_loop()
            home = Shard(self, self.home_loop)
            await home.open()
            closing.push_async_callback(home.close)
            self._shards = [home]
            for helper in self._helpers:
                shard = Shard(self, helper.loop)
                await helper.run_from_async(shard.open())
                closing.push_async_callback(_close_on, helper, shard)
                self._shards.append(shard)
            self._closing = closing.pop_all()
        self._is_open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_open = False
        await self._closing.aclose()

    @property
    def num_connections(self) -> int:
        """Connections that are open, dialed and accepted."""
        return sum(len(shard.connections) for shard in self._shards)

    @property
    def num_calls(self) -> int:
        """Calls under way over all connections, both ways."""
        return sum(connection.num_open for shard in self._shards for connection in tuple(shard.connections))

    @property
    def scope(self) -> Scope:
        """Of tasks on its own loop that end when it is closed."""
        self._require_open()
        return self._shards[0].scope

    # --- answering ---

    def check_may_serve(self, address: Address) -> None:
        """UsageError where others must not reach this peer by an address, since it would believe them."""
        check_may_listen(address, self._membership, is_insecure=self._is_insecure)

    async def listen(self, address: Address) -> Address:
        """Accept calls there; port 0 picks a free one. Returns the address that was bound."""
        self._require_open()
        self.check_may_serve(address)
        self.server_tls()  # what is wrong with it should be said here, not to every caller
        listener = await self.network.listen(address)
        try:
            self._shards[0].scope.start_soon(self._accept(listener), name=f"accept on {listener.address}")
        except UsageError:  # closed meanwhile
            listener.close()
            raise
        return listener.address

    async def _accept(self, listener: Listener) -> None:
        try:
            while True:
                try:
                    accepted = await listener.accept()
                except OSError as error:
                    # out of descriptors, most likely: calls under way go on, newcomers wait in the backlog
                    log.warning("cannot accept connections right now: %s", error)
                    await asyncio.sleep(SWEEP_S)
                else:
                    self._place(accepted)
        finally:
            listener.close()

    def _place(self, accepted: Accepted) -> None:
        """Pass a newcomer to a shard, or refuse it."""
        if self._has_place(accepted):
            shard = self._shards[self._next_shard % len(self._shards)]
            self._next_shard += 1
            shard.place(accepted)

    def take_in(self, arrived: Arrived) -> None:
        """Serve a stream that came through a relay, on this transport's own loop."""
        if self._has_place(arrived):
            self._shards[0].place(arrived)

    def _has_place(self, accepted: Accepted) -> bool:
        """Take a place for a newcomer; where there is none it is refused."""
        places = self.places
        if not places.try_take(1) and not (
            any(shard.evict_silent() for shard in self._shards) and places.try_take(1)
        ):
            reason = f"all {self.limits.max_connections} connections are taken."
            goodbye = frame(FrameKind.GOODBYE, 0, encode(GoodbyeHead("busy", reason, 0)))
            accepted.refuse(BUSY_ALERT if self._membership else goodbye)
            self.complaints.add("refused a connection", Peer(accepted.origin), reason)
            return False
        return True

    def connection_from(self, peer_id: PeerId, origin: Address | None = None) -> Connection | None:
        """A connection that this peer has dialed (from this origin) to this transport's own loop.

        Of several the latest, a direct one where there is any; one that both have dialed counts.
        """
        found = [
            connection
            for connection in self._shards[0].connections
            if (connection.is_punched or not connection.is_dialer)
            and connection.is_usable
            and connection.peer.id == peer_id
            and origin in (None, connection.peer.address)
        ]
        return min(reversed(found), key=lambda connection: connection.is_relayed, default=None)

    def received_bytes(self, peer: Peer) -> int:
        """What has come over the connection that was dialed to a peer; 0 where there is none."""
        connection = self._dialed.get(peer)
        return connection.received_bytes if connection is not None else 0

    def prefer(self, connection: Connection) -> None:
        """Have further calls to a peer use this connection, not relays; calls under way end there."""
        for peer, before in tuple(self._dialed.items()):
            if before.is_relayed and peer.id == connection.peer.id:
                self._dialed[peer] = connection
                self._dialed_as[connection] = peer
                before.leave("there is a better way.")

    def connection_kinds(self) -> dict[PeerId, ConnectionKind]:
        """How each peer that there is a connection with is reached: the best way, where there are several."""
        found: dict[PeerId, ConnectionKind] = {}
        for kind in reversed(CONNECTION_KINDS):
            for connection in tuple(self._shards[0].connections) if self._shards else ():
                if connection.is_usable and connection.peer.id is not None and connection.kind == kind:
                    found[connection.peer.id] = kind
        return found

    # --- asking ---

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
        """Ask and wait for the answer, whose buffers arrive in `into` where it is given."""
        for attempt in range(_DIAL_ATTEMPTS):
            connection = self._dialed.get(peer) if type(peer) is Peer else None
            if connection is None or not connection.is_usable:
                connection = await self._connect(peer, deadline)
            calling = connection.calling
            try:
                if not calling.slots.try_take():
                    await calling.wait_for_slot(method, deadline)
                call = calling.begin(method, payload, buffers, deadline, into, Mode.CALL)
                try:
                    return await call.answer
                finally:
                    calling.end(call)
                    # its answer may be an error, whose traceback has this frame: nobody would end it
                    del call
            except ConnectionRetired:
                if attempt == _DIAL_ATTEMPTS - 1:
                    raise connection.error_for(method) from None
        raise AssertionError("unreachable")

    async def call_over(
        self, connection: Connection, method: str, payload: Any = None, *, deadline: Deadline
    ) -> Reply:
        """Ask over a connection that there is, whichever side has dialed it."""
        try:
            call = await connection.calling.begin_when_free(method, payload, deadline, Mode.CALL)
            try:
                return await call.answer
            finally:
                connection.calling.end(call)
                del call  # as in `call`
        except ConnectionRetired:
            raise connection.error_for(method) from None

    async def notify(
        self, peer: Target, method: str, payload: Any = None, buffers: Buffers = (), *, deadline: Deadline
    ) -> None:
        """Tell without waiting for the handler; returns when the buffers may be changed again."""
        for attempt in range(_DIAL_ATTEMPTS):
            connection = await self._connect(peer, deadline)
            try:
                return await connection.calling.notify(method, payload, buffers, deadline)
            except ConnectionRetired:
                if attempt == _DIAL_ATTEMPTS - 1:
                    raise connection.error_for(method) from None
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def open_channel(
        self,
        peer: Target,
        method: str,
        payload: Any = None,
        *,
        deadline: Deadline,
        window_bytes: int | None = None,
    ) -> AsyncIterator[Channel]:
        """Begin a conversation; leaving the block before the end cancels it."""
        connection = await self._connect(peer, deadline)
        async with self.channel_on(
            connection, method, payload, deadline=deadline, window_bytes=window_bytes
        ) as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def channel_on(
        self,
        connection: Connection,
        method: str,
        payload: Any = None,
        *,
        deadline: Deadline,
        window_bytes: int | None = None,
    ) -> AsyncIterator[Channel]:
        """The same over a connection that there is, whichever side has dialed it."""
        try:
            call = await connection.calling.begin_when_free(method, payload, deadline, Mode.CHANNEL)
        except ConnectionRetired:
            raise connection.error_for(method) from None
        channel = StreamChannel(connection, call.id, call.answer, window_bytes)
        call.channel = connection.channels[call.id] = channel
        call.channel.open_window()
        try:
            yield call.channel
        finally:
            connection.calling.end(call)

    async def _connect(self, target: Target, deadline: Deadline) -> Connection:
        """A connection that new calls may use; concurrent callers share one attempt to make it."""
        self._require_open()
        peer = target if isinstance(target, Peer) else Peer(target)
        connection = self._dialed.get(peer)
        if connection is not None and connection.is_usable:
            return connection
        if (relayed_id := peer.address.relayed_id) is not None:
            if peer.id != relayed_id:
                raise other_peer(peer, relayed_id)
            connection = self.connection_from(relayed_id)
            if connection is not None:
                return connection
        dialing = self._dialing.get(peer)
        if dialing is None:
            dialing = self._dialing[peer] = self._shards[0].scope.start(self._dial(peer), name=f"dial {peer}")
            dialing.add_done_callback(lambda _: self._dialing.pop(peer, None))
        try:
            async with asyncio.timeout(deadline.timeout_s):
                outcome = await asyncio.shield(dialing)
        except TimeoutError:
            raise no_answer(peer) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not dialing.cancelled() or (task is not None and task.cancelling()):
                raise
            raise PeerLost(f"The transport was closed before {peer} answered.", peer=peer) from None
        if isinstance(outcome, ShoalError):
            try:
                raise outcome
            finally:
                # its traceback has this frame: it would keep itself, and all that its callers hold
                del outcome, dialing
        return outcome

    async def _dial(self, peer: Peer) -> Connection | ShoalError:
        """An error is returned, not raised: it concerns those who wait for this peer and nobody else."""
        connection = self._shards[0].add(peer, is_dialer=True)
        if peer.address.is_relayed:
            opening = dial_through_relay(self, peer, connection)
        else:
            opening = self.network.dial(peer.address, connection, tls=self.client_tls())
        if (error := await self._begin(connection, peer, opening)) is not None:
            return error
        if connection.is_usable:  # it may have ended in the same moment
            self._dialed[peer] = connection
            self._dialed_as[connection] = peer
            if peer.address.is_relayed:
                self.on_relayed(peer)
        return connection

    async def speak_over(self, accepted: Accepted, peer: Peer, *, is_dialer: bool) -> Connection:
        """A connection over a stream that is open, on this transport's own loop.

        One of the two sides `is_dialer`, and TLS's client, whichever has opened the stream.
        """
        if not (is_dialer or self._has_place(accepted)):
            raise PeerBusy("All connections are taken.", peer=peer)
        connection = self._shards[0].add(peer, is_dialer=is_dialer)
        tls = self.client_tls() if is_dialer else self.server_tls()
        opening = self.network.adopt(accepted, connection, tls=tls, is_server=not is_dialer)
        try:
            if (error := await self._begin(connection, peer, opening)) is not None:
                raise error
        finally:
            if not connection.is_connected:
                accepted.close()
        return connection

    async def _begin(
        self, connection: Connection, peer: Peer, opening: Coroutine[Any, Any, None]
    ) -> ShoalError | None:
        """Wait until a connection has what carries its bytes, and both have said hello; why it has not."""
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await opening
                await connection.ready
        except ShoalError as error:
            return error
        except TimeoutError:
            return no_answer(peer)
        except ssl.SSLError as error:
            return explain(error, peer)
        except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
            return unreachable(peer, error)
        finally:
            if not connection.is_usable:
                connection.give_up()
                if not connection.is_connected:
                    self._shards[0].remove(connection)
        return None

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError("The transport is not open.", next_step="use it inside 'async with'.")

    def server_tls(self) -> ssl.SSLContext | None:
        """What accepted connections are secured by; None where they are plain. For any thread."""
        return self._membership.server_tls() if self._membership else None

    def client_tls(self) -> ssl.SSLContext | None:
        """What dialed connections are secured by; None where they are plain. For any thread."""
        return self._membership.client_tls() if self._membership else None

    def cut_off(self, peer_id: PeerId) -> None:
        """End every connection with this peer without a word; it may dial again."""
        for shard in self._shards:
            for connection in tuple(shard.connections):
                if connection.peer.id != peer_id:
                    continue
                if shard.loop is self.home_loop:
                    connection.abort()
                else:
                    shard.loop.call_soon_threadsafe(connection.abort)

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        peer = self._dialed_as.pop(connection, None)
        if peer is not None and self._dialed.get(peer) is connection:
            del self._dialed[peer]


async def _close_on(helper: LoopThread, shard: Shard) -> None:
    await helper.run_from_async(shard.close())


class Shard:
    """The connections of a transport that live on one loop: it accepts, owns and looks after them.

    A transport has one shard on its own loop and one for each helper thread. Everything here runs on the
    shard's own thread, except what says otherwise.
    """

    def __init__(self, transport: StreamTransport, loop: asyncio.AbstractEventLoop) -> None:
        self.peer_id = transport.peer_id
        self.limits = transport.limits
        self.routes = transport.routes
        self.budget = transport.budget
        self.pool = transport.pool
        self.clock = transport.network.clock
        self.access = transport.access
        self.loop = loop
        # read by other threads, and evicted from by one: each step on it is atomic
        self.connections: dict[Connection, object] = {}
        self._has_some = asyncio.Event()
        self._watched: dict[Connection, None] = {}
        self._adopting: dict[Connection, asyncio.Task[bool]] = {}
        self._transport = transport
        self._network = transport.network
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
        try:
            await self._standing.close()
        finally:
            # what could not be flushed is cut off; asyncio tells of the end in the next turns of the loop
            for connection in tuple(self.connections):
                connection.abort()
            for _ in range(_MAX_CLOSING_TURNS):
                if not self.connections:
                    break
                await asyncio.sleep(0.001)

    def add(self, peer: Peer, *, is_dialer: bool) -> Connection:
        """A new connection, not connected yet."""
        connection = Connection(self, self.scope, peer, is_dialer=is_dialer)
        self.connections[connection] = None
        self._has_some.set()
        return connection

    def remove(self, connection: Connection) -> bool:
        """Forget a connection and free its place; False when that was done before. For any thread."""
        if self.connections.pop(connection, _ABSENT) is _ABSENT:
            return False
        if not connection.is_dialer:
            self._transport.places.give_back(1)
        return True

    def place(self, accepted: Accepted) -> None:
        """Have a stream served here, whose place has been taken. For any thread."""
        if self.loop is self._transport.home_loop:
            self._adopt(accepted)
            return
        try:
            self.loop.call_soon_threadsafe(self._adopt, accepted)
        except RuntimeError:  # the loop is closed
            accepted.close()
            self._transport.places.give_back(1)

    def evict_silent(self) -> bool:
        """Make room by closing the oldest connection that has not even said hello. For any thread."""
        for connection in tuple(self.connections):
            if not connection.is_dialer and not connection.ready.done() and self.remove(connection):
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(self._drop, connection)
                complaints = self._transport.complaints
                complaints.add("dropped a silent connection", connection.peer, "its place was needed.")
                return True
        return False

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        if (task := self._adopting.get(connection)) is not None:  # it may be amid a handshake
            task.cancel()

    def _adopt(self, accepted: Accepted) -> None:
        # of one that a relay passes on this is who the relay says; TLS must show that very peer
        connection = self.add(Peer(accepted.origin), is_dialer=False)
        try:
            task = self.scope.start(self._serve(connection, accepted), name="adopt")
        except UsageError:  # closing
            accepted.close()
            self.remove(connection)
        else:
            self._adopting[connection] = task
            task.add_done_callback(functools.partial(self._on_adopted, connection, accepted))

    async def _serve(self, connection: Connection, accepted: Accepted) -> bool:
        """Begin to serve a stream; whether that went well."""
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                if isinstance(accepted, Arrived):
                    await accepted.adopt(self._transport, connection)
                else:
                    await self._network.adopt(accepted, connection, tls=self._transport.server_tls())
            return True
        except ssl.SSLError as error:
            why = explain(error, connection.peer)
        except ShoalError as error:
            why = error
        except TimeoutError:
            why = ProtocolError(f"No TLS handshake was made within {self.limits.handshake_s:g} s.")
        except OSError:  # gone already
            return False
        except Exception:
            log.exception("a connection of %s could not be served", connection.peer)
            return False
        told = f"{why.what} Likely cause: {why.cause}" if why.cause else why.what
        self._transport.complaints.add("refused a connection", connection.peer, told)
        return False

    def _on_adopted(self, connection: Connection, accepted: Accepted, task: asyncio.Task[bool]) -> None:
        self._adopting.pop(connection, None)
        if not task.cancelled() and task.result():
            return
        connection.give_up()
        if not connection.is_connected:
            accepted.close()
            self.remove(connection)

    async def _sweep(self) -> None:
        """Look after busy connections often, and now and then after those that are idle."""
        idle_at_s = self.loop.time()
        while True:
            if not self.connections:  # then there is nothing to wake up for, and virtual time can see that
                self._has_some.clear()
                await self._has_some.wait()
            await asyncio.sleep(SWEEP_S)
            now_s = self.loop.time()
            if self.access is not None:
                self.access.refresh()
                for connection in tuple(self.connections):
                    connection.check_access()
            if now_s >= idle_at_s:
                idle_at_s = now_s + self.limits.idle_s * _IDLE_SHARE
                self._watched.update(dict.fromkeys(self.connections))
            for connection in tuple(self._watched):
                try:
                    if connection.check(now_s):
                        self._watched.pop(connection, None)
                except Exception:
                    log.exception("looking after %s failed", connection.peer)
                    connection.abort()

    # --- what connections tell ---

    def watch(self, connection: Connection) -> None:
        """Something is expected of the connection: look after it until it is quiet again."""
        self._watched[connection] = None

    def unwatch(self, connection: Connection) -> None:
        """Stop looking after a connection of which nothing is expected."""
        self._watched.pop(connection, None)

    def on_lost(self, connection: Connection) -> None:
        """Forget a connection that is over."""
        self._watched.pop(connection, None)
        self.remove(connection)
        self._transport.forget(connection)

    def complain(self, peer: Peer, error: ShoalError) -> None:
        """A peer misbehaved and was cut off."""
        self._transport.complaints.add("closed a connection", peer, error.what)
