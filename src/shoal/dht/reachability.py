"""Whether others can call this peer: some are asked to try, from a port that it has never talked to.

One that cannot be called takes part as a client, and serves again once somebody has reached it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, ShoalError
from shoal.dht.wire import Contact
from shoal.transport.introductions import DIAL_BACK, DialBack, DialedBack, read_answer
from shoal.transport.trust.membership import is_loopback

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_PATIENCE_S = 2.0
_MOST_ASKED = 4
_NEEDED = 2  # peers that say the same: one alone may be mistaken, or lie
_NOBODY = ("silent", "refused")


class Reachability:
    """What others say of this peer's port, and what it has made of that."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._is_unreachable = False
        self.has_one_word = False
        """Whether a single peer's word has made this one a client, there being nobody else to ask then."""

    async def check(self, contacts: Sequence[Contact]) -> None:
        """Ask some of these in turn, until one has reached this peer or enough have not.

        Who cannot tell leaves it as it is, and a client by choice stays one.
        """
        dht = self._dht
        if dht.endpoint.network.is_simulated or not dht.settings.checks_reach:
            return
        if dht.is_client and not self._is_unreachable:
            return
        far = [each for each in contacts if not is_loopback(each.peer.address.host)]
        in_vain: list[Contact] = []
        for contact in far[:_MOST_ASKED]:
            is_reached = await _is_dialed_back(dht, contact)
            if is_reached:
                self._serve()
                return
            if is_reached is False:
                in_vain.append(contact)
            if len(in_vain) == _NEEDED:
                break
        if in_vain and len(in_vain) == min(_NEEDED, len(far)):
            self._be_client(in_vain)

    async def check_again(self, contact: Contact) -> None:
        """Ask somebody, if this peer is a client because it could not be called."""
        if self._is_unreachable:
            await self.check([contact])

    def _be_client(self, in_vain: Sequence[Contact]) -> None:
        self.has_one_word = len(in_vain) < _NEEDED and (self.has_one_word or not self._is_unreachable)
        if self._is_unreachable:
            return
        self._is_unreachable = True
        self._dht.become_client()
        log.warning(
            "Others cannot call this peer at UDP port %d: it takes part as a client, and stores nothing for "
            "others. Likely cause: a router or firewall lets no strangers in. Try: shoal doctor --join %s",
            self._dht.endpoint.addresses[0].port,
            in_vain[0].peer.address,
        )

    def _serve(self) -> None:
        if self._is_unreachable:
            self._is_unreachable = self.has_one_word = False
            self._dht.become_server()
            log.warning("Others can call this peer again: it is a client no more.")


async def _is_dialed_back(dht: DHT, contact: Contact) -> bool | None:
    """Whether the peer's packets arrive; None when it does not say."""
    wish = DialBack(dht.endpoint.addresses[0].port, ("udp",), _PATIENCE_S)
    try:
        reply = await dht.endpoint.datagrams.call(
            contact.peer, DIAL_BACK, wish, deadline=Deadline.after(2 * _PATIENCE_S)
        )
        (attempt,) = read_answer(reply, DialedBack, DIAL_BACK).attempts
    except (ShoalError, ValueError):  # too busy, most likely
        return None
    return True if attempt.outcome == "ok" else False if attempt.outcome in _NOBODY else None
