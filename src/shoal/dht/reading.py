"""From what a look-up found to what a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, DeadlineExceeded, PeerUnreachable, fanout
from shoal.dht.tracks import Track
from shoal.dht.under_way import MAX_IN_FLIGHT
from shoal.dht.wire import MAX_WANTS, Contact, Want

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_SECOND_CHANCE_S = 0.5


async def ask_those_set_aside(dht: DHT, tracks: Sequence[Track]) -> None:
    """Before a key counts as missing: ask those near it that failed of late, and may be back.

    A machine that stood still for a moment takes the living for dead.
    """
    by_peer: dict[Contact, list[Track]] = {}
    for track in tracks:
        for contact in dht.table.set_aside_near(track.number, dht.settings.num_replicas):
            by_peer.setdefault(contact, []).append(track)
    calls = [
        _ask(dht, contact, some[start : start + MAX_WANTS])
        for contact, some in by_peer.items()
        for start in range(0, len(some), MAX_WANTS)
    ]
    await fanout(calls, Deadline.after(_SECOND_CHANCE_S * dht.settings.patience), limit=MAX_IN_FLIGHT)


async def _ask(dht: DHT, contact: Contact, tracks: Sequence[Track]) -> None:
    found = await dht.call_find(contact, [Want(track.key) for track in tracks])
    for track, finding in zip(tracks, found.findings, strict=True):
        if believed := dht.believed(track.key, finding.slots):
            track.on_value(contact, believed)


def check_ended(tracks: Sequence[Track], *, is_client: bool) -> None:
    """Raise where nothing found does not mean that there is nothing."""
    unanswered = [track for track in tracks if not track.replicas and not track.answered()]
    if any(track.is_done and (track.has_silent or is_client) for track in unanswered):
        raise PeerUnreachable(
            "No peer of the DHT answers.",
            cause="this machine is offline, or the peers that it knew have left.",
            next_step="join by another address; shoal status --join HOST:PORT tells who is there.",
        )
    num_open = sum(not (track.is_done or track.replicas) for track in tracks)
    if num_open:
        raise DeadlineExceeded(
            f"{num_open} of {len(tracks)} look-ups had not ended before the deadline.",
            cause="too few of the peers near the keys answer, or the deadline is too early.",
            next_step="give more time, or raise `patience` in the DHT's settings.",
        )
