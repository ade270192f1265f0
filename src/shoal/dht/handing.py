"""Sending many records to many peers, each peer's in requests of a good size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.core import Deadline, PeerBusy, ShoalError, fanout
from shoal.dht.records import Slot
from shoal.dht.wire import MAX_STORE_BYTES, Contact, Item, size_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

Records = list[tuple[bytes, list[Slot]]]
"""Keys, and the slots under each."""

_BULK_FROM_BYTES = 256 << 10  # from here on a stream is worth opening
_BULK_BYTES = 48 << 10
_KEY_BYTES = 26  # on the wire
_PEERS_AT_ONCE = 4
_BUSY_S = 1.0
_MAX_WAITS = 10


async def hand(dht: DHT, records: Mapping[Contact, Records]) -> None:
    """Have each peer keep its records; those that do not answer, or stay busy, are left out."""
    await fanout(
        [_hand_to(dht, contact, theirs) for contact, theirs in records.items()],
        Deadline.never(),  # every call has its own
        limit=_PEERS_AT_ONCE,
    )


async def _hand_to(dht: DHT, contact: Contact, records: Records) -> None:
    waits = iter(range(_MAX_WAITS))
    for items in messages_of(records):
        while True:
            try:
                await dht.asking.call_store(contact, items)
                break
            except PeerBusy:
                if next(waits, None) is None:
                    return
                await asyncio.sleep(_BUSY_S)
            except ShoalError:
                return  # the table has been told


def messages_of(records: Records) -> Iterator[list[Item]]:
    """Records cut into requests: small ones that fit into datagrams, or fewer large ones when it is much."""
    total_bytes = sum(_KEY_BYTES + sum(map(size_of, slots)) for _, slots in records)
    max_bytes = MAX_STORE_BYTES if total_bytes < _BULK_FROM_BYTES else _BULK_BYTES
    items: list[Item] = []
    used_bytes = 0
    for key, slots in records:
        kept: list[Slot] = []
        for slot in slots:
            more_bytes = size_of(slot) + (0 if kept else _KEY_BYTES)
            if used_bytes and used_bytes + more_bytes > max_bytes:
                if kept:
                    items.append(Item(key, kept))
                yield items
                items, kept, used_bytes = [], [], 0
                more_bytes = size_of(slot) + _KEY_BYTES
            kept.append(slot)
            used_bytes += more_bytes
        items.append(Item(key, kept))
    if items:
        yield items
