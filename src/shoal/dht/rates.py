"""How much one address may ask of this peer: messages and records, each so many a second.

An address is a host, so that a machine gains nothing by more ports; on this machine it is host and port,
since many peers live there.
"""

from __future__ import annotations

from shoal.core import Address, Peer, PeerBusy
from shoal.core.limits import RateLimiter
from shoal.dht.settings import DHTSettings
from shoal.transport.trust.membership import is_loopback

OWNED_COST = 10
"""What a slot whose signature must be verified is counted as beside itself."""
BURST_S = 4.0
"""So many seconds' worth may come at once."""


def cost_of_find(num_wants: int) -> float:
    """What looking for so many keys is counted as: they share one message."""
    return 1 + max(0, num_wants - 1) / 4


class Rates:
    """What is left to each address; times are the loop's."""

    def __init__(self, settings: DHTSettings) -> None:
        self._settings = settings
        self._messages = RateLimiter(settings.max_messages_a_s, BURST_S * settings.max_messages_a_s)
        self._records = RateLimiter(settings.max_records_a_s, BURST_S * settings.max_records_a_s)

    def take_messages(self, peer: Peer, num: float, now_s: float) -> None:
        """PeerBusy when this peer's address has asked too often."""
        if wait_s := self._messages.take(_asker_of(peer.address), num, now_s):
            raise _too_much(
                f"{peer} asks more than {self._settings.max_messages_a_s:g} times a second",
                wait_s,
                "max_messages_a_s",
            )

    def take_records(self, peer: Peer, num: float, now_s: float) -> None:
        """PeerBusy when this peer's address has stored too much."""
        if wait_s := self._records.take(_asker_of(peer.address), num, now_s):
            raise _too_much(
                f"{peer} stores more than {self._settings.max_records_a_s:g} records a second",
                wait_s,
                "max_records_a_s",
            )


def _asker_of(address: Address) -> Address | str:
    return address if is_loopback(address.host) else address.host


def _too_much(what: str, wait_s: float, setting: str) -> PeerBusy:
    return PeerBusy(
        f"{what}, with others at its host.",
        next_step=f"wait for {wait_s:.2g} s, or raise {setting} in the DHT's settings of the peer asked.",
    )
