"""What a client has seen of each server: how fast it answers, how long its queue is, whether it fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from shoal.core import AdaptiveDeadline, Peer
from shoal.experts.settings import ClientSettings

_FLOOR_S = 5.0  # a server is slow long before it is lost: below this nobody is given up
_SUSPECT_S = 5.0  # after a failure, doubled for each further one
_MAX_SUSPECT_S = 120.0
_MAX_DOUBLINGS = 10
_MAX_PEERS = 10_000
_MAX_OVERTAKEN = 3  # in a row, before a server counts as one that fails
_MAX_LATER = 3  # times that a deadline is doubled: who is stopped should not be waited for ever longer
_SMOOTHING = 0.3
_HALF_LIFE_S = 2.0  # of what is known of a server's speed
_RECOVERED = 10.0


class KnownServer:
    """One server, as this client knows it. For any thread."""

    def __init__(self, settings: ClientSettings) -> None:
        self._deadlines = {
            method: AdaptiveDeadline(patience=settings.patience, initial_s=settings.first_s, floor_s=_FLOOR_S)
            for method in ("forward", "backward")
        }
        self._lock = threading.Lock()
        self.num_in_flight = 0
        self.answer_s = 0.0
        """Smoothed, of forward calls."""
        self.waited_s = 0.0
        """Smoothed: how long requests stand in the server's line."""
        self.suspect_until_s = 0.0
        self._num_failures = 0
        self._num_overtaken = 0
        self._seen_s = 0.0

    def timeout_s(self, method: str, size_bytes: int) -> float:
        """How long a call with so many bytes may take, both ways counted."""
        with self._lock:
            return self._deadlines[method].timeout_s(size_bytes)

    def begin(self, method: str, size_bytes: int) -> float:
        """A call to it begins; whoever says so says `end` afterwards.

        Returns its `timeout_s`.
        """
        with self._lock:
            self.num_in_flight += 1
            return self._deadlines[method].timeout_s(size_bytes)

    def end(self) -> None:
        """A call to it has ended, whatever became of it."""
        with self._lock:
            self.num_in_flight -= 1

    def on_answer(self, method: str, seconds: float, size_bytes: int, waited_s: float) -> None:
        """Notes that it has answered a call."""
        with self._lock:
            self._deadlines[method].observe(seconds, size_bytes)
        self.suspect_until_s = 0.0
        self._num_failures = 0
        self._num_overtaken = 0
        self.waited_s += _SMOOTHING * (waited_s - self.waited_s)
        if method == "forward":
            is_first = self.answer_s == 0.0
            # one that has been slow for a while, and is no more, is believed sooner
            share = 1.0 if is_first or seconds < self.answer_s / _RECOVERED else _SMOOTHING
            self.answer_s += share * (seconds - self.answer_s)
            self._seen_s = time.monotonic()

    def on_overtaken(self, seconds: float, now_s: float) -> None:
        """Another replica was faster, or nobody waits for it any more: it takes at least so long."""
        if seconds < self.hedge_s:
            return
        has_never_answered = self.answer_s == 0.0
        self.answer_s = max(self.answer_s, seconds)
        self._seen_s = now_s
        self._num_overtaken += 1
        if has_never_answered or self._num_overtaken >= _MAX_OVERTAKEN:
            self.on_failure(now_s)

    def on_late(self, method: str, now_s: float) -> None:
        """It has not answered in time; calls that were late together are one lateness."""
        if now_s >= self.suspect_until_s and self._num_failures < _MAX_LATER:
            with self._lock:
                self._deadlines[method].missed()
        self.on_failure(now_s)

    def on_failure(self, now_s: float) -> None:
        """It is gone, or answers nonsense: to be asked last for a while."""
        if now_s < self.suspect_until_s:
            return  # it was called before that
        self.suspect_until_s = now_s + min(_MAX_SUSPECT_S, _SUSPECT_S * 2.0**self._num_failures)
        self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)

    def expected_s(self, now_s: float) -> float:
        """How long a call would take now, for choosing among replicas.

        What was seen long ago counts less and less: who was slow then is asked again now and then.
        """
        age = max(0.0, now_s - self._seen_s) / _HALF_LIFE_S
        return (self.answer_s * (1 + self.num_in_flight) + self.waited_s) * math.pow(0.5, age)

    @property
    def hedge_s(self) -> float:
        """When to ask a replica too: longer than nearly all answers take."""
        return max(0.02, 3 * self.answer_s) if self.answer_s else 1.0


class KnownServers:
    """All servers that this client has met."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._servers: dict[object, KnownServer] = {}
        self._peers: dict[Peer, Peer] = {}

    def known_peer(self, peer: Peer) -> Peer:
        """The object that stands for this peer already: what is the same object need not be compared."""
        if len(self._peers) >= _MAX_PEERS:
            self._peers.clear()
        return self._peers.setdefault(peer, peer)

    def of(self, peer: Peer) -> KnownServer:
        """What is known of a server, by its id where that is known."""
        key = peer.id or peer.address
        server = self._servers.get(key)
        if server is None:
            if len(self._servers) >= _MAX_PEERS:
                self._forget_some()
            server = self._servers.setdefault(key, KnownServer(self._settings))
        return server

    def _forget_some(self) -> None:
        """Half of those that nothing is asked of now, the longest known first."""
        idle = [key for key, server in tuple(self._servers.items()) if server.num_in_flight == 0]
        for key in idle[: len(idle) // 2]:
            self._servers.pop(key, None)

    def is_suspect(self, peer: Peer, now_s: float) -> bool:
        """Whether it failed lately."""
        return self.of(peer).suspect_until_s > now_s

    def ranked(self, peers: Sequence[Peer], now_s: float) -> list[Peer]:
        """The servers in the order in which to ask them: fastest first, those that failed lately last.

        One that was never asked counts as fast: it should get its chance.
        """
        return sorted(peers, key=lambda peer: (self.is_suspect(peer, now_s), self.of(peer).expected_s(now_s)))
