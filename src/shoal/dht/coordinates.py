"""Coordinates of experts, packed: numbers in ascending order, as the gaps between them.

A grid's 256 coordinates take 256 bytes where the records themselves would take twenty thousand; a page is at
most what fits into a datagram beside other keys.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import msgspec

from shoal.dht.records import Slot

PAGE_BYTES = 800
_LOWEST = -1  # the coordinate that a grid of one axis ends in
BEFORE_ALL = _LOWEST - 1
"""Where the first page begins."""
_SIZES = frozenset((1, 2, 3, 5, 9))  # of whole numbers in MessagePack, bytes
_decoder = msgspec.msgpack.Decoder()


def coordinates_of(slots: Iterable[Slot]) -> list[int]:
    """Subkeys that are coordinates, in ascending order."""
    decoded = [_decoder.decode(slot.subkey) for slot in slots if len(slot.subkey) in _SIZES]
    found = [subkey for subkey in decoded if type(subkey) is int and subkey >= _LOWEST]
    found.sort()
    return found


def pack_page(coordinates: Sequence[int], after: int, max_bytes: int = PAGE_BYTES) -> tuple[bytes, bool]:
    """The coordinates beyond `after` that fit, and whether there are more."""
    packed = bytearray()
    last = after
    for index in range(bisect.bisect_right(coordinates, after), len(coordinates)):
        coordinate = coordinates[index]
        gap = _varint(coordinate - last)
        if len(packed) + len(gap) > max_bytes:
            return bytes(packed), True
        packed += gap
        last = coordinate
    return bytes(packed), False


def unpack_page(packed: bytes, after: int) -> list[int]:
    """What `pack_page` packed; ValueError for anything else."""
    coordinates = []
    last, gap, shift = after, 0, 0
    for byte in packed:
        gap |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise ValueError("a coordinate that is too large")
        if byte < 0x80:
            if gap == 0:
                raise ValueError("a coordinate that comes twice")
            last += gap
            coordinates.append(last)
            gap = shift = 0
    if shift:
        raise ValueError("a coordinate that is cut off")
    return coordinates


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
