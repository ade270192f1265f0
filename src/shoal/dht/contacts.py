"""Peers as the DHT knows them: an id as a number, an address, and both as bytes on the wire."""

from __future__ import annotations

import ipaddress
import struct

from shoal.core import Address, Peer, PeerId
from shoal.core.ids import ID_BYTES
from shoal.transport.trust.membership import is_loopback

ID_BITS = 8 * ID_BYTES
_PORT = struct.Struct(">H")
_NAME, _V4, _V6 = 0, 4, 6
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


def pack(peer: Peer) -> bytes:
    """A peer with an id as it travels: id, port, kind of host, host."""
    assert peer.id is not None
    try:
        host = ipaddress.ip_address(peer.address.host.partition("%")[0]).packed
        kind = _V4 if len(host) == 4 else _V6
    except ValueError:
        host, kind = peer.address.host.encode(), _NAME
    return b"".join((peer.id.digest, _PORT.pack(peer.address.port), bytes((kind,)), host))


class ContactBook:
    """Makes contacts of what is received, each once: those met again cost a look into a dict."""

    def __init__(self, *, has_names: bool) -> None:
        self._known: dict[bytes, Contact] = {}
        self._by_peer: dict[Peer, Contact] = {}
        self._has_names = has_names
        """Whether hosts may have names: only in simulated networks, since else a stranger could have this
        peer resolve any name."""

    def of(self, peer: Peer) -> Contact:
        """The contact of a peer whose id is known."""
        contact = self._by_peer.get(peer)
        if contact is None:
            packed = pack(peer)
            contact = self._known.get(packed) or self._add(Contact(peer, packed))
            if len(self._by_peer) >= _MAX_KNOWN:
                self._by_peer.clear()
            self._by_peer[peer] = contact
        return contact

    def read(self, packed: bytes, teller: Address) -> Contact | None:
        """What somebody tells of a third peer; None for what cannot be, or is not to be believed from it."""
        contact = self._known.get(packed)
        if contact is None:
            peer = _unpack(packed, self._has_names)
            if peer is None:
                return None
            contact = self._add(Contact(peer, packed))
        host = contact.peer.address.host
        if is_loopback(host) and not is_loopback(teller.host):
            return None  # its own machine is not this one
        return contact

    def _add(self, contact: Contact) -> Contact:
        if len(self._known) >= _MAX_KNOWN:
            for packed in list(self._known)[: _MAX_KNOWN // 4]:
                del self._known[packed]
        self._known[contact.packed] = contact
        return contact


def _unpack(packed: bytes, has_names: bool) -> Peer | None:
    head_bytes = ID_BYTES + 3
    if len(packed) <= head_bytes:
        return None
    port, kind, host = _PORT.unpack_from(packed, ID_BYTES)[0], packed[ID_BYTES + 2], packed[head_bytes:]
    if port == 0:
        return None
    if kind == _NAME:
        if not has_names or len(host) > _MAX_NAME_BYTES or not host.isascii():
            return None
        text = host.decode()
    elif (kind, len(host)) in ((_V4, 4), (_V6, 16)):
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified or address.is_multicast:
            return None
        text = str(address)
    else:
        return None
    return Peer(Address(text, port), PeerId(packed[:ID_BYTES]))
