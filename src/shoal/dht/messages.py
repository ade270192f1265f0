"""What peers of the DHT ask each other, as it travels; `asking` sends it, `answering` answers it."""

from __future__ import annotations

import enum

import msgspec

from shoal.core.ids import ID_BYTES
from shoal.dht.coordinates import BEFORE_ALL
from shoal.dht.records import Item, Slot

PING, FIND, STORE, ABOUT = "dht.ping", "dht.find", "dht.store", "dht.about"

MAX_WANTS = 32
"""Keys of one Find: about what fits into a datagram."""
MAX_CONTACTS = 8
"""That are told for each key."""
MAX_INDEX = 256
"""Contacts of one answer that its findings can name, in a byte each."""
ANYWHERE = 0xFFFF_FFFF
"""A reach that leaves nobody out."""


class Kind(enum.IntEnum):
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
    kind: int = Kind.VALUE
    reach: int = ANYWHERE
    """The first 32 bits of a distance: peers that are not nearer than this are of no use to the asker."""
    after: int = BEFORE_ALL
    """COORDINATES beyond this one: the next page."""


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
    """Packed by `coordinates.pack`, for COORDINATES."""
    has_more: bool = False
    """Whether another page of coordinates follows."""


class Found(msgspec.Struct, array_like=True, frozen=True):
    """Findings in the order of the wants."""

    contacts: list[bytes]
    findings: list[Finding]


class Store(msgspec.Struct, array_like=True, frozen=True):
    """Keep these, for as long as they live."""

    port: int
    items: list[Item]
    is_cache: bool = False
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


def reach_of(distance: int) -> int:
    """A distance as a reach: rounded up, so that nobody as near is left out."""
    return min(ANYWHERE, (distance >> REACH_SHIFT) + 1)


REACH_SHIFT = 128
"""Bits of a distance that a reach leaves out."""


def tag_of(packed: bytes) -> bytes:
    """A few bytes that tell most peers apart, of the packed contact."""
    return packed[ID_BYTES - TAG_BYTES : ID_BYTES]


TAG_BYTES = 2
