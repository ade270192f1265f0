"""Answers that are too large for datagrams: kept for a short time, for the caller to take over a stream.

So the handler runs once, although its caller asks twice.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import NamedTuple

from shoal.core import PeerId, PeerRefused
from shoal.transport.limits import MIB
from shoal.transport.messages import Head, Reply, Routes, release

PARKED = "shoal.parked"
"""The method over which an answer is taken."""
KEPT_S = 10.0
MAX_PARKED = 256
MAX_PARKED_BYTES = 256 * MIB
_TICKET_BYTES = 16


class _Parked(NamedTuple):
    reply: Reply
    size_bytes: int
    peer_id: PeerId | None
    until_s: float


class Parking:
    """Finished answers by their tickets; `take` may be called from any thread."""

    def __init__(self, routes: Routes, source: random.Random) -> None:
        self._random = source
        self._parked: dict[bytes, _Parked] = {}  # oldest first
        self._size_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # one for all: whoever takes is on another loop
        self._lock = threading.Lock()
        routes.add(PARKED, self.take, None, bytes)

    def park(
        self, reply: Reply, size_bytes: int, peer_id: PeerId | None, loop: asyncio.AbstractEventLoop
    ) -> bytes:
        """Keep an answer for a peer; the oldest go when there are too many, or too large ones."""
        for oldest in self._tickets():
            is_room = self._size_bytes + size_bytes <= MAX_PARKED_BYTES
            if is_room and len(self._parked) < MAX_PARKED:
                break
            self._drop(oldest)
        ticket = self._random.randbytes(_TICKET_BYTES)
        with self._lock:
            self._parked[ticket] = _Parked(reply, size_bytes, peer_id, loop.time() + KEPT_S)
            self._size_bytes += size_bytes
        if self._timer is None:
            self._timer = loop.call_later(KEPT_S, self._sweep, loop)
        return ticket

    def take(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """The handler of PARKED; an answer can be taken once, by the peer that asked for it."""
        parked = self._parked.get(head.payload)
        peer_id = parked.peer_id if parked is not None else None
        is_theirs = peer_id is None or head.peer.id is None or head.peer.id == peer_id
        taken = self._remove(head.payload) if is_theirs else None
        if taken is None:
            raise PeerRefused(
                "the answer is not kept any longer.",
                cause=f"answers that do not fit into datagrams are kept for {KEPT_S:g} s, and taken once.",
                next_step="call again over a stream.",
            )
        return taken.reply

    def close(self) -> None:
        """Drop everything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in self._tickets():
            self._drop(ticket)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop what was not taken in time."""
        self._timer = None
        for ticket in self._tickets():
            parked = self._parked.get(ticket)
            if parked is not None and parked.until_s > loop.time():
                self._timer = loop.call_at(parked.until_s, self._sweep, loop)
                break
            self._drop(ticket)

    def _tickets(self) -> list[bytes]:
        with self._lock:
            return list(self._parked)

    def _drop(self, ticket: bytes) -> None:
        parked = self._remove(ticket)
        if parked is not None:
            release(parked.reply)

    def _remove(self, ticket: bytes) -> _Parked | None:
        with self._lock:
            parked = self._parked.pop(ticket, None)
            if parked is not None:
                self._size_bytes -= parked.size_bytes
        return parked
