"""Who serves which expert: declared in the DHT by the peers that do, and looked up by those that call them.

An expert's own record is a dictionary with a subkey for each peer that serves it, which that peer alone can
write; its value is where to call. Every prefix of the uid has the next coordinate as a subkey, unsigned and
of no meaning beyond its being there: `beam` finds its way by them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.core import Address, Deadline, Peer, PeerId, UsageError
from shoal.core.ids import ID_BYTES
from shoal.dht.records import Entry, Stored, Value, Verdict, holder_of, reserved
from shoal.dht.uids import LONE_COORDINATE, ExpertUid, UidPattern

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_HERE = 1  # under a prefix: that something lies beyond this coordinate
_DRAWS_FOR_EACH = 10
_MAX_ADDRESSES = 8
_MAX_ADDRESS_CHARS = 300


@dataclass(frozen=True, slots=True)
class ExpertAddress:
    """Where an expert can be called."""

    uid: ExpertUid
    peers: tuple[Peer, ...]
    """At least one, those that promise to be there longest first; a peer with several addresses comes more
    than once."""
    expires_at_s: float
    """On the wall clock, of the first peer's promise."""

    @property
    def peer(self) -> Peer:
        """The one to call first."""
        return self.peers[0]


async def declare_experts(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    expires_at_s: float,
    *,
    addresses: Sequence[Address] = (),
    is_owned: bool = True,
    deadline: Deadline | None = None,
) -> dict[ExpertUid, bool]:
    """Tell the swarm that these experts can be called here; which of them can be found now.

    `addresses` are where, this peer's own when there are none. Without `is_owned` declarations are not
    signed: faster, and anybody in the swarm can replace them.
    """
    declared = list(dict.fromkeys(map(ExpertUid.of, uids)))
    entries = expert_entries(dht, declared, expires_at_s, addresses=addresses, is_owned=is_owned)
    stored = await dht.store_many(entries, deadline=deadline)
    num_own = len(declared)
    leads_on = {
        (entry.name, entry.subkey): _is_there(outcome)
        for entry, outcome in zip(entries[num_own:], stored[num_own:], strict=True)
    }
    return {
        uid: bool(outcome) and all(leads_on[step] for step in _steps(uid))
        for uid, outcome in zip(declared, stored[:num_own], strict=True)
    }


def expert_entries(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    expires_at_s: float,
    *,
    addresses: Sequence[Address] = (),
    is_owned: bool = True,
) -> list[Entry]:
    """What declaring stores: a record for each uid in order, then the prefixes', each once."""
    where = [str(address) for address in addresses or _own_addresses(dht)]
    if len(where) > _MAX_ADDRESSES:
        raise UsageError(f"An expert has at most {_MAX_ADDRESSES} addresses at one peer, not {len(where)}.")
    subkey = reserved(dht.peer_id) if is_owned else dht.peer_id.digest
    names = dict.fromkeys(map(ExpertUid.of, uids))
    entries = [Entry(str(uid), where, expires_at_s, subkey, is_owned) for uid in names]
    steps = dict.fromkeys(step for uid in names for step in _steps(uid))
    entries += [Entry(prefix, _HERE, expires_at_s, coordinate) for prefix, coordinate in steps]
    return entries


async def get_experts(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    *,
    latest: bool = False,
    deadline: Deadline | None = None,
    must_end: bool = False,
) -> list[ExpertAddress | None]:
    """Where each of these experts can be called, in their order; None for those that nobody serves.

    `latest` asks every replica, and so finds all peers that serve an expert. None also stands for what could
    not be found out, unless it `must_end`: then that is DeadlineExceeded or PeerUnreachable.
    """
    wanted = [ExpertUid.of(uid) for uid in uids]
    unique = list(dict.fromkeys(wanted))
    names = [str(uid) for uid in unique]
    found = await dht.get_many(names, latest=latest, deadline=deadline, must_end=must_end)
    addresses = {uid: _address_of(uid, value) for uid, value in zip(unique, found, strict=True)}
    return [addresses[uid] for uid in wanted]


