"""Records where they belong, at the peers nearest to them, while peers come and go.

Every record should be held by the `num_replicas` peers nearest to its key. When others have come to be these,
one of the holders sends it to all of them: the nearest, or after a while the next, who would have been sent
it by then. Nobody relies on what another should have. The same is done now and then anyway, for what was
missed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.dht.handing import Records, hand
from shoal.dht.wire import Contact, number_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_NEAR = 4  # times the replicas: neighbours among which those of any record held here are found
_GRACE_S = 15.0  # a neighbour that failed may come back: it counts as gone after this
_TURN_S = 10.0  # after which the next nearest holder does what the one before it did not
_APART_S = 20.0  # between two times that a record is sent because of a change
_REPUBLISH_TURN = 0.25  # of `republish_s`, likewise
_KEYS_A_TURN = 500  # of the loop
_KEYS_WATCHED = 200  # at once: their holders are about those of all others here


class _Move(NamedTuple):
    """A record that is to be sent to where it belongs now."""

    due_s: float
    """On the loop's clock."""
    since_s: float
    """On the wall clock: who was sent it later need not send it."""


def new_holders(number: int, before: Sequence[int], now: Sequence[int], num_replicas: int) -> list[int]:
    """The ids that a key's records belong to, if some of them are new to it; nothing otherwise.

    Those to which they belonged before come first, the nearest of them before all others.
    """
    held_by = sorted(before, key=number.__xor__)[:num_replicas]
    belongs_to = sorted(now, key=number.__xor__)[:num_replicas]
    newcomers = [peer for peer in belongs_to if peer not in held_by]
    return [peer for peer in belongs_to if peer in held_by] + newcomers if newcomers else []


class Placing:
    """Looks after the places of the records that one peer holds."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._own = number_of(dht.peer_id.digest)
        self._near: dict[int, float] = {}
        """Neighbours' ids, and when they were last among the nearest."""
        self._settled: list[int] | None = None
        """The neighbours at the last look; None while there are no records."""
        self._met_at_s: dict[int, float] = {}
        """Wall times at which peers were met since the last look."""
        self._moves: dict[bytes, _Move] = {}
        self._num_watched = 0

    # --- as neighbours come and go ---

    def on_met(self, contact: Contact) -> None:
        """Somebody is there who was not known before."""
        self._met_at_s.setdefault(contact.number, self._dht.wall_s())

    def look_around(self) -> Coroutine[Any, Any, None] | None:
        """What there is to do because neighbours have changed."""
        dht = self._dht
        if len(dht.storage) == 0:
            self._near.clear()
            self._moves.clear()
            self._settled = None
            return None
        now_s, wall_s = dht.now_s(), dht.wall_s()
        limit = max(dht.settings.bucket_size, _NEAR * dht.settings.num_replicas)
        since_s = wall_s
        for contact in dht.table.nearest(self._own, limit, now_s=now_s):
            if contact.number not in self._near:
                since_s = min(since_s, self._met_at_s.get(contact.number, wall_s))
            self._near[contact.number] = now_s
        self._met_at_s.clear()
        for number, seen_s in tuple(self._near.items()):
            if seen_s + _GRACE_S <= now_s:
                del self._near[number]
                since_s = min(since_s, wall_s + seen_s - now_s)
        before, self._settled = self._settled, sorted([self._own, *self._near])
        if before is None or before == self._settled:
            is_due = any(move.due_s <= now_s for move in self._moves.values())
            return self._move() if is_due else None
        return self._plan(before, self._settled, since_s)

    async def _plan(self, before: Sequence[int], now: Sequence[int], since_s: float) -> None:
        """See which records belong to others than before, and send those that are due."""
        num_replicas = self._dht.settings.num_replicas
        now_s = self._dht.now_s()
        for turn, key in enumerate(self._dht.storage.keys(), 1):
            holders = new_holders(number_of(key), before, now, num_replicas)
            if self._own in holders:
                self._moves[key] = _Move(now_s + _TURN_S * holders.index(self._own), since_s)
            if turn % _KEYS_A_TURN == 0:
                await asyncio.sleep(0)
        await self._move()

    async def _move(self) -> None:
        """Send what is due and was not sent here by another meanwhile."""
        now_s, wall_s = self._dht.now_s(), self._dht.wall_s()
        due = []
        for key, move in tuple(self._moves.items()):
            if move.due_s <= now_s:
                sent_at_s = self._sent_at_s(key)
                if sent_at_s <= move.since_s and sent_at_s + _APART_S > wall_s:
                    self._moves[key] = move._replace(due_s=now_s + sent_at_s + _APART_S - wall_s)
                    continue
                del self._moves[key]
                if sent_at_s <= move.since_s:
                    due.append(key)
        await self._send(due)

    def companions(self) -> list[Contact]:
        """The peers that some of the records here belong to as well, of other records each time."""
        keys = self._dht.storage.keys()
        start = self._num_watched % len(keys) if keys else 0
        self._num_watched = start + _KEYS_WATCHED
        watched = (keys + keys)[start : start + min(_KEYS_WATCHED, len(keys))]
        return list(dict.fromkeys(contact for key in watched for contact in self._nearest(key)))

    # --- now and then ---

    def republish(self) -> Coroutine[Any, Any, None] | None:
        """Send records again that nobody has sent here for long."""
        oldest_s = self._dht.wall_s() - self._dht.settings.republish_s
        keys = self._dht.storage.keys()
        due = [key for key in keys if self._sent_at_s(key) <= oldest_s]
        return self._republish(due) if due else None

    async def _republish(self, keys: Sequence[bytes]) -> None:
        dht = self._dht
        await dht.find_nearest(dht.peer_id)
        wall_s, republish_s = dht.wall_s(), dht.settings.republish_s
        due = []
        for turn, key in enumerate(keys, 1):
            number = number_of(key)
            rank = sum(contact.number ^ number < self._own ^ number for contact in self._nearest(key))
            if wall_s - self._sent_at_s(key) >= republish_s * (1 + _REPUBLISH_TURN * rank):
                due.append(key)
            if turn % _KEYS_A_TURN == 0:
                await asyncio.sleep(0)
        await self._send(due)

    # --- sending ---

    async def _send(self, keys: Iterable[bytes]) -> None:
        """Have the peers that these records belong to keep them."""
        dht, by_peer = self._dht, dict[Contact, Records]()
        for turn, key in enumerate(keys, 1):
            wall_s = dht.wall_s()
            if slots := dht.storage.get(key, wall_s):
                dht.storage.store(key, slots[0], wall_s)  # as if another had sent it
                for contact in self._nearest(key):
                    by_peer.setdefault(contact, []).append((key, slots))
            if turn % _KEYS_A_TURN == 0:
                await asyncio.sleep(0)
        await hand(dht, by_peer)

    def _nearest(self, key: bytes) -> list[Contact]:
        """The other peers that a record belongs to, as far as this one knows."""
        dht, number = self._dht, number_of(key)
        nearest = dht.table.nearest(number, dht.settings.num_replicas, now_s=dht.now_s())
        if len(nearest) == dht.settings.num_replicas and nearest[-1].number ^ number > self._own ^ number:
            nearest.pop()
        return nearest

    def _sent_at_s(self, key: bytes) -> float:
        """When the writer or another holder has last sent a key's records here; long ago if not at all."""
        sent_at_s = self._dht.storage.stored_at_s(key)
        return -math.inf if sent_at_s is None else sent_at_s
