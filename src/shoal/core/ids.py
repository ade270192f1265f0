"""Who and where: peer ids, DHT keys and addresses as types that cannot be mistaken for each other."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Self

from shoal.core.errors import UsageError

ID_BYTES = 20  # 160 bits, the width of Kademlia's id space (Maymounkov & Mazières 2002, section 2)

_HOST_PORT = re.compile(
    r"^(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:/\s]+)):(?P<port>\d{1,5})"
    rf"(?:/(?P<relayed>[0-9A-Fa-f]{{{2 * ID_BYTES}}}))?$"
)


@functools.total_ordering
class _Id160:
    """160 bits with a type: only equal to, and ordered among, ids of the same kind."""

    __slots__ = ("digest",)
    digest: bytes

    def __init__(self, digest: bytes) -> None:
        if not isinstance(digest, bytes) or len(digest) != ID_BYTES:
            raise UsageError(
                f"{type(self).__name__} takes {ID_BYTES} bytes, not {_describe(digest)}.",
                next_step=f"use {type(self).__name__}.parse(text) for the printed form.",
            )
        object.__setattr__(self, "digest", digest)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the printed form, 40 hexadecimal digits."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError as error:
            raise UsageError(
                f"{text!r} is not a {cls.__name__}.",
                cause=f"a {cls.__name__} is written as {2 * ID_BYTES} hexadecimal digits.",
            ) from error

    @property
    def short(self) -> str:
        """The first 8 digits, for people and log lines; not unique."""
        return self.digest.hex()[:8]

    def __str__(self) -> str:
        return self.digest.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.digest.hex()})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.digest == self.digest

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.digest < other.digest

    def __hash__(self) -> int:
        return hash((type(self), self.digest))

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self.digest,)  # copying would set attributes otherwise


class PeerId(_Id160):
    """The identity of a peer: a hash of its Ed25519 public key."""

    __slots__ = ()

    @classmethod
    def of_public_key(cls, public_key: bytes) -> Self:
        """The id that belongs to a raw 32-byte Ed25519 public key."""
        return cls(hashlib.blake2b(public_key, digest_size=ID_BYTES, person=b"shoal peer").digest())


class Key(_Id160):
    """A place in the DHT: the hash of what a record is called."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str | bytes) -> Self:
        """The key of a record's name; text is hashed as UTF-8."""
        raw = name.encode() if isinstance(name, str) else name
        return cls(hashlib.blake2b(raw, digest_size=ID_BYTES, person=b"shoal key").digest())


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Address:
    """One port number on one host, for TCP and UDP both.

    With a `relayed_id` it is where a peer behind a router is reached, over streams: through the relay there.
    """

    host: str
    port: int
    relayed_id: PeerId | None = None

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port <= 65535:
            raise UsageError(
                f"{self.host!r} port {self.port} is no address.",
                cause="the host is empty or the port is not in 0 to 65535.",
                next_step="write it as HOST:PORT, for example 127.0.0.1:31337.",
            )

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port` or `[v6]:port`, and `host:port/id` of a peer that is reached through a relay."""
        match = _HOST_PORT.match(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is no address.",
                cause="an address needs a host and a port, and IPv6 hosts need brackets.",
                next_step="write HOST:PORT, for example 10.0.0.7:31337 or [::1]:31337.",
            )
        relayed_id = PeerId.parse(match["relayed"]) if match["relayed"] else None
        return cls(match["v6"] or match["host"], int(match["port"]), relayed_id)

    @property
    def is_relayed(self) -> bool:
        """Whether what listens there is a relay of the peer that is meant."""
        return self.relayed_id is not None

    @property
    def relay(self) -> Address:
        """Where the relay of a relayed address listens itself."""
        return Address(self.host, self.port)

    def __lt__(self, other: Address) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, int, bytes]:
        return self.host, self.port, self.relayed_id.digest if self.relayed_id else b""

    def __str__(self) -> str:
        text = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"{text}/{self.relayed_id}" if self.relayed_id else text


@dataclass(frozen=True, slots=True)
class Peer:
    """One process that takes part: where it is and, where known (as from a relayed address), who it is."""

    address: Address
    id: PeerId | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if self.id is None and self.address.relayed_id is not None:
            object.__setattr__(self, "id", self.address.relayed_id)
        # peers are the keys of every call's look-up: hash once
        object.__setattr__(self, "_hash", hash((self.address, self.id)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Peer], tuple[Address, PeerId | None]]:
        return Peer, (self.address, self.id)  # the hash of text differs from process to process

    @classmethod
    def at(cls, address: str | Address) -> Peer:
        """A peer of which only the address is known yet."""
        return cls(Address.parse(address) if isinstance(address, str) else address)

    def __str__(self) -> str:
        return f"{self.id.short} ({self.address})" if self.id else str(self.address)


def _describe(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"


@functools.lru_cache(maxsize=4096)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is this machine's own for itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:  # a name
        return host == "localhost"
