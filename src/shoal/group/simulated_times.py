"""When what is sent over a profile's links arrives, and when a ring has reduced: pure reckoning, no bytes.

Both executors of a simulated world ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core import Address
from shoal.transport import Conditions
from shoal.transport.networks.pipes import Link, Passage


class Links:
    """Between members that are known by their ranks; two of one address reach each other at once.

    What one member sends to another comes in the order in which it was sent, as in a stream.
    """

    def __init__(self, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self._conditions = conditions
        self._addresses = list(addresses)
        self._links: dict[tuple[int, int], Link | None] = {}
        self._last_s: dict[tuple[int, int], float] = {}

    def carry(self, source: int, target: int, now_s: float, size_bytes: int) -> Passage:
        """When it has left the source, and when it arrives."""
        ends = source, target
        if ends not in self._links:
            here, there = self._addresses[source], self._addresses[target]
            self._links[ends] = None if here == there else self._conditions.link(here, there)
        link = self._links[ends]
        if link is None:
            return Passage(now_s, now_s)
        left_s, arrives_s, _ = link.carry_stream(now_s, size_bytes)
        self._last_s[ends] = arrives_s = max(arrives_s, self._last_s.get(ends, 0.0))
        return Passage(left_s, arrives_s)


def ring_ends_s(links: Links, began_s: Mapping[int, float], size_bytes: int) -> dict[int, float]:
    """When each member of a ring has the whole sum, from when each has begun; by rank, in order.

    2(n − 1) hops of one part in n each; a hop is sent when the one before has come, and a member is through
    with it when it has sent its own and received the other's.
    """
    ranks = list(began_s)
    ends_s = [began_s[rank] for rank in ranks]
    hop_bytes = size_bytes // max(1, len(ranks))
    for _ in range(2 * (len(ranks) - 1)):
        passages = [
            links.carry(rank, ranks[(place + 1) % len(ranks)], ends_s[place], hop_bytes)
            for place, rank in enumerate(ranks)
        ]
        ends_s = [
            max(end_s, passages[place].left_at_s, passages[place - 1].arrives_at_s)
            for place, end_s in enumerate(ends_s)
        ]
    return dict(zip(ranks, ends_s, strict=True))
