"""Records that stay: stored again, half of their lifetime before they would expire, for as long as wanted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from shoal.core import Deadline, DeadlineExceeded, UsageError
from shoal.dht.records import Entry, Stored, Verdict
from shoal.dht.spreading import slots_of

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

MakeEntries = Callable[[float], Sequence[Entry]]
"""From the expiration that they should have to the entries themselves, called for every storing."""
MAX_BATCH = 4096
"""Entries that are stored at once."""
_FIRST_RETRY_S = 2.0
_SLACK = 0.05  # of a lifetime: what is due so soon goes along with what is due now


class Kept:
    """Entries that are kept alive until `stop`; afterwards they expire."""

    def __init__(self, make: MakeEntries, lifetime_s: float) -> None:
        self.make = make
        self.lifetime_s = lifetime_s
        self.due_s = -math.inf
        """On the loop's clock: when to store them next."""
        self.num_failures = 0
        """Times in a row that somebody should have taken them and nobody did."""
        self.is_stopped = False
        self._stored: list[Stored] | None = None
        self._was_stored = asyncio.Event()

    def stop(self) -> None:
        """Store them no more."""
        self.is_stopped = True
        self._was_stored.set()

    @property
    def last_stored(self) -> list[Stored]:
        """What became of them last time, in the order of the entries; nothing before the first time."""
        return list(self._stored or ())

    async def stored(self, deadline: Deadline | None = None) -> list[Stored]:
        """Wait until they were tried to be stored once; what became of that."""
        try:
            async with asyncio.timeout((deadline or Deadline.never()).timeout_s):
                await self._was_stored.wait()
        except TimeoutError:
            raise DeadlineExceeded("Records to be kept were not stored before the deadline.") from None
        return self.last_stored

    def on_stored(self, stored: list[Stored]) -> None:
        """Take note of what became of them."""
        self._stored = stored
        self._was_stored.set()


class Keeper:
    """Keeps records alive; `run` does the work, in a task of the DHT's own."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._kept: list[Kept] = []
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, make: MakeEntries, lifetime_s: float) -> Kept:
        """Store what `make` gives, now and again whenever half of `lifetime_s` has passed.

        Call it on the DHT's loop. A storing that fails is tried again soon.
        """
        if not 0 < lifetime_s <= self._dht.settings.max_lifetime_s:
            raise UsageError(
                f"Records cannot be kept with a lifetime of {lifetime_s} s.",
                cause=f"peers take records that live for up to {self._dht.settings.max_lifetime_s:g} s.",
                next_step="give a shorter one: it only says how long they outlive this peer.",
            )
        kept = Kept(make, lifetime_s)
        self._kept.append(kept)
        self._wake.set()
        return kept

    def store_all_again(self) -> None:
        """For a peer that was away: all are due now."""
        for kept in self._kept:
            kept.due_s = -math.inf
        self._wake.set()

    async def run(self) -> None:
        """Store what is due, until cancelled."""
        loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()  # of this loop: a DHT may be opened again on another
        while True:
            self._wake.clear()
            self._kept = [kept for kept in self._kept if not kept.is_stopped]
            now_s = loop.time()
            if any(kept.due_s <= now_s for kept in self._kept):
                await self._store(
                    [kept for kept in self._kept if kept.due_s <= now_s + _SLACK * kept.lifetime_s]
                )
                continue
            next_s = min((kept.due_s for kept in self._kept), default=math.inf)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if next_s == math.inf else next_s):
                    await self._wake.wait()

    async def _store(self, due: list[Kept]) -> None:
        began_s = asyncio.get_running_loop().time()
        parts: list[tuple[Kept, Entry]] = []
        made: dict[Kept, Sequence[Entry]] = {}
        outcomes: dict[Kept, list[Stored]] = {kept: [] for kept in due}
        for kept in due:
            kept.due_s = began_s + kept.lifetime_s / 2
            made[kept] = self._made(kept)
            if self._can_travel(kept, made[kept]):
                parts += [(kept, entry) for entry in made[kept]]
            else:
                outcomes[kept] = [Stored(0, Verdict.BAD_VALUE)] * len(made[kept])
        for start in range(0, len(parts), MAX_BATCH):
            batch = parts[start : start + MAX_BATCH]
            for (kept, _), outcome in zip(batch, await self._store_batch(batch), strict=True):
                outcomes[kept].append(outcome)
        for kept in due:
            self._judge(kept, made[kept], outcomes[kept])

    async def _store_batch(self, batch: list[tuple[Kept, Entry]]) -> list[Stored]:
        """Together, or where that fails each of the kept by itself: the others should live."""
        apart = [list(some) for _, some in itertools.groupby(batch, key=lambda part: part[0])]
        try:
            return await self._dht.store_many([entry for _, entry in batch])
        except Exception:
            if len(apart) == 1:
                log.exception("%d records that are to be kept could not be stored.", len(batch))
                return [Stored(0, Verdict.NOT_ASKED)] * len(batch)
        return [stored for some in apart for stored in await self._store_batch(some)]

    def _made(self, kept: Kept) -> Sequence[Entry]:
        try:
            return kept.make(self._dht.in_s(kept.lifetime_s))
        except Exception:  # the program's own code
            log.exception("Records that are to be kept could not be made.")
            return ()

    def _can_travel(self, kept: Kept, entries: Sequence[Entry]) -> bool:
        try:
            slots_of([structs.replace(entry, is_owned=False) for entry in entries], self._dht.identity)
        except Exception:  # of what the program's own code has made
            if kept.num_failures == 0:
                log.exception("Records that are to be kept cannot be stored.")
            return False
        return True

    def _judge(self, kept: Kept, entries: Sequence[Entry], outcomes: list[Stored]) -> None:
        """Try again soon what nobody took; say so once."""
        refused = [
            (entry, stored.verdict)
            for entry, stored in zip(entries, outcomes, strict=True)
            if not stored and stored.verdict is not Verdict.NOT_NEWER
        ]
        kept.on_stored(outcomes)
        if not refused:
            if kept.num_failures:
                log.info("Records that are to be kept are stored again: %s", _names(entries))
            kept.num_failures = 0
            return
        if kept.num_failures == 0:
            log.warning(
                "%d of %d records that are to be kept were not stored (%s): %s",
                len(refused),
                len(entries),
                refused[0][1].name,
                _names([entry for entry, _ in refused]),
            )
        kept.num_failures += 1
        if any(verdict in _PASSING for _, verdict in refused):
            retry_s = min(_FIRST_RETRY_S * 2.0 ** min(kept.num_failures - 1, 16), kept.lifetime_s / 8)
            kept.due_s = min(kept.due_s, asyncio.get_running_loop().time() + retry_s)


_PASSING = (Verdict.NOT_ASKED, Verdict.FULL)
"""Refusals that may end by themselves."""


def _names(entries: Sequence[Entry]) -> str:
    names = list(dict.fromkeys(repr(entry.name) for entry in entries))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
