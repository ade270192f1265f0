"""What peers of the DHT send each other: messages, contacts and coordinates, byte for byte.

`protocol` sends these messages and answers them. A new message is a Struct for what is asked, one for what
is answered and a line in `MESSAGES` here, and a `call_` and an `rpc_` method of `DHTProtocol` there, of which
the latter asks `_admit` first. A peer without the method refuses, which counts as its failure. What the
bytes are stands in tests/dht/test_wire_format.py: peers of other versions read them.
"""

from __future__ import annotations

import enum
import ipaddress
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from shoal.core import Address, Peer, PeerId, UsageError
from shoal.core.ids import ID_BYTES, is_loopback
from shoal.dht.records import Slot
from shoal.transport.network.sockets import Network, unreachable

T = TypeVar("T")

# --- messages ---

PING, FIND, STORE, ABOUT = "dht.ping", "dht.find", "dht.store", "dht.about"

MAX_WANTS = 32
"""Keys of one Find: about what fits into a datagram."""
MAX_CONTACTS = 8
"""Contacts that are told for each key."""
MAX_INDEX = 256
"""Contacts of one answer that its findings can name, in a byte each."""
MAX_STORE_BYTES = 1_050
"""Items of one Store together, as long as there is more than one: what fits into a datagram."""
ITEM_BYTES = 48
"""An item's key with what is around it."""
ANYWHERE = 0xFFFF_FFFF
"""A reach that leaves nobody out."""
REACH_SHIFT = 128
"""Bits of a distance that a reach leaves out."""
TAG_BYTES = 2


class LookupKind(enum.IntEnum):
    """What is wanted of a key, besides peers that are nearer to it."""

    PEERS = 0
    VALUE = 1
    """And where there is one, no peers."""
    COORDINATES = 2
    """Of a dictionary, the subkeys that are numbers, and no values."""
    LATEST = 3
    """The value, and nearer peers also where there is one."""


class Want(msgspec.Struct, array_like=True, frozen=True):
    """One key of a Find."""

    key: bytes
    kind: int = LookupKind.VALUE
    reach: int = ANYWHERE
    """The first 32 bits of a distance: peers that are not nearer than this are of no use to the asker."""


class Find(msgspec.Struct, array_like=True, frozen=True):
    """Look for keys; `port` is where the asker listens, 0 when it does not."""

    port: int
    wants: list[Want]


class State(enum.IntEnum):
    """What a peer has of a key."""

    NOTHING = 0
    HERE = 1
    TOO_LARGE = 2
    """More than fits beside the other keys: to be asked for alone."""
    ABSENT = 3
    """Nothing, and somebody who has looked everywhere said so: a marker."""


class Finding(msgspec.Struct, array_like=True, frozen=True):
    """The answer for one Want."""

    state: int
    near: bytes
    """Peers nearer to the key: indexes into `Found.contacts`, nearest first."""
    slots: list[Slot] = []
    coordinates: bytes = b""
    """Packed by `pack_coordinates`, for COORDINATES."""


class Found(msgspec.Struct, array_like=True, frozen=True):
    """Findings in the order of the wants."""

    contacts: list[bytes]
    findings: list[Finding]


class Item(msgspec.Struct, array_like=True, frozen=True):
    """Slots of one key that are to be stored."""

    key: bytes
    slots: list[Slot]
    reach: int = 0
    """Peers nearer to the key than this (as in a Find), others than `known`, are to be told of."""
    known: bytes = b""
    """Tags of the peers that the sender brings the slots to."""


class Store(msgspec.Struct, array_like=True, frozen=True):
    """Keep these, for as long as they live."""

    port: int
    items: list[Item]
    is_pushed: bool = False
    """Found elsewhere: may be forgotten at any time."""
    absent: list[bytes] = []
    """Keys that were looked for everywhere and not found: to be marked, until something is stored there."""
    absent_s: float = 0.0


class StoreAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What became of the items."""

    verdicts: bytes
    """A Verdict for each slot, in order over all items."""
    contacts: list[bytes] = []
    near: list[bytes] = []
    """For each item the peers that are nearer and not known, as indexes into `contacts`; nothing for none."""


class Ping(msgspec.Struct, array_like=True, frozen=True):
    """Asks who is there, and what time it is."""

    port: int


class Pong(msgspec.Struct, array_like=True, frozen=True):
    """The answer: who is there, where the asker was seen, and this peer's wall clock."""

    peer_id: bytes
    seen_as: str
    wall_s: float


