"""Becoming part of a swarm: from addresses that are given, or from peers that were there last time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import Address, Deadline, Peer, PeerRefused, PeerUnreachable, ShoalError, UsageError, fanout
from shoal.core.ids import ID_BYTES
from shoal.dht.asking import Answered
from shoal.dht.contacts import ID_BITS, Contact, number_of
from shoal.dht.known_peers import KnownPeers, swarm_tag
from shoal.dht.messages import Kind
from shoal.dht.reachability import check_reachable
from shoal.dht.search import Track

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_ENOUGH = 3  # peers that are waited for; those that answer later are met in look-ups
_KNOWN_AT_ONCE = 8


class Joining:
    """The way into the swarm, and back into it."""

    def __init__(self, dht: DHT, addresses: Sequence[Address], peers_file: Path | None) -> None:
        self._dht = dht
        self.addresses = list(addresses)
        """Where this peer was told to join."""
        self.known = KnownPeers(peers_file, swarm_tag(dht.endpoint.membership))
        self.seen_as = ""
        """The host that others see this peer's packets come from; nothing before one has told."""

    async def join(self) -> int:
        """Become known to the swarm; how many peers answered.

        PeerUnreachable when addresses were given, nobody answers and the settings are strict.
        """
        known = self.known.load()
        num_answered, refusal = await self._meet([Peer(address) for address in self.addresses])
        if not num_answered and known:
            if self.addresses:
                log.warning("No address to join answers; trying %d peers of last time.", len(known))
            num_answered, other = await self._meet(known)
            refusal = refusal or other
        if not num_answered and self.addresses:
            self._complain(refusal)
        return num_answered

    async def rejoin(self) -> int:
        """Meet the swarm again, after being away or alone."""
        peers = [Peer(address) for address in self.addresses]
        num_answered, _ = await self._meet([*peers, *self.known.peers])
        return num_answered

    def remember(self) -> None:
        """Write down who is there, for the next time."""
        self.known.remember(contact.peer for contact in self._dht.table.contacts())
        self.known.save()

    async def _meet(self, peers: Sequence[Peer]) -> tuple[int, ShoalError | None]:
        """Ping peers, then look for this peer's own id, which makes its neighbours known both ways."""
        dht = self._dht
        contacts: list[Contact] = []
        first_error: ShoalError | None = None
        wait_s = dht.settings.call_s * dht.settings.patience
        for start in range(0, len(peers), _KNOWN_AT_ONCE):
            some = peers[start : start + _KNOWN_AT_ONCE]
            outcomes = await fanout(
                [dht.asking.call_ping(peer) for peer in some],
                Deadline.after(1.1 * wait_s),
                is_enough=lambda results: sum(isinstance(one, Answered) for one in results) >= _ENOUGH,
            )
            for outcome in outcomes:
                if isinstance(outcome, Answered):
                    self._learn_own_host(outcome.seen_as)
                    if outcome.peer.id == dht.peer_id:
                        first_error = first_error or self._same_identity(outcome.peer)
                    elif self._is_timely(outcome):
                        contacts.append(dht.book.of(outcome.peer))
                elif isinstance(outcome, ShoalError):
                    first_error = first_error or outcome
                else:
                    raise outcome
            if len(contacts) >= _ENOUGH:
                break
        if contacts:
            await check_reachable(dht, contacts[0])
            track = Track(dht.peer_id.digest, Kind.PEERS, dht.settings.beam)
            await dht.search([track], Deadline.after(4 * wait_s), seeds=contacts)
            await self._fill_gaps(Deadline.after(4 * wait_s))
        return len(contacts), first_error

    def _learn_own_host(self, seen_as: str) -> None:
        with contextlib.suppress(UsageError):  # nonsense
            self.seen_as = Address.parse(seen_as).host

    def _same_identity(self, peer: Peer) -> ShoalError | None:
        """What to say of somebody who answers with this peer's own id."""
        if peer.address in self._dht.endpoint.addresses:
            return None
        return PeerRefused(
            f"{peer.address} has the identity of this peer.",
            peer=peer,
            cause="both use the same identity file, or copies of it.",
            next_step="give one of them another: --identity-file, or SHOAL_STATE for each.",
        )

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

    def _is_timely(self, answered: Answered) -> bool:
        gap_s = abs(answered.clock_gap_s) - answered.round_trip_s / 2
        limit_s = self._dht.settings.max_clock_gap_s
        if gap_s <= limit_s:
            return True
        what = f"The clock of {answered.peer} and this machine's are {gap_s:.1f} s apart."
        cause = f"records expire by the wall clock; peers must agree on it within {limit_s:g} s."
        if self._dht.settings.is_strict:
            raise UsageError(what, cause=cause, next_step="set both clocks, for example with NTP.")
        log.warning("%s Likely cause of trouble: %s", what, cause)
        return True

    def _complain(self, refusal: ShoalError | None) -> None:
        names = ", ".join(map(str, self.addresses))
        secret = " --secret-file FILE" if self._dht.endpoint.membership is not None else ""
        error: ShoalError = PeerUnreachable(
            f"Nobody answers at {names}.",
            cause=(refusal.cause or refusal.what) if refusal is not None else "",
            next_step=f"shoal doctor --join {self.addresses[0]}{secret} looks at the way there and back.",
        )
        if isinstance(refusal, PeerRefused):
            error = refusal
        if self._dht.settings.is_strict:
            raise error
        log.warning("%s It is tried again every %g s.", error, self._dht.settings.check_s)
