"""A swarm that fell apart: halves that share a bootstrap peer find each other again.

Addresses that this peer joined by, and peers that it knew before, are asked now and then who is nearest to
it. Whoever they name and this peer has never met belongs to another half, or has only just come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from shoal.core import Address, Deadline, Peer, ShoalError, fanout
from shoal.dht.meeting import ping
from shoal.dht.wire import ID_BITS, MAX_CONTACTS, Contact, Found, Kind, Want, number_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_MOST_PATIENT = 8
"""Times `check_s`: how seldom is asked while all is well, so that a bootstrap peer serves a large swarm."""
_PINGS_AT_ONCE = 8


class SplitCheck:
    """Asks one address at a time, seldom as long as there is nothing new."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._next_s = -math.inf
        self._wait_s = dht.settings.check_s
        self._turn = 0
        self.num_found = 0
        """Times that another half was found."""

    def check(self) -> Coroutine[Any, Any, None] | None:
        """What there is to do now."""
        now_s = self._dht.now_s()
        if self._next_s == -math.inf:  # right after joining there is nothing to be learnt
            self._put_off(now_s)
        if now_s < self._next_s:
            return None
        self._put_off(now_s)
        self._turn += 1
        addresses = self._addresses()
        return self._ask(addresses[self._turn % len(addresses)]) if addresses else None

    def hurry(self) -> None:
        """Something happened: ask as often as at first."""
        self._wait_s = self._dht.settings.check_s
        self._next_s = -math.inf

    def _put_off(self, now_s: float) -> None:
        self._next_s = now_s + self._wait_s * self._dht.endpoint.network.random.uniform(0.75, 1.25)

    def _addresses(self) -> list[Address]:
        """Join addresses, and of peers known before those that are known no more."""
        dht = self._dht
        here = dict.fromkeys(dht.endpoint.addresses)
        met = dict.fromkeys(contact.peer.address for contact in dht.table.contacts())
        before = [peer.address for peer in dht.joining.known.peers if peer.address not in met]
        return [each for each in dict.fromkeys((*dht.joining.addresses, *before)) if each not in here]

    async def _ask(self, address: Address) -> None:
        dht = self._dht
        try:
            teller = (await ping(dht, Peer(address))).peer
            if teller.id == dht.peer_id:
                return
            contact = dht.book.of(teller)
            found = await dht.asking.call_find(contact, [Want(dht.peer_id.digest, Kind.PEERS)])
        except ShoalError as error:
            log.debug("%s does not tell who is near: %s", address, error)
            self._wait_s = dht.settings.check_s
            return
        await dht.joining.reachability.check_again(contact)
        strangers = [each for each in self._told(found, teller.address) if self._is_stranger(each)]
        nearest = self._nearest()
        met = await self._meet(strangers)
        if not met:
            self._wait_s = min(2 * self._wait_s, _MOST_PATIENT * dht.settings.check_s)
            return
        self._wait_s = dht.settings.check_s
        if min(each.number ^ self._own for each in met) < nearest:
            self._say_so(teller, len(met))
            await dht.rejoin()

    def _told(self, found: Found, teller: Address) -> list[Contact]:
        """Those it names, of as many as it may name."""
        near = [index for index in found.findings[0].near[:MAX_CONTACTS] if index < len(found.contacts)]
        told = [self._dht.book.read(found.contacts[index], teller) for index in near]
        return [contact for contact in told if contact is not None]

    def _is_stranger(self, contact: Contact) -> bool:
        now_s = self._dht.now_s()
        table = self._dht.table
        return contact.number != self._own and contact not in table and not table.is_set_aside(contact, now_s)

    async def _meet(self, strangers: list[Contact]) -> list[Contact]:
        """Those of them that answer."""
        answers = await fanout(
            [self._dht.ping(contact.peer) for contact in strangers], Deadline.never(), limit=_PINGS_AT_ONCE
        )
        return [
            contact
            for contact, answer in zip(strangers, answers, strict=True)
            if not isinstance(answer, Exception)
        ]

    def _nearest(self) -> int:
        """How far the nearest contact is: whoever is nearer would have met this peer when it came."""
        now_s = self._dht.now_s()
        nearest = self._dht.table.nearest(self._own, 1, now_s=now_s)
        return nearest[0].number ^ self._own if nearest else 1 << ID_BITS

    def _say_so(self, teller: Peer, num_met: int) -> None:
        self.num_found += 1
        level = log.warning if self.num_found == 1 else log.debug
        level("This swarm was split: %s knows %d near peers that this one had not met.", teller, num_met)

    @property
    def _own(self) -> int:
        return number_of(self._dht.peer_id.digest)
