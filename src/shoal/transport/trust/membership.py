"""Belonging to a swarm: who this peer is, the secret that it shares, and whom it lets talk to it."""

from __future__ import annotations

import functools
import ipaddress
import ssl
from dataclasses import dataclass, field

from shoal.core import SYSTEM_CLOCK, Address, Clock, PeerId, UsageError
from shoal.core.identity import Identity
from shoal.transport.trust.access import Access
from shoal.transport.trust.certificates import VALID_BEFORE_S, VALID_FOR_S, Authority
from shoal.transport.trust.secret import SwarmSecret
from shoal.transport.trust.tls import make_context


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """What makes this peer a member; shared by everything in a process that talks to the swarm."""

    identity: Identity
    secret: SwarmSecret
    access: Access = field(default_factory=Access)
    clock: Clock = SYSTEM_CLOCK
    """Dates this peer's certificates; those of others are held against the machine's own clock."""
    _contexts: _Contexts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_contexts", _Contexts(self.identity, self.secret, self.clock))

    @property
    def peer_id(self) -> PeerId:
        """Who this peer is."""
        return self.identity.peer_id

    def client_tls(self) -> ssl.SSLContext:
        """For dialing; kept until its certificate has grown old."""
        return self._contexts.get(is_server=False)

    def server_tls(self) -> ssl.SSLContext:
        """For accepting; kept until its certificate has grown old."""
        return self._contexts.get(is_server=True)


class _Contexts:
    """Contexts whose certificate is still good for a while. For any thread: one made twice does no harm."""

    def __init__(self, identity: Identity, secret: SwarmSecret, clock: Clock) -> None:
        self._identity = identity
        self._authority = Authority.of(secret)
        self._clock = clock
        self._kept: dict[bool, tuple[float, ssl.SSLContext]] = {}

    def get(self, *, is_server: bool) -> ssl.SSLContext:
        wall_s = self._clock.wall_s()
        kept = self._kept.get(is_server)
        if kept is not None and -VALID_BEFORE_S / 2 < wall_s - kept[0] < VALID_FOR_S / 2:
            return kept[1]
        context = make_context(self._identity, self._authority, wall_s, is_server=is_server)
        self._kept[is_server] = (wall_s, context)
        return context


def check_may_listen(address: Address, membership: Membership | None, *, is_insecure: bool) -> None:
    """UsageError when a peer without a secret would be heard by other machines."""
    if membership is None and not is_insecure and not is_loopback(address.host):
        raise UsageError(
            f"Without a swarm secret this peer listens on this machine only, not on {address}.",
            cause="anybody who can reach that address could call it.",
            next_step="give a secret (--secret-file, SHOAL_SECRET; `shoal keys secret` makes one), listen on "
            "127.0.0.1, or say --insecure in a network that you trust.",
        )


@functools.lru_cache(maxsize=4096)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is this machine's own for itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:  # a name
        return host == "localhost"
