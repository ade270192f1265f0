"""Who answers at addresses that this peer was given, and why the others are none to join by."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    UsageError,
    fanout,
)
from shoal.dht.asking import Answered
from shoal.dht.no_dht import explained
from shoal.dht.wire import Contact

if TYPE_CHECKING:
    from shoal.dht.node import DHT

_ENOUGH = 3  # peers that are waited for; those that answer later are met in look-ups
_AT_ONCE = 8


class Met(msgspec.Struct):
    """What came of asking at some addresses."""

    contacts: list[Contact] = []
    """Peers to join by, each once."""
    refusals: list[ShoalError] = []
    """Why the other addresses are none to join by."""
    untimely: UsageError | None = None
    """The first whose clock differs too much."""
    is_here: bool = False
    """Whether this peer itself is at one of them."""
    hosts: dict[str, int] = {}
    """Where its packets come from, and how many of the contacts say so."""

    @property
    def seen_as(self) -> str:
        """The host that most of them see this peer at, of several the first named."""
        return max(self.hosts, key=lambda host: self.hosts[host], default="")

    @property
    def is_first(self) -> bool:
        """Whether this peer is one of those asked, and the only one that is there."""
        silences = (DeadlineExceeded, PeerUnreachable)
        return self.is_here and not self.untimely and all(isinstance(one, silences) for one in self.refusals)


async def ping(dht: DHT, peer: Peer) -> Answered:
    """Ping a peer for the first time; PeerRefused tells of one that has no DHT."""
    try:
        return await dht.asking.call_ping(peer)
    except PeerRefused as error:
        raise explained(error, peer.address) from error


async def meet(dht: DHT, peers: Sequence[Peer]) -> Met:
    """Ping peers, a few at once, until enough of them have answered."""
    met = Met()

    def is_enough(outcomes: Sequence[Answered | Exception]) -> bool:
        return sum(isinstance(one, Answered) and _is_welcome(dht, one) for one in outcomes) >= _ENOUGH

    for start in range(0, len(peers), _AT_ONCE):
        outcomes = await fanout(
            [ping(dht, peer) for peer in peers[start : start + _AT_ONCE]],
            Deadline.after(1.1 * dht.settings.call_s * dht.settings.patience),
            is_enough=is_enough,
        )
        for outcome in outcomes:
            if isinstance(outcome, Answered):
                _take(dht, met, outcome)
            elif isinstance(outcome, ShoalError):
                met.refusals.append(outcome)
            else:
                raise outcome
        if len(met.contacts) >= _ENOUGH:
            break
    return met


def _take(dht: DHT, met: Met, answered: Answered) -> None:
    """Note who has answered, and what it says."""
    if _is_itself(dht, answered.peer):
        met.is_here = True
    elif answered.peer.id == dht.peer_id:
        met.refusals.append(_same_identity(answered.peer))
    else:
        if _clock_gap_s(answered) > dht.settings.max_clock_gap_s:
            met.untimely = met.untimely or _untimely(dht, answered)
        if _is_welcome(dht, answered) and all(one.id != answered.peer.id for one in met.contacts):
            met.contacts.append(dht.book.of(answered.peer))
            with contextlib.suppress(UsageError):  # nonsense
                host = Address.parse(answered.seen_as).host
                met.hosts[host] = met.hosts.get(host, 0) + 1


def _is_welcome(dht: DHT, answered: Answered) -> bool:
    """Whether it is somebody else, with a clock that is right as far as that matters here."""
    is_timely = _clock_gap_s(answered) <= dht.settings.max_clock_gap_s or not dht.settings.is_strict
    return is_timely and answered.peer.id != dht.peer_id


def _clock_gap_s(answered: Answered) -> float:
    """How far its clock and this machine's are apart at least."""
    return abs(answered.clock_gap_s) - answered.round_trip_s / 2


def _is_itself(dht: DHT, peer: Peer) -> bool:
    """Whether it is this very peer, at whichever address: then both ends of the session are here."""
    sessions = dht.endpoint.datagrams.sessions
    return peer.id == dht.peer_id and any(
        session.their_id in sessions for session in sessions.values() if session.peer == peer
    )


def _same_identity(peer: Peer) -> ShoalError:
    return PeerRefused(
        f"{peer.address} has the identity of this peer.",
        peer=peer,
        cause="both use the same identity file, or copies of it.",
        next_step="give one of them another: --identity-file, or SHOAL_STATE for each.",
    )


def _untimely(dht: DHT, answered: Answered) -> UsageError:
    limit_s = dht.settings.max_clock_gap_s
    return UsageError(
        f"The clock of {answered.peer} and this machine's are {_clock_gap_s(answered):.1f} s apart.",
        cause=f"records expire by the wall clock; peers must agree on it within {limit_s:g} s.",
        next_step="set both clocks, for example with NTP.",
    )
