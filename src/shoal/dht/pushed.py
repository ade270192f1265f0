"""Copies that others have put into this peer's cache: used to answer, never to read.

What is here was checked for its signature and no more: this peer did not look for it itself. It is forgotten
soon, whatever its expiration, so that nobody can speak through this peer for long.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.dht.cache import Cache
from shoal.dht.records import Slot, Verdict
from shoal.dht.settings import DHTSettings

PUSHED_S = 300.0
"""How long a copy is kept at most."""


class Pushed:
    """A cache of its own, so that what strangers send displaces nothing that was looked for."""

    def __init__(self, settings: DHTSettings) -> None:
        self._cache = Cache(settings)
        self._until_s: dict[bytes, float] = {}  # of each key, the oldest first

    def __len__(self) -> int:
        return len(self._cache)

    def store(self, key: bytes, slot: Slot, now_s: float) -> Verdict:
        """Keep a copy for a while."""
        self._forget_old(now_s)
        self._until_s.setdefault(key, now_s + PUSHED_S)
        return self._cache.store(key, [slot], now_s)[0]

    def get(self, key: bytes, now_s: float) -> Sequence[Slot]:
        """What was put here of late."""
        if not self._until_s:
            return ()
        self._forget_old(now_s)
        return self._cache.get(key, now_s)

    def _forget_old(self, now_s: float) -> None:
        while self._until_s:
            key, until_s = next(iter(self._until_s.items()))
            if until_s > now_s:
                return
            del self._until_s[key]
            self._cache.forget(key)
