"""Answers that are too large for datagrams: kept for a short time, for the caller to take over a stream.

So the handler runs once, although its caller asks twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from shoal.core import PeerId, PeerRefused
from shoal.transport.messages import Head, Reply
from shoal.transport.payloads import release
from shoal.transport.routes import Routes

PARKED = "shoal.parked"
"""The method over which an answer is taken."""
KEPT_S = 10.0
MAX_PARKED = 256
_TICKET_BYTES = 16


class Parking:
    """Finished answers by their tickets; `take` may be called from any thread."""

    def __init__(self, routes: Routes, source: random.Random) -> None:
        self._random = source
        self._parked: dict[bytes, tuple[Reply, PeerId | None]] = {}
        routes.add(PARKED, self.take, None, bytes)

    def park(self, reply: Reply, peer_id: PeerId | None, loop: asyncio.AbstractEventLoop) -> bytes:
        """Keep an answer for a peer; the oldest goes when there are too many."""
        if len(self._parked) >= MAX_PARKED:
            self._drop(next(iter(self._parked)))
        ticket = self._random.randbytes(_TICKET_BYTES)
        self._parked[ticket] = (reply, peer_id)
        loop.call_later(KEPT_S, self._drop, ticket)
        return ticket

    def take(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """The handler of PARKED; an answer can be taken once, by the peer that asked for it."""
        reply, peer_id = self._parked.get(head.payload, (None, None))
        is_theirs = peer_id is None or head.peer.id is None or head.peer.id == peer_id
        if reply is None or not is_theirs or self._parked.pop(head.payload, None) is None:
            raise PeerRefused(
                "the answer is not kept any longer.",
                cause=f"answers that do not fit into datagrams are kept for {KEPT_S:g} s, and taken once.",
                next_step="call again over a stream.",
            )
        return reply

    def close(self) -> None:
        """Drop everything."""
        for ticket in tuple(self._parked):
            self._drop(ticket)

    def _drop(self, ticket: bytes) -> None:
        kept = self._parked.pop(ticket, None)
        if kept is not None:
            release(kept[0])