class About(msgspec.Struct, frozen=True):
    """What a peer tells of itself to whoever asks for the swarm's status."""

    software: str
    uptime_s: float
    num_records: int
    record_bytes: int
    num_cached: int
    num_contacts: int
    is_client: bool
    wall_s: float


MESSAGES: dict[str, tuple[Any, Any]] = {
    PING: (Ping, Pong),
    FIND: (Find, Found),
    STORE: (Store, StoreAnswer),
    ABOUT: (None, About),
}
"""By the name of the method, what is asked and what is answered; `dht.ping` is answered by `rpc_ping`."""


def reach_of(distance: int) -> int:
    """A distance as a reach: rounded up, so that nobody as near is left out."""
    return min(ANYWHERE, (distance >> REACH_SHIFT) + 1)


def named(contacts: Sequence[Contact | None], near: bytes) -> list[Contact]:
    """Those of an answer's contacts that indexes name, as many as may be told; None is nobody to be asked."""
    size = len(contacts)
    return [contact for at in near[:MAX_CONTACTS] if at < size and (contact := contacts[at]) is not None]


def tag_of(packed: bytes) -> bytes:
    """A few bytes of a packed contact that tell most peers apart."""
    return packed[ID_BYTES - TAG_BYTES : ID_BYTES]


_SLOT_BYTES = 24  # around what a slot holds, on the wire


def size_of(slot: Slot) -> int:
    """Bytes that a slot takes on the wire, about."""
    return _SLOT_BYTES + len(slot.subkey) + len(slot.value) + len(slot.owner) + len(slot.signature)


def in_groups(parts: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Parts in their order, in groups of at most so many bytes; what is larger is alone."""
    group: list[T] = []
    left_bytes = max_bytes
    for part in parts:
        size_bytes = bytes_of(part)
        if group and size_bytes > left_bytes:
            yield group
            group, left_bytes = [], max_bytes
        group.append(part)
        left_bytes -= size_bytes
    if group:
        yield group


# --- contacts ---

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
        """The peer's id, which every contact has."""
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
    if network.is_simulated or peer.address.is_relayed:
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


# --- coordinates: subkeys that are numbers, in ascending order, as the gaps between them ---
#
# A grid's 256 coordinates take 256 bytes where the records themselves would take twenty thousand.

_LOWEST_COORDINATE, _HIGHEST_COORDINATE = -1, 2**63 - 1  # a grid of one axis ends in the lowest
_MAX_COORDINATES_BYTES = 200 << 10  # more than a peer keeps under one key, however far apart
_INTEGER_SIZES = frozenset((1, 2, 3, 5, 9))  # of whole numbers in MessagePack, bytes
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
_gaps_decoder = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=1)]])


def coordinates_of(slots: Iterable[Slot]) -> list[int]:
    """Subkeys that are coordinates, in ascending order."""
    decoded = [_decoder.decode(slot.subkey) for slot in slots if len(slot.subkey) in _INTEGER_SIZES]
    numbers = [subkey for subkey in decoded if type(subkey) is int]
    return sorted(number for number in numbers if _LOWEST_COORDINATE <= number <= _HIGHEST_COORDINATE)


def pack_coordinates(coordinates: Sequence[int]) -> bytes:
    """Coordinates as they travel, in MessagePack; nothing where there are none."""
    gaps = [high - low for low, high in itertools.pairwise((_LOWEST_COORDINATE - 1, *coordinates))]
    return _encoder.encode(gaps) if gaps else b""


def unpack_coordinates(packed: bytes) -> list[int]:
    """What `pack_coordinates` packed; ValueError for anything else."""
    if len(packed) > _MAX_COORDINATES_BYTES:
        raise ValueError("more coordinates than a peer keeps under one key")
    gaps = _gaps_decoder.decode(packed) if packed else []  # msgspec's errors are ValueErrors
    return list(itertools.accumulate(gaps, initial=_LOWEST_COORDINATE - 1))[1:]
