"""Peers as the DHT knows them: an id as a number, an address, and both as bytes on the wire."""

from __future__ import annotations

import ipaddress
import struct

from shoal.core import Address, Peer, PeerId, UsageError
from shoal.core.ids import ID_BYTES
from shoal.transport.network.sockets import Network, unreachable
from shoal.transport.trust.membership import is_loopback

ID_BITS = 8 * ID_BYTES
_PORT = struct.Struct(">H")
_NAME, _V4, _V6 = 0, 4, 6
_KIND = ID_BYTES + _PORT.size  # where the kind of host is; the host follows
_LOOPBACK_V4 = bytes((_V4, 127))
_LOOPBACK_V6 = bytes((_V6, *bytes(15), 1))
_MAPPED_V4 = bytes((_V6, *bytes(10), 0xFF, 0xFF))  # and four bytes more: IPv4 written as IPv6
_MAX_NAME_BYTES = 64
_MAX_KNOWN = 4096


class Contact:
    """A peer that listens. Two contacts are the same when id and address are."""

    __slots__ = ("number", "packed", "peer")

    def __init__(self, peer: Peer, packed: bytes) -> None:
        assert peer.id is not None
        self.peer = peer
        self.packed = packed
        """On the wire; also what it is compared by."""
        self.number = int.from_bytes(peer.id.digest)
        """Its id: distances are XORs of numbers."""

    @property
    def id(self) -> PeerId:
        """Who it is."""
        assert self.peer.id is not None
        return self.peer.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contact) and other.packed == self.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"Contact({self.peer})"


def number_of(digest: bytes) -> int:
    """A key or id as a number."""
    return int.from_bytes(digest)


async def resolved(network: Network, peer: Peer) -> Peer:
    """The peer at an address that others can be told of; PeerUnreachable for a name that nobody knows.

    Hosts of simulated networks have names only, and keep them.
    """
    if network.is_simulated:
        return peer
    try:
        host, port, *_ = await network.resolve(peer.address)
    except (OSError, ValueError) as error:
        raise unreachable(peer, error) from error
    return Peer(Address(host, port), peer.id)


def pack(peer: Peer) -> bytes:
    """A peer with an id as it travels: id, port, kind of host, host."""
    assert peer.id is not None
    try:
        host = ipaddress.ip_address(peer.address.host.partition("%")[0]).packed
        kind = _V4 if len(host) == 4 else _V6
    except ValueError:
        host, kind = peer.address.host.encode(), _NAME
    return _unmapped(b"".join((peer.id.digest, _PORT.pack(peer.address.port), bytes((kind,)), host)))


class ContactBook:
    """Makes contacts of what is received, each once: those met again cost a look into a dict."""

    def __init__(self, *, has_names: bool) -> None:
        self._known: dict[bytes, Contact] = {}
        self._by_peer: dict[Peer, Contact] = {}
        self._has_names = has_names
        """Whether hosts may have names: only in simulated networks, since else a stranger could have this
        peer resolve any name."""

    def of(self, peer: Peer) -> Contact:
        """The contact of a peer whose id is known; UsageError for one that was not `resolved`."""
        contact = self._by_peer.get(peer)
        if contact is None:
            packed = pack(peer)
            if packed[_KIND] == _NAME and not self._has_names:
                raise UsageError(
                    f"{peer} is known by a name only.",
                    cause="others are told of addresses, since names may mean something else to them.",
                    next_step="resolve the name first.",
                )
            contact = self._known.get(packed) or self._add(Contact(peer, packed))
            if len(self._by_peer) >= _MAX_KNOWN:
                self._by_peer.clear()
            self._by_peer[peer] = contact
        return contact

    def read(self, packed: bytes, teller: Address) -> Contact | None:
        """What somebody tells of a third peer; None for what cannot be, or is not to be believed from it."""
        contact = self._known.get(packed)
        if contact is None:
            packed = _unmapped(packed)
            peer = _unpack(packed, self._has_names)
            if peer is None:
                return None
            contact = self._known.get(packed) or self._add(Contact(peer, packed))
        if not is_loopback(teller.host) and _is_loopback(contact):
            return None  # its own machine is not this one
        return contact

    def _add(self, contact: Contact) -> Contact:
        if len(self._known) >= _MAX_KNOWN:
            for packed in list(self._known)[: _MAX_KNOWN // 4]:
                del self._known[packed]
        self._known[contact.packed] = contact
        return contact


def _unmapped(packed: bytes) -> bytes:
    """The one way to write an IPv4 address."""
    if not packed.startswith(_MAPPED_V4, _KIND):
        return packed
    return packed[:_KIND] + bytes((_V4,)) + packed[_KIND + len(_MAPPED_V4) :]


def _is_loopback(contact: Contact) -> bool:
    return contact.packed.startswith(_LOOPBACK_V4, _KIND) or contact.packed[_KIND:] == _LOOPBACK_V6


def _unpack(packed: bytes, has_names: bool) -> Peer | None:
    if len(packed) <= _KIND + 1:
        return None
    port, kind, host = _PORT.unpack_from(packed, ID_BYTES)[0], packed[_KIND], packed[_KIND + 1 :]
    if port == 0:
        return None
    if kind == _NAME:
        if not has_names or len(host) > _MAX_NAME_BYTES or not host.isascii():
            return None
        text = host.decode()
    elif (kind, len(host)) in ((_V4, 4), (_V6, 16)):
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            return None
        text = str(address)
    else:
        return None
    return Peer(Address(text, port), PeerId(packed[:ID_BYTES]))
