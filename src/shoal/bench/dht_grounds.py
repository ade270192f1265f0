"""What the peers of `shoal bench dht` stand on: sockets of this machine, or a simulated network."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shoal.bench.mortal import MortalNetwork
from shoal.core.identity import SEED_BYTES, Identity
from shoal.transport import Membership, MemoryNetwork, Network, SwarmSecret

_LOOPBACK = "127.0.0.1"


class Place(NamedTuple):
    """Where a peer is put, and who it is."""

    network: Network
    kill: Callable[[], None]
    identity: Identity
    membership: Membership | None
    host: str


class Ground(Protocol):
    """What peers stand on."""

    def place(self, number: int) -> Place:
        """The place of a peer that is about to begin."""


class SocketGround:
    """Loopback: a socket and a fresh identity for each peer, sealed by one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = SwarmSecret.parse(secret)

    def place(self, number: int) -> Place:
        """A socket that can be killed."""
        network, identity = MortalNetwork(), Identity.generate()
        return Place(network, network.kill, identity, Membership(identity, self._secret), _LOOPBACK)


class MemoryGround:
    """A simulated network: a host for each peer, and identities that are the same in every run."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def place(self, number: int) -> Place:
        """A host of its own."""
        host = self._network.host(f"peer{number}")
        seed = hashlib.blake2b(f"{self._network.seed} {host.name}".encode(), digest_size=SEED_BYTES).digest()
        return Place(host, host.kill, Identity.from_seed(seed), None, host.name)
