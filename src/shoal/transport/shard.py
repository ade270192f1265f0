"""The connections of a transport that live on one loop, and who looks after them.

A transport has one shard on its own loop and one for each helper thread. Everything here runs on the
shard's own thread, except what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from typing import TYPE_CHECKING

from shoal.core import Peer, ShoalError, StandingScope, UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport.connection import Connection

if TYPE_CHECKING:
    from shoal.transport.stream import StreamTransport

log = logging.getLogger(__name__)

SWEEP_S = 1.0
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
        self.loop = loop
        # read by other threads, and evicted from by one: each step on it is atomic
        self.connections: dict[Connection, object] = {}
        self._transport = transport
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
        return connection

    def remove(self, connection: Connection) -> bool:
        """Forget a connection and free its place; False when that was done before. For any thread."""
        if self.connections.pop(connection, _ABSENT) is _ABSENT:
            return False
        if not connection.is_dialer:
            self._transport.places.give_back(1)
        return True

    def place(self, accepted: socket.socket, peer: Peer) -> None:
        """Have a socket served here, whose place has been taken. For any thread."""
        close_in_children(accepted.fileno())
        try:
            self.loop.call_soon_threadsafe(self._adopt, accepted, peer)
        except RuntimeError:  # the loop is closed
            self._let_go(accepted)
            self._transport.places.give_back(1)

    def evict_silent(self) -> Peer | None:
        """Close the oldest connection that has not even said hello, and tell whose it was. For any thread."""
        for connection in tuple(self.connections):
            if not connection.is_dialer and not connection.ready.done() and self.remove(connection):
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(connection.abort)
                return connection.peer
        return None

    def _adopt(self, accepted: socket.socket, peer: Peer) -> None:
        connection = self.add(peer, is_dialer=False)
        try:
            task = self.scope.start(self._serve(connection, accepted), name="adopt")
        except UsageError:  # closing
            self._let_go(accepted)
            self.remove(connection)
        else:
            task.add_done_callback(functools.partial(self._on_adopted, connection, accepted))

    async def _serve(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # gone already
            pass
        except Exception:
            log.exception("a connection of %s could not be served", connection.peer)

    def _on_adopted(self, connection: Connection, accepted: socket.socket, _: asyncio.Task[None]) -> None:
        if not connection.is_connected:  # cancelled before it began, or failed
            self._let_go(accepted)
            self.remove(connection)

    @staticmethod
    def _let_go(accepted: socket.socket) -> None:
        if (descriptor := accepted.fileno()) >= 0:
            keep_in_children(descriptor)
        accepted.close()

    async def _sweep(self) -> None:
        """Look after stalled and idle connections."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self.loop.time()
            for connection in tuple(self.connections):
                try:
                    connection.check(now_s)
                except Exception:
                    log.exception("looking after %s failed", connection.peer)
                    connection.abort()

    # --- what connections tell ---

    def on_lost(self, connection: Connection) -> None:
        """The connection is over."""
        self.remove(connection)
        if connection.is_dialer:
            self._transport.forget(connection)

    def complain(self, peer: Peer, error: ShoalError) -> None:
        """A peer misbehaved and was cut off."""
        self._transport.complaints.add("closed a connection", peer, error.what)
