"""When what is sent over a profile's links arrives, and when a ring has reduced: times alone, no bytes.

Both executors of a simulated world ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from shoal.core import Address
from shoal.transport import Conditions
from shoal.transport.networks.pipes import Link, Passage

CallAt: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Has something called at a time, in the order of times and, of equal ones, of being asked."""
Over: TypeAlias = Callable[[int, float], None]
"""Is told of a rank, and of a time."""


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


class Ring:
    """An all-reduce on its way: 2(n − 1) hops of one part in n each, from each member to the next.

    A member sends its first hop when it begins, and the following when it has sent the one before and the
    other's has come: at that time, so that whatever else is sent over the same links finds its place between.
    `over` is told when each has the whole sum, as soon as that is known.
    """

    def __init__(
        self, links: Links, call_at: CallAt, ranks: Sequence[int], size_bytes: int, over: Over
    ) -> None:
        self.ranks = tuple(ranks)
        self._links = links
        self._call_at = call_at
        self._over = over
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._num_hops = 2 * (len(ranks) - 1)
        self._hop_bytes = size_bytes // max(1, len(ranks))
        self._num_sent = [0] * len(ranks)
        self._left_s = [0.0] * len(ranks)
        self._comes_s: list[list[float]] = [[] for _ in ranks]
        """Of each member, when each of the hops comes that were sent to it."""

    def begin(self, rank: int, now_s: float) -> None:
        """One member is there; once is enough."""
        place = self._places[rank]
        if not self._num_hops:
            self._over(rank, now_s)
        elif not self._num_sent[place]:
            self._send(place, now_s)

    def _send(self, place: int, now_s: float) -> None:
        following = (place + 1) % len(self.ranks)
        ends = self.ranks[place], self.ranks[following]
        self._left_s[place], arrives_s, _ = self._links.carry(*ends, now_s, self._hop_bytes)
        self._num_sent[place] += 1
        coming = self._comes_s[following]
        coming.append(arrives_s)
        if len(coming) == self._num_sent[following]:
            self._go_on(following)
        if len(self._comes_s[place]) >= self._num_sent[place]:
            self._go_on(place)

    def _go_on(self, place: int) -> None:
        """It is known when a hop is over."""
        num_sent = self._num_sent[place]
        at_s = max(self._left_s[place], self._comes_s[place][num_sent - 1])
        if num_sent == self._num_hops:
            self._over(self.ranks[place], at_s)
        else:
            self._call_at(at_s, partial(self._send, place, at_s))
