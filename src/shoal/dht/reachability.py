"""Whether others can call this peer: one of them is asked to try, from a port that it has never talked to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shoal.core import Deadline, ShoalError
from shoal.dht.contacts import Contact
from shoal.transport.introductions import DIAL_BACK, DialBack, DialedBack, read_answer
from shoal.transport.trust.membership import is_loopback

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

_PATIENCE_S = 2.0


async def check_reachable(dht: DHT, contact: Contact) -> None:
    """Make a client of a peer that others cannot call; who cannot tell leaves it as it is."""
    is_far = not is_loopback(contact.peer.address.host) and not dht.endpoint.network.is_simulated
    if dht.is_client or not (is_far and dht.settings.checks_reach):
        return
    if await _is_dialed_back(dht, contact) is False:
        dht.become_client()
        log.warning(
            "Others cannot call this peer at UDP port %d: it takes part as a client, and stores nothing for "
            "others. Likely cause: a router or firewall lets no strangers in. Try: shoal doctor --join %s",
            dht.endpoint.addresses[0].port,
            contact.peer.address,
        )


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
    return attempt.outcome == "ok"
