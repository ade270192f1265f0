"""Who is there: peers that announce themselves under a name, and those who ask for them.

Every peer has a subkey of its own in one dictionary, which it alone can write; it is stored again before it
expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core import Deadline, PeerId
from shoal.dht.records import Entry, Value, encode_value, holder_of, reserved

if TYPE_CHECKING:
    from shoal.dht.node import DHT
    from shoal.dht.replication import Kept

NAMESPACE = "presence"


def announce(dht: DHT, group_name: str, info: Any, lifetime_s: float) -> Kept:
    """Be present with `info` until the handle is stopped, or this peer vanishes, and `lifetime_s` more.

    `info` is a value, or a function without arguments that gives it whenever it is stored again.
    """
    name, subkey = _name_of(group_name), reserved(dht.peer_id)
    if not callable(info):
        encode_value(info)  # what cannot be stored should be said here, not in a log

    def make(expires_at_s: float) -> list[Entry]:
        value = info() if callable(info) else info
        return [Entry(name, value, expires_at_s, subkey, is_owned=True)]

    return dht.keeper.keep(make, lifetime_s)


async def present(
    dht: DHT, group_name: str, *, latest: bool = True, deadline: Deadline | None = None
) -> dict[PeerId, Value]:
    """What each peer that is present has announced, in order of their ids.

    Without `latest` the first answer is taken, which may lack those who have only just come.
    """
    found = await dht.get(_name_of(group_name), latest=latest, deadline=deadline)
    if found is None or not isinstance(found.value, dict):
        return {}
    peers = {
        peer_id: slot
        for subkey, slot in found.value.items()
        if (peer_id := holder_of(subkey)) is not None and slot.owner == peer_id
    }
    return dict(sorted(peers.items()))


def _name_of(group_name: str) -> str:
    return f"{NAMESPACE}.{group_name}"
