"""Which of two values stays: the later one, and what is owned only yields to its owner.

Storage, cache and reads of several replicas all decide here. A slot takes the place of the one under the same
subkey; a plain value takes the place of a whole dictionary, and a subkey that of a plain value. This file
knows neither time nor room: what is over, too large or too much is for those who keep the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.dht.records import PLAIN, Slot, Verdict

Contents = Slot | dict[bytes, Slot]
"""What one key holds: a slot that is alone, or several by subkey. An only slot may be of either kind."""


def displaced(contents: Contents | None, slot: Slot) -> list[Slot]:
    """The slots whose place it would take."""
    if contents is None:
        return []
    subkey = slot.subkey
    if isinstance(contents, dict):
        if subkey == PLAIN:
            return list(contents.values())
        held = contents.get(subkey)
        return [] if held is None else [held]
    is_same_place = subkey in (contents.subkey, PLAIN) or contents.subkey == PLAIN
    return [contents] if is_same_place else []


def judge(held: Sequence[Slot], slot: Slot) -> Verdict:
    """Whether it may take the place of live slots: as the latest, and the only owner of those owned."""
    for other in held:
        if other.owner and other.owner != slot.owner:
            return Verdict.NOT_OWNER
    for other in held:
        if other.expires_at_s >= slot.expires_at_s:
            return Verdict.NOT_NEWER
    return Verdict.STORED


def place(contents: Contents | None, slot: Slot) -> Contents:
    """What the key holds once the slot is there; a dictionary is changed in place."""
    subkey = slot.subkey
    if contents is None or subkey == PLAIN:
        return slot
    if isinstance(contents, dict):
        contents[subkey] = slot
        return contents
    if contents.subkey in (subkey, PLAIN):
        return slot
    return {contents.subkey: contents, subkey: slot}


def slots_of(contents: Contents | None) -> list[Slot]:
    """All slots of a key."""
    if contents is None:
        return []
    return list(contents.values()) if isinstance(contents, dict) else [contents]


def latest_s(slots: Iterable[Slot]) -> float:
    """When the last of them expires, which is when a dictionary does; 0 when there are none."""
    return max((slot.expires_at_s for slot in slots), default=0.0)


def merge(replicas: Iterable[Iterable[Slot]], now_s: float) -> list[Slot]:
    """One view of what several peers hold of a key; among equals the first one told stays.

    Owned slots are placed before the others: a replica that lies cannot hide them behind a later value.
    Signatures are for the caller to check.
    """
    live = [slot for slots in replicas for slot in slots if slot.expires_at_s > now_s]
    live.sort(key=lambda slot: (not slot.owner, -slot.expires_at_s))
    contents: Contents | None = None
    for slot in live:
        if judge(displaced(contents, slot), slot) is Verdict.STORED:
            contents = place(contents, slot)
    return slots_of(contents)
