"""Every transport there is, behind one way to open a pair of peers: `open_pair(name, ...)`.

A new transport adds a line to TRANSPORTS and passes `test_transport.py`.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from shoal.core import Address, LoopThread, Peer
from shoal.transport import Limits, StreamTransport

LOOPBACK = Address("127.0.0.1", 0)


@dataclass
class Pair:
    """Two peers that can call each other."""

    server: Any
    client: Any
    server_peer: Peer
    client_peer: Peer


@contextlib.asynccontextmanager
async def _streams(handlers, server_limits, client_limits, num_helpers=0):
    with contextlib.ExitStack() as threads:
        helpers = [threads.enter_context(LoopThread(f"helper {n}")) for n in range(num_helpers)]
        async with (
            StreamTransport(limits=server_limits, helpers=helpers) as server,
            StreamTransport(limits=client_limits) as client,
        ):
            for transport in (server, client):
                handlers(transport)
            server_peer = Peer(await server.listen(LOOPBACK))
            client_peer = Peer(await client.listen(LOOPBACK))
            yield Pair(server, client, server_peer, client_peer)


def _streams_on_three_loops(handlers, server_limits, client_limits):
    return _streams(handlers, server_limits, client_limits, num_helpers=2)


TRANSPORTS = {"stream": _streams, "stream-3-loops": _streams_on_three_loops}


def open_pair(name, handlers, *, server_limits=None, client_limits=None):
    """Both peers get the same handlers, and their own limits."""
    return TRANSPORTS[name](handlers, server_limits or Limits(), client_limits or Limits())