async def sample_uids(
    dht: DHT, pattern: str | None, count: int, *, deadline: Deadline | None = None
) -> list[ExpertUid]:
    """So many uids that nobody serves yet, drawn from a pattern such as `ffn.[0:256].[0:1024]`.

    Without a pattern they are the first free ones of `expert.0`, `expert.1`, … Ten are tried for each; when
    that is not enough, fewer come back, with a warning. DeadlineExceeded when it was not found out in time
    whether one is free.
    """
    num_draws = _DRAWS_FOR_EACH * count
    if pattern is None:
        draws = [ExpertUid("expert", (index,)) for index in range(num_draws)]
    else:
        draws = UidPattern.of(pattern).sample(num_draws, dht.endpoint.network.random)
    free: list[ExpertUid] = []
    num_tried = 0
    while len(free) < count and num_tried < len(draws):
        batch = draws[num_tried : num_tried + count - len(free)]
        num_tried += len(batch)
        found = await dht.get_many([str(uid) for uid in batch], deadline=deadline, must_end=True)
        free += [uid for uid, value in zip(batch, found, strict=True) if _address_of(uid, value) is None]
    if len(free) < count:
        log.warning(
            "only %d of %d uids like %s are free: %d were tried", len(free), count, pattern, num_tried
        )
    return free


def _steps(uid: ExpertUid) -> list[tuple[str, int]]:
    """The prefixes that lead to an expert, each with the coordinate that comes next."""
    first, *others = uid.coordinates
    prefix = f"{uid.name}.{first}."
    if not others:
        return [(prefix, LONE_COORDINATE)]
    steps = []
    for coordinate in others:
        steps.append((prefix, coordinate))
        prefix = f"{prefix}{coordinate}."
    return steps


def _is_there(outcome: Stored) -> bool:
    """Whether a prefix leads on: also when another peer has said so, for longer."""
    return bool(outcome) or outcome.verdict is Verdict.NOT_NEWER


def _own_addresses(dht: DHT) -> list[Address]:
    if dht.is_client:
        raise UsageError(
            "This peer cannot be called, so it cannot serve experts.",
            cause="it is a client of the DHT: it listens nowhere.",
            next_step="let it listen, or give the addresses at which the experts are served.",
        )
    return [dht.peer.address]


def _address_of(uid: ExpertUid, found: Value | None) -> ExpertAddress | None:
    if found is None or not isinstance(found.value, dict):
        return None
    signed: dict[PeerId, Value] = {}
    unsigned: dict[PeerId, Value] = {}
    for subkey, slot in found.value.items():
        server = holder_of(subkey)
        if server is not None and slot.owner == server:
            signed[server] = slot
        elif isinstance(subkey, bytes) and len(subkey) == ID_BYTES:
            unsigned[PeerId(subkey)] = slot
    promises = [
        (-slot.expires_at_s, server, peers)
        for server, slot in (unsigned | signed).items()  # what a peer has signed counts
        if (peers := _peers(server, slot.value))
    ]
    if not promises:
        return None
    promises.sort()
    in_order = tuple(peer for _, _, peers in promises for peer in peers)
    return ExpertAddress(uid, in_order, expires_at_s=-promises[0][0])


def _peers(server: PeerId, value: Any) -> list[Peer]:
    """Of what a stranger has written."""
    if not isinstance(value, list):
        return []
    texts = [
        text
        for text in value[:_MAX_ADDRESSES]
        if isinstance(text, str) and len(text) <= _MAX_ADDRESS_CHARS  # longer ones are not to be remembered
    ]
    return [peer for text in texts if (peer := _peer(server, text)) is not None]


@functools.lru_cache(maxsize=4096)
def _peer(server: PeerId, text: str) -> Peer | None:
    """Most experts of a search are at a few peers."""
    try:
        return Peer(Address.parse(text), server)
    except UsageError:
        return None
