"""Becoming part of a swarm: from addresses that are given, or from peers that were there last time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import Address, Deadline, Peer, PeerRefused, PeerUnreachable, ShoalError, fanout
from shoal.core.ids import ID_BYTES
from shoal.dht.known_peers import KnownPeers, swarm_tag
from shoal.dht.meeting import Met, meet
from shoal.dht.reachability import Reachability
from shoal.dht.tracks import Track
from shoal.dht.wire import ID_BITS, Found, Kind, Want, number_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_PLACES, _TELLERS = 16, 3  # where others are asked for, and by whom


class Joining:
    """The way into the swarm, and back into it."""

    def __init__(self, dht: DHT, addresses: Sequence[Address], peers_file: Path | None) -> None:
        self._dht = dht
        self.addresses = list(addresses)
        """Where this peer was told to join."""
        self.known = KnownPeers(peers_file, swarm_tag(dht.endpoint.membership))
        self.reachability = Reachability(dht)
        self.seen_as = ""
        """The host that others see this peer's packets come from; nothing before any has told."""
        self._has_warned_of_clocks = False

    async def join(self) -> int:
        """Become known to the swarm; how many peers answered.

        When addresses were given, the settings are strict and there is nobody to join by: UsageError if their
        clocks are why, else PeerUnreachable or PeerRefused. Who was given its own address may be the first.
        """
        known = self.known.load()
        met = await self._meet([Peer(address) for address in self.addresses])
        if not met.contacts and known:
            if self.addresses:
                log.warning("No address to join answers; trying %d peers of last time.", len(known))
            again = await self._meet(known)
            met.contacts = again.contacts
            met.refusals += again.refusals
            met.untimely = met.untimely or again.untimely
        if not met.contacts and self.addresses:
            self._complain(met)
        self._warn_of_clocks(met)
        return len(met.contacts)

    async def rejoin(self) -> int:
        """Meet the swarm again, after being away or alone; how many peers answered."""
        met = await self._meet([*(Peer(address) for address in self.addresses), *self.known.peers])
        self._warn_of_clocks(met)
        return len(met.contacts)

    def remember(self) -> None:
        """Write down who is there, for the next time."""
        self.known.remember(contact.peer for contact in self._dht.table.contacts())
        self.known.save()

    async def _meet(self, peers: Sequence[Peer]) -> Met:
        """Ping peers, then look for this peer's own id, which makes its neighbours known both ways."""
        dht = self._dht
        met = await meet(dht, peers)
        self.seen_as = met.seen_as or self.seen_as
        if met.contacts:
            wait_s = dht.settings.call_s * dht.settings.patience
            await self.reachability.check(met.contacts)
            track = Track(dht.peer_id.digest, Kind.PEERS, dht.settings.beam)
            await dht.search([track], Deadline.after(4 * wait_s), seeds=met.contacts)
            await self._fill_gaps(Deadline.after(4 * wait_s))
            await self._hear_of_others(Deadline.after(wait_s))
            if self.reachability.has_one_word:
                await self.reachability.check(
                    [one for one in dht.table.contacts() if one not in met.contacts]
                )
        return met

    async def _fill_gaps(self, deadline: Deadline) -> None:
        """Meet somebody in every part of the swarm (Kademlia, section 2.3): look-ups of others depend on it.

        The parts are those that differ from this peer's id in the first bit, in the second and not in the
        first, and so on down to where its nearest neighbour is.
        """
        dht = self._dht
        own = number_of(dht.peer_id.digest)
        shared_bits = {
            ID_BITS - (contact.number ^ own).bit_length(): None for contact in dht.table.contacts()
        }
        gaps = [bits for bits in range(max(shared_bits, default=0)) if bits not in shared_bits]
        random = dht.endpoint.network.random
        tracks = []
        for bits in gaps:
            below = ID_BITS - bits - 1
            number = (own >> below ^ 1) << below | random.getrandbits(below)
            tracks.append(Track(number.to_bytes(ID_BYTES), Kind.PEERS, 1))
        await dht.search(tracks, deadline)

    async def _hear_of_others(self, deadline: Deadline) -> None:
        """Be told of peers everywhere by a few that have been met, so that look-ups begin near their end.

        Those told of are met when a look-up needs them.
        """
        dht = self._dht
        random = dht.endpoint.network.random
        contacts = dht.table.contacts()
        wants = [Want(random.randbytes(ID_BYTES), Kind.PEERS) for _ in range(_PLACES)]
        tellers = random.sample(contacts, min(len(contacts), _TELLERS))
        answers = await fanout([dht.call_find(teller, wants) for teller in tellers], deadline)
        for teller, found in zip(tellers, answers, strict=True):
            if isinstance(found, Found):
                for other in dht.read_contacts(found.contacts, teller.peer.address):
                    if other is not None:
                        dht.table.on_heard_of(other)

    def _warn_of_clocks(self, met: Met) -> None:
        if met.untimely is not None and not self._has_warned_of_clocks:
            self._has_warned_of_clocks = True
            follows = "That peer is left out" if self._dht.settings.is_strict else "Records may be lost"
            log.warning("%s %s: %s", met.untimely.what, follows, met.untimely.cause)

    def _complain(self, met: Met) -> None:
        """Say why there is nobody to join by, unless this peer is the first of a swarm."""
        if met.is_first:
            log.info("Nobody but this peer answers at the addresses to join: a swarm begins here.")
            return
        refusal = met.refusals[0] if met.refusals else None
        names = ", ".join(map(str, self.addresses))
        secret = " --secret-file FILE" if self._dht.endpoint.membership is not None else ""
        error: ShoalError = PeerUnreachable(
            f"Nobody answers at {names}.",
            cause=(refusal.cause or refusal.what) if refusal is not None else "",
            next_step=f"shoal doctor --join {self.addresses[0]}{secret} looks at the way there and back.",
        )
        if met.untimely is not None:
            error = met.untimely
        elif isinstance(refusal, PeerRefused):
            error = refusal
        if self._dht.settings.is_strict:
            raise error
        log.warning("%s It is tried again every %g s.", error, self._dht.settings.check_s)
