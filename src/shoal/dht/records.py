"""What is stored: slots under keys, each with an expiration, and what became of an attempt to store one.

A key holds either one plain value or a dictionary of subkeys. On the wire and in storage names are hashed,
subkeys and values are MessagePack; this file knows nothing of who holds them.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import msgspec

PLAIN = b""
"""The subkey of a plain value; no encoded subkey is empty."""


class Slot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One value under a key, as it travels and as it is kept."""

    subkey: bytes
    """Encoded; PLAIN for a value without one."""
    value: bytes
    """Encoded."""
    expires_at_s: float
    """On the wall clock, seconds since 1970."""
    owner: bytes = b""
    """The raw Ed25519 public key of who alone may replace it, or nothing."""
    signature: bytes = b""
    """The owner's, over key, subkey, value and expiration."""


class Item(msgspec.Struct, array_like=True, frozen=True):
    """Slots of one key that are to be stored."""

    key: bytes
    slots: list[Slot]
    reach: int = 0
    """Peers nearer to the key than this (as in a Find), others than `known`, are to be told of."""
    known: bytes = b""
    """Tags of the peers that the sender brings the slots to."""


class Verdict(enum.IntEnum):
    """What a peer made of a slot that it was asked to store."""

    STORED = 0
    NOT_NEWER = 1
    """What is there expires at the same time or later."""
    EXPIRED = 2
    TOO_LONG = 3
    """It would live longer than records may."""
    TOO_LARGE = 4
    FULL = 5
    """There is no room, and what is kept is nearer."""
    NOT_OWNER = 6
    """What is there, or the subkey itself, belongs to somebody else."""
    BAD_SIGNATURE = 7
    BAD_VALUE = 8
    """It does not fit the schema of its prefix, or is no MessagePack."""
    NOT_ASKED = 9
    """Nobody answered: of no peer's making."""


class Value(NamedTuple):
    """What a look-up found: a value and when it expires.

    Of a dictionary the value is `{subkey: Value}`, and its expiration the latest of them.
    """

    value: Any
    expires_at_s: float
    owner: Any = None
    """The PeerId that signed it, checked; None where nobody did."""


class Entry(msgspec.Struct, frozen=True):
    """One value to be stored, as a program gives it."""

    name: Any
    value: Any
    expires_at_s: float
    subkey: Any = None
    is_owned: bool = False
    """Signed with this peer's key: nobody else can replace it."""


class Stored(msgspec.Struct, frozen=True):
    """What became of one entry; true when at least one peer holds it now."""

    num_stored: int
    """Peers that took it."""
    verdict: Verdict
    """STORED, or why the first peer that refused did so."""

    def __bool__(self) -> bool:
        return self.num_stored > 0
