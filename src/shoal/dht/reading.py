"""From what a look-up found to what a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core import DeadlineExceeded, PeerUnreachable
from shoal.dht.ownership import owner_id
from shoal.dht.records import PLAIN, Slot, Value
from shoal.dht.subkeys import decode_subkey
from shoal.dht.tracks import Track
from shoal.dht.values import decode_value


def value_of(slots: Sequence[Slot], wall_s: float) -> Value | None:
    """The value, or dictionary of values, that live slots make; None when there is none that can be read."""
    found: dict[Any, Value] = {}
    for slot in slots:
        if not slot.expires_at_s > wall_s:  # NaN is over too
            continue
        try:
            value = Value(decode_value(slot.value), slot.expires_at_s, owner_id(slot))
            if slot.subkey == PLAIN:
                return value
            found[decode_subkey(slot.subkey)] = value
        except ValueError:  # some peer's nonsense
            continue
    return Value(found, max(value.expires_at_s for value in found.values())) if found else None


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
