"""Which of two values stays: the later one, and what is owned only yields to its owner.

Storage, cache and reads of several replicas all decide here. A slot takes the place of the one under the same
subkey; a plain value takes the place of a whole dictionary, and a subkey that of a plain value. Reserved
subkeys (`ownership`) show by themselves that they belong where they are, so that no plain value takes their
place or keeps them out, unless another peer owns it. This file knows neither time nor room: what is over, too
large or too much is for those who keep the slots, as signatures are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core import PeerId
from shoal.core.ids import ID_BYTES
from shoal.dht.ownership import holder_of, reserved
from shoal.dht.records import PLAIN, Slot, Verdict
from shoal.dht.subkeys import decode_subkey

Contents = Slot | dict[bytes, Slot]
"""What one key holds: a slot that is alone, or several by subkey. An only slot may be of either kind."""
_MARK = reserved(PeerId(bytes(ID_BYTES)))[0].encode()


def is_reserved(slot: Slot) -> bool:
    """Whether it is under a subkey that is its owner's alone, if its signature is good."""
    if not slot.owner or _MARK not in slot.subkey:
        return False
    try:
        return holder_of(decode_subkey(slot.subkey)) is not None
    except ValueError:
        return False


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
    """Whether it may take the place of live slots: as the latest, and the only owner of those owned.

    A reserved subkey need not be later than a plain value, which never takes a reserved one's place.
    """
    for other in held:
        if other.owner and other.owner != slot.owner:
            return Verdict.NOT_OWNER
    if slot.subkey == PLAIN and any(map(is_reserved, held)):
        return Verdict.NOT_OWNER
    for other in held:
        if other.expires_at_s >= slot.expires_at_s and not (other.subkey == PLAIN and is_reserved(slot)):
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

    A replica that lies cannot hide what is owned behind a later value of its own, nor a dictionary with
    reserved subkeys behind any plain value. Otherwise a plain value and a dictionary are told apart by how
    many replicas tell each. Signatures are for the caller to check.
    """
    told = [[slot for slot in slots if slot.expires_at_s > now_s] for slots in replicas]
    is_plain = _is_plain(told)
    best: dict[bytes, Slot] = {}
    live = [slot for slots in told for slot in slots if (slot.subkey == PLAIN) is is_plain]
    for slot in sorted(live, key=lambda slot: (not slot.owner, -slot.expires_at_s)):
        best.setdefault(slot.subkey, slot)
    return list(best.values())


def _is_plain(told: Sequence[Sequence[Slot]]) -> bool:
    """Whether a plain value stands against a dictionary: what is reserved, more often told, owned, later."""
    plain = [slot for slots in told for slot in slots if slot.subkey == PLAIN]
    others = [slot for slots in told for slot in slots if slot.subkey != PLAIN]
    if not plain or not others:
        return bool(plain)
    if any(map(is_reserved, others)):
        return False
    num_plain = sum(all(slot.subkey == PLAIN for slot in slots) for slots in told if slots)
    num_others = sum(all(slot.subkey != PLAIN for slot in slots) for slots in told if slots)
    return _weight(num_plain, plain) > _weight(num_others, others)


def _weight(num_replicas: int, slots: Sequence[Slot]) -> tuple[int, bool, float]:
    return num_replicas, any(slot.owner for slot in slots), latest_s(slots)
