"""The connections of a transport that live on one loop, and who looks after them.

A transport has one shard on its own loop and one for each helper thread. Everything here runs on the
shard's own thread, except what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from typing import TYPE_CHECKING

from shoal.core import Peer, ProtocolError, ShoalError, StandingScope, UsageError
from shoal.transport.network.sockets import Accepted
from shoal.transport.streams.connection import Connection
from shoal.transport.trust.tls import explain

if TYPE_CHECKING:
    from shoal.transport.streams.transport import StreamTransport

log = logging.getLogger(__name__)

SWEEP_S = 1.0
_IDLE_SHARE = 0.25  # of the time after which an idle connection is closed: how often one looks for them
_MAX_CLOSING_TURNS = 100
_ABSENT = object()


class Shard:
    """Takes accepted sockets, owns the tasks of handlers, and is the host of its connections."""

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

    def evict_silent(self) -> Peer | None:
        """Close the oldest connection that has not even said hello, and tell whose it was. For any thread."""
        for connection in tuple(self.connections):
            if not connection.is_dialer and not connection.ready.done() and self.remove(connection):
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(self._drop, connection)
                return connection.peer
        return None

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        if (task := self._adopting.get(connection)) is not None:  # it may be amid a handshake
            task.cancel()

    def _adopt(self, accepted: Accepted) -> None:
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
                await self._network.adopt(accepted, connection, tls=self._transport.server_tls())
            return True
        except ssl.SSLError as error:
            self._complain_of_handshake(connection.peer, explain(error, connection.peer))
        except ShoalError as error:
            self._complain_of_handshake(connection.peer, error)
        except TimeoutError:
            why = ProtocolError(f"No TLS handshake was made within {self.limits.handshake_s:g} s.")
            self._complain_of_handshake(connection.peer, why)
        except OSError:  # gone already
            pass
        except Exception:
            log.exception("a connection of %s could not be served", connection.peer)
        return False

    def _complain_of_handshake(self, peer: Peer, error: ShoalError) -> None:
        why = f"{error.what} Likely cause: {error.cause}" if error.cause else error.what
        self._transport.complaints.add("refused a connection", peer, why)

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
        """Nothing is expected any more."""
        self._watched.pop(connection, None)

    def on_lost(self, connection: Connection) -> None:
        """The connection is over."""
        self._watched.pop(connection, None)
        self.remove(connection)
        if connection.is_dialer:
            self._transport.forget(connection)

    def complain(self, peer: Peer, error: ShoalError) -> None:
        """A peer misbehaved and was cut off."""
        self._transport.complaints.add("closed a connection", peer, error.what)
