"""Every transport on every network, behind one way to open a pair of peers: `open_pair(name, ...)`.

A new transport adds a line to TRANSPORTS and passes `test_transport.py`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core import Address, LoopThread, Peer
from shoal.core.identity import Identity, new_secret
from shoal.core.virtual import VirtualLoop
from shoal.transport import (
    Conditions,
    DatagramTransport,
    Endpoint,
    FaultScript,
    Limits,
    Membership,
    MemoryNetwork,
    Profile,
    ShapedNetwork,
    SocketNetwork,
    StreamTransport,
    SwarmSecret,
)

FAULTS = """
[[fault]]
kind = "drop"
probability = 0.02

[[fault]]
kind = "duplicate"
probability = 0.05

[[fault]]
kind = "reorder"
probability = 0.05

[[fault]]
kind = "pause"
at_s = 0.05
for_s = 0.1

[[fault]]
kind = "slow"
at_s = 0.2
for_s = 0.3
factor = 3
"""
"""What a transport must survive without losing a call."""


@dataclass
class Pair:
    """Two peers that can call each other."""

    server: Any
    client: Any
    server_peer: Peer
    client_peer: Peer
    max_bytes: int
    """The largest message that this network carries in a test's time."""
    server_owner: Any = None
    """What is closed when the server goes."""
    client_owner: Any = None

    def __post_init__(self):
        self.server_owner = self.server_owner or self.server
        self.client_owner = self.client_owner or self.client

    def size(self, size_bytes):
        """As large as asked, or as this network can."""
        return min(size_bytes, self.max_bytes)

    def is_idle(self):
        """Nothing of any call is left on either side."""
        return all(side.num_calls == 0 and side.budget.used_bytes == 0 for side in (self.server, self.client))


@dataclass(frozen=True)
class Kind:
    """A way to make a pair, and what can be asked of it."""

    make: Callable[..., Any]
    """(network of a peer's own, limits, helpers) to (owner, transport)"""
    is_virtual: bool = False
    profile: str | None = None
    script: str | None = None
    num_helpers: int = 0
    max_bytes: int = 1 << 40
    is_small: bool = False
    """Carries only what fits into datagrams."""

    @property
    def is_plain(self):
        """Whether it runs on real sockets that nothing makes worse."""
        return not (self.is_virtual or self.profile or self.script)


def _stream(network, limits, helpers, secret):
    transport = StreamTransport(network=network, limits=limits, helpers=helpers)
    return transport, transport


def _tls(network, limits, helpers, secret):
    transport = StreamTransport(network=network, limits=limits, helpers=helpers, membership=_member(secret))
    return transport, transport


def _datagrams(network, limits, helpers, secret):
    """Small calls over datagrams, the others over streams of the same address."""
    membership = None if network.is_simulated else _member(secret)
    endpoint = Endpoint(network=network, limits=limits, membership=membership)
    return endpoint, endpoint.datagrams


def _datagrams_alone(network, limits, helpers, secret):
    transport = DatagramTransport(network=network, limits=limits, membership=_member(secret))
    return transport, transport


def _member(secret):
    return Membership(Identity.generate(), SwarmSecret.parse(secret))


_HOME = {"profile": "home", "max_bytes": 400_000}
_BAD = {"script": FAULTS, "max_bytes": 8 << 20}

TRANSPORTS = {
    "stream": Kind(_stream),
    "stream-3-loops": Kind(_stream, num_helpers=2),
    "tls": Kind(_tls),
    "tls-3-loops": Kind(_tls, num_helpers=2),
    "datagrams": Kind(_datagrams),
    "datagrams-alone": Kind(_datagrams_alone, is_small=True, max_bytes=600),
    "memory": Kind(_stream, is_virtual=True),
    "memory-datagrams": Kind(_datagrams, is_virtual=True),
    "stream-home": Kind(_stream, **_HOME),
    "tls-home": Kind(_tls, **_HOME),
    "datagrams-home": Kind(_datagrams, **_HOME),
    "memory-home": Kind(_stream, is_virtual=True, **_HOME),
    "memory-datagrams-home": Kind(_datagrams, is_virtual=True, **_HOME),
    "stream-faults": Kind(_stream, **_BAD),
    "tls-faults": Kind(_tls, **_BAD),
    "datagrams-faults": Kind(_datagrams, **_BAD),
    "datagrams-alone-faults": Kind(_datagrams_alone, is_small=True, script=FAULTS, max_bytes=600),
    "memory-faults": Kind(_stream, is_virtual=True, profile="lan", **_BAD),
    "memory-datagrams-faults": Kind(_datagrams, is_virtual=True, profile="lan", **_BAD),
}
LARGE = [name for name, kind in TRANSPORTS.items() if not kind.is_small]
"""Those that carry messages of any size, and channels."""


def open_pair(name, handlers, *, server_limits=None, client_limits=None):
    """Both peers get the same handlers, and their own limits."""
    return _open_pair(TRANSPORTS[name], handlers, server_limits or Limits(), client_limits or Limits())


@contextlib.asynccontextmanager
async def _open_pair(kind, handlers, server_limits, client_limits):
    secret = new_secret()
    async with contextlib.AsyncExitStack() as stack:
        helpers = [stack.enter_context(LoopThread(f"helper {n}")) for n in range(kind.num_helpers)]
        networks, addresses = _networks(kind)
        if isinstance(networks[0], ShapedNetwork):
            for network in networks:
                await stack.enter_async_context(network)
        server_owner, server = kind.make(networks[0], server_limits, helpers, secret)
        client_owner, client = kind.make(networks[1], client_limits, (), secret)
        async with server_owner, client_owner:
            for owner in (server_owner, client_owner):
                handlers(owner)
            peers = [
                Peer(await owner.listen(address))
                for owner, address in zip((server_owner, client_owner), addresses, strict=True)
            ]
            yield Pair(server, client, *peers, kind.max_bytes, server_owner, client_owner)


def _networks(kind):
    """A network for each of two peers, and where each listens."""
    profile = Profile.load(kind.profile) if kind.profile else None
    script = FaultScript.parse(kind.script) if kind.script else None
    conditions = Conditions(profile, script, seed=1) if profile or script else None
    if kind.is_virtual:
        world = MemoryNetwork(conditions=conditions, seed=1)
        return [world.host(name) for name in ("server", "client")], [
            Address("server", 0),
            Address("client", 0),
        ]
    loopback = [Address("127.0.0.1", 0)] * 2
    if conditions is None:
        return [SocketNetwork(), SocketNetwork()], loopback
    return [ShapedNetwork(SocketNetwork(), conditions) for _ in range(2)], loopback


def new_loop(name, kind_of_loop):
    """The loop that a transport's pair lives on."""
    return VirtualLoop() if TRANSPORTS[name].is_virtual else kind_of_loop()
