"""The ceiling of the benchmark under TLS: blocking sockets as in `raw_sockets`, each in Python's own TLS.

One connection carries each direction, since two threads cannot use one TLS connection at a time. Ciphers and
certificates are those of Shoal's own connections.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from shoal.bench.raw_sockets import RawClient, echo_all
from shoal.bench.workers import Parent
from shoal.core import SYSTEM_CLOCK
from shoal.core.identity import Identity
from shoal.transport.trust.secret import SwarmSecret
from shoal.transport.trust.tls import Authority, make_context

# nothing is protected by it: both ends are of this benchmark, on one machine
_SECRET_TEXT = "the ceiling has nothing to hide from anybody"


def serve(arguments: dict[str, Any], parent: Parent) -> None:
    """A process that echoes messages of `size_bytes`: from its first connection to its second."""
    context = _context(is_server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.tell(port=listener.getsockname()[1])
        receiving = _wrap(listener.accept()[0], context, is_server=True)
        sending = _wrap(listener.accept()[0], context, is_server=True)
    with receiving, sending:
        echo_all(receiving, sending, arguments["size_bytes"], arguments["in_flight"])


class RawTlsClient(RawClient):
    """The other end."""

    def _connect(self, port: int) -> tuple[socket.socket, socket.socket]:
        context = _context(is_server=False)
        sending, receiving = (
            _wrap(socket.create_connection(("127.0.0.1", port)), context, is_server=False) for _ in range(2)
        )
        return sending, receiving


def _context(*, is_server: bool) -> ssl.SSLContext:
    authority = Authority.of(SwarmSecret.parse(_SECRET_TEXT))
    return make_context(Identity.generate(), authority, SYSTEM_CLOCK.wall_s(), is_server=is_server)


def _wrap(connection: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> ssl.SSLSocket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(connection, server_side=is_server)
