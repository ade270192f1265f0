"""What this peer asks others (`call_*`), and what their answers and silences teach the routing table.

Answers travel as bytes inside the payload, so that they are decoded once, into the type that they should
have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerId,
    ProtocolError,
    ShoalError,
)
from shoal.core.ids import ID_BYTES
from shoal.dht.records import Verdict
from shoal.dht.settings import DHTSettings
from shoal.dht.table import RoutingTable
from shoal.dht.wire import (
    ABOUT,
    FIND,
    PING,
    STORE,
    About,
    Contact,
    ContactBook,
    Find,
    Found,
    Item,
    Ping,
    Pong,
    Store,
    StoreAnswer,
    Want,
    resolved,
)
from shoal.transport import Endpoint, Head

T = TypeVar("T")
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    PING: msgspec.msgpack.Decoder(Pong),
    FIND: msgspec.msgpack.Decoder(Found),
    STORE: msgspec.msgpack.Decoder(StoreAnswer),
    ABOUT: msgspec.msgpack.Decoder(About),
}


_LAST_VERDICT = max(Verdict)
_MAX_ANSWER_BYTES = 32 << 20  # no peer keeps more under one key
_FIRST_WAIT_S = 0.05  # for a peer that is busy


class Answered(msgspec.Struct, frozen=True):
    """A peer has answered a ping."""

    peer: Peer
    round_trip_s: float
    clock_gap_s: float
    """How far its wall clock is ahead of this peer's, give or take half the round trip."""
    seen_as: str


class Counts(msgspec.Struct):
    """Requests that this peer has sent."""

    num_finds: int = 0
    num_stores: int = 0
    num_pings: int = 0
    num_failed: int = 0


class Asking:
    """Calls to other peers of the DHT."""

    def __init__(
        self,
        endpoint: Endpoint,
        table: RoutingTable,
        book: ContactBook,
        settings: DHTSettings,
        on_seen: Callable[[Contact, float | None], None],
    ) -> None:
        self._endpoint = endpoint
        self._table = table
        self._book = book
        self._settings = settings
        self._on_seen = on_seen
        self.counts = Counts()
        self.port = 0
        """Where this peer listens; 0 for a client."""

    async def call_find(self, contact: Contact, wants: list[Want]) -> Found:
        """Look for keys at a peer."""
        self.counts.num_finds += 1
        found: Found = await self._call(contact, FIND, Find(self.port, wants))
        if len(found.findings) != len(wants):
            raise self._nonsense(contact, "it answered for another number of keys than it was asked for.")
        return found

    async def call_store(self, contact: Contact, items: list[Item], *, is_cache: bool = False) -> StoreAnswer:
        """Have a peer keep slots; there is a verdict on each."""
        self.counts.num_stores += 1
        answer: StoreAnswer = await self._call(contact, STORE, Store(self.port, items, is_cache))
        if len(answer.verdicts) != sum(len(item.slots) for item in items):
            raise self._nonsense(contact, "it answered for another number of records than it was sent.")
        if max(answer.verdicts, default=0) > _LAST_VERDICT:
            raise self._nonsense(contact, "it answered with a verdict that there is not.")
        return answer

    async def call_mark_absent(self, contact: Contact, keys: list[bytes]) -> None:
        """Tell a peer that there is nothing under these keys, anywhere."""
        self.counts.num_stores += 1
        await self._call(contact, STORE, Store(self.port, [], absent=keys, absent_s=self._settings.absent_s))

    async def call_ping(self, peer: Peer | Address, deadline: Deadline | None = None) -> Answered:
        """Ask a peer, of which perhaps only the address is known, who it is."""
        self.counts.num_pings += 1
        target = await resolved(self._endpoint.network, peer if isinstance(peer, Peer) else Peer(peer))
        clock = self._endpoint.network.clock
        began_s = clock.now_s()
        reply = await self._send(target, PING, Ping(self.port), deadline)
        took_s = clock.now_s() - began_s
        pong: Pong = self._read(target, PING, reply)
        if len(pong.peer_id) != ID_BYTES:
            raise self._nonsense(target, "it told no peer id.")
        claimed = PeerId(pong.peer_id)
        if claimed != (target.id or self._endpoint.datagrams.id_of(target)):
            raise self._nonsense(target, "it answered in the name of another peer.")
        gap_s = pong.wall_s + took_s / 2 - clock.wall_s()
        answered = Answered(Peer(target.address, claimed), took_s, gap_s, pong.seen_as)
        if claimed != self._endpoint.peer_id:
            self._on_seen(self._book.of(answered.peer), took_s)
        return answered

    async def call_about(self, peer: Peer, deadline: Deadline | None = None) -> About:
        """Ask a peer how it is."""
        about: About = self._read(peer, ABOUT, await self._send(peer, ABOUT, None, deadline))
        return about

    # --- one call ---

    async def _call(self, contact: Contact, method: str, payload: object) -> Any:
        """Ask, and tell the table what came of it."""
        clock = self._endpoint.network.clock
        began_s = clock.now_s()
        try:
            answer = self._read(contact.peer, method, await self._send_until_taken(contact, method, payload))
        except PeerBusy:
            raise  # alive, and asked too often
        except (PeerError, DeadlineExceeded, ProtocolError):
            self.counts.num_failed += 1
            self._table.on_failed(contact, self._endpoint.datagrams.loop.time())
            raise
        self._on_seen(contact, clock.now_s() - began_s)
        return answer

    async def _send_until_taken(self, contact: Contact, method: str, payload: object) -> Any:
        """Ask, and ask again for a while when the peer is too busy."""
        deadline = self._deadline()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._send(contact.peer, method, payload, deadline)
            except PeerBusy:
                if deadline.remaining_s < 2 * wait_s:
                    raise
                await asyncio.sleep(wait_s * self._endpoint.network.random.uniform(0.75, 1.25))
                wait_s *= 2

    def _deadline(self) -> Deadline:
        return Deadline.after(self._settings.call_s * self._settings.patience)

    async def _send(self, peer: Peer, method: str, payload: object, deadline: Deadline | None) -> Any:
        into = _allocate if method == FIND else None  # only records may be large
        reply = await self._endpoint.datagrams.call(
            peer, method, payload, deadline=deadline or self._deadline(), into=into
        )
        return reply.buffers[0] if reply.buffers else reply.payload

    def _read(self, peer: Peer, method: str, payload: Any) -> Any:
        try:
            return _decoders[method].decode(payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise self._nonsense(peer, f"its answer to {method} is not as it should be: {error}.") from None

    def _nonsense(self, peer: Peer | Contact, cause: str) -> ShoalError:
        who = peer.peer if isinstance(peer, Contact) else peer
        if isinstance(peer, Contact):
            self._table.on_failed(peer, self._endpoint.datagrams.loop.time())
        return ProtocolError(
            f"{who} does not follow the DHT's protocol.",
            cause=cause,
            next_step="run the same Shoal version everywhere; `shoal status` tells which peers have another.",
        )


def _allocate(head: Head) -> list[bytearray]:
    """Memory for an answer that does not fit into datagrams."""
    if not head.sizes:
        return []
    if head.total_bytes > _MAX_ANSWER_BYTES:
        raise ProtocolError(
            f"{head.peer} answers with {head.total_bytes:,} bytes.", cause="no record is so large."
        )
    return [bytearray(size_bytes) for size_bytes in head.sizes]
