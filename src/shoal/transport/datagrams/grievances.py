"""Complaints that are said once: who sends a bad packet sends many."""

from __future__ import annotations

import collections
import math
import re

from shoal.core import Clock, Peer
from shoal.transport.limits import Complaints

_MAX_REMEMBERED = 1024
_AGAIN_S = 600.0
_NUMBER = re.compile(r"\d+")  # in a reason: the same complaint with other figures is no new one


class Grievances:
    """One line for each host and reason in ten minutes, as long as there are not too many of them."""

    def __init__(self, complaints: Complaints, clock: Clock) -> None:
        self._complaints = complaints
        self._clock = clock
        self._said_at_s: collections.OrderedDict[tuple[str, str], float] = collections.OrderedDict()

    def add(self, what: str, peer: Peer, why: str) -> None:
        """Say what was done to whom, and why, unless that was said before."""
        key = (peer.address.host, _NUMBER.sub("", why))
        now_s = self._clock.now_s()
        if now_s - self._said_at_s.get(key, -math.inf) < _AGAIN_S:
            return
        self._said_at_s[key] = now_s
        if len(self._said_at_s) > _MAX_REMEMBERED:
            self._said_at_s.popitem(last=False)
        self._complaints.add(what, peer, why)
