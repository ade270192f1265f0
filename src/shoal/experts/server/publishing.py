"""Experts as a server tells the swarm of them: declared again before they expire, withdrawn at its end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, UsageError
from shoal.dht.node import DHT
from shoal.dht.records import Entry, reserved
from shoal.dht.replication import Kept
from shoal.experts.names import ExpertAddress, ExpertUid, expert_entries, get_experts

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)


_LATER_S = 0.05  # of two records of one peer the one that expires later counts
_SHORT_LIFETIME_S = 10.0


class Publishing:
    """The uids that this peer declares. For the DHT's loop."""

    def __init__(self, dht: DHT, lifetime_s: float) -> None:
        if lifetime_s < _SHORT_LIFETIME_S:
            log.warning(
                "Experts that are declared for %g s are not found whenever a renewal is late: below %g s is "
                "for tests.",
                lifetime_s,
                _SHORT_LIFETIME_S,
            )
        self._dht = dht
        self._lifetime_s = lifetime_s
        self._kept: dict[tuple[str, ...], Kept] = {}
        self._latest_s = 0.0
        self._was_client = False

    @property
    def uids(self) -> list[str]:
        """Those that are declared."""
        return [uid for uids in self._kept for uid in uids]

    async def declare(self, uids: Sequence[str], deadline: Deadline | None = None) -> int:
        """Have them found here from now on; how many already can be."""
        if not uids:
            return 0
        batch = tuple(uids)
        kept = self._dht.keeper.keep(functools.partial(self._entries, batch), self._lifetime_s)
        self._kept[batch] = kept
        stored = await kept.stored(deadline)
        return sum(map(bool, stored[: len(batch)]))

    async def withdraw(self, deadline: Deadline | None = None) -> bool:
        """Have them found here no more; whether the swarm took note of all of it.

        Whoever has looked one up before may remember it for a while. What leads to them in the grid expires
        by itself: others may lie there too.
        """
        uids = self.uids
        for kept in self._kept.values():
            kept.stop()
        self._kept.clear()
        expires_at_s = max(self._dht.in_s(self._lifetime_s), self._latest_s + _LATER_S)
        mine = reserved(self._dht.peer_id)
        nowhere: list[str] = []
        entries = [Entry(uid, nowhere, expires_at_s, mine, is_owned=True) for uid in uids]
        return all(await self._dht.store_many(entries, deadline=deadline))

    def _entries(self, uids: tuple[str, ...], expires_at_s: float) -> Sequence[Entry]:
        if not self._dht.addresses:
            if not self._was_client:
                log.warning("Experts are not declared while others cannot call this peer.")
            self._was_client = True
            return ()
        self._was_client = False
        self._latest_s = max(self._latest_s, expires_at_s)
        return expert_entries(self._dht, uids, expires_at_s)


async def who_serves(dht: DHT, uids: Sequence[str]) -> list[ExpertAddress | None]:
    """Where each of these experts can be called, at all who serve it; None for those that nobody serves.

    DeadlineExceeded or PeerUnreachable when that could not be found out: it is not taken for absence.
    """
    return await get_experts(dht, uids, latest=True, must_end=True)


def is_in_grid(uid: str) -> bool:
    """Whether an expert can be found in the DHT: a plain name such as `expert0` cannot."""
    try:
        ExpertUid.of(uid)
    except UsageError:
        return False
    return True
