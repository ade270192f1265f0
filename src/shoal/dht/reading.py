"""From slots to what a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.dht.ownership import owner_id
from shoal.dht.records import PLAIN, Slot, Value
from shoal.dht.subkeys import decode_subkey
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
