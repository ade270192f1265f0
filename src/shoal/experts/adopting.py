"""Experts whose servers are gone are served again: from their checkpoints, by whoever has room.

What counts is the DHT: an expert that nobody serves, twice in a row, and a last time after a random wait in
which another adopter may have been faster. Should two take the same one after all, they are replicas.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from shoal.core import LoopThread, ShoalError, UsageError
from shoal.experts.checkpoints import Checkpoints, SavedExpert
from shoal.experts.serving_peers import is_in_grid, who_serves

if TYPE_CHECKING:
    from shoal.dht.node import DHT
    from shoal.experts.expert import Expert
    from shoal.experts.server import ExpertServer

log = logging.getLogger(__name__)

MakeExpert = Callable[[SavedExpert], "Expert"]
"""A new expert that the saved state fits; it is loaded afterwards. Runs on a thread of its own."""
OnAdopted = Callable[[str], Awaitable[object] | None]
"""Told the uid of an expert that is served from now on: to declare it."""


class Adopting:
    """Has a server take over experts that nobody serves, up to `max_experts` with those that it has.

    Who serves what the folder has is looked up every `every_s`, give or take a half.
    """

    def __init__(
        self,
        server: ExpertServer,
        dht: DHT,
        checkpoints: Checkpoints,
        make_expert: MakeExpert,
        every_s: float,
        *,
        max_experts: int | None = None,
        on_adopted: OnAdopted | None = None,
    ) -> None:
        if not every_s > 0:
            raise UsageError(f"Experts cannot be looked for every {every_s} s.")
        self._server = server
        self._dht = dht
        self._checkpoints = checkpoints
        self._make_expert = make_expert
        self._every_s = every_s
        self._max_experts = max_experts
        self._on_adopted = on_adopted
        self._random = dht.endpoint.network.random
        self._missed: dict[str, None] = {}  # nobody served them last time
        self._num_failures: dict[str, int] = {}
        self._not_before: dict[str, int] = {}  # the round in which one that failed is tried again
        self._round = 0
        self.num_adopted = 0

    async def run(self) -> None:
        """Look for experts that nobody serves, until cancelled."""
        with LoopThread("shoal-adopting") as reader:
            while True:
                await asyncio.sleep(self._every_s * self._random.uniform(0.5, 1.5))
                try:
                    await self.look(reader)
                except ShoalError as error:
                    log.warning("It could not be found out which experts nobody serves: %s", error)

    async def look(self, reader: LoopThread) -> list[str]:
        """One round: adopt what nobody has served in the last one either. The uids that were adopted.

        A round in which it could not be found out who serves what does not count.
        """
        self._round += 1
        saved = await reader.run_blocking(self._checkpoints.uids)
        absent = await self._absent([uid for uid in saved if self._is_wanted(uid)])
        due = [uid for uid in absent if uid in self._missed]
        self._missed = dict.fromkeys(absent)
        self._random.shuffle(due)
        adopted = []
        for uid in due:
            if not self._has_room:
                break
            await asyncio.sleep(self._every_s / 4 * self._random.random())
            is_free = uid not in self._server.experts and await self._absent([uid])
            if is_free and await self._adopt(uid, reader):
                adopted.append(uid)
        return adopted

    @property
    def _has_room(self) -> bool:
        is_full = self._max_experts is not None and len(self._server.experts) >= self._max_experts
        return not (is_full or self._server.is_leaving)

    def _is_wanted(self, uid: str) -> bool:
        is_due = self._not_before.get(uid, 0) <= self._round
        return self._has_room and is_due and uid not in self._server.experts and is_in_grid(uid)

    async def _absent(self, uids: Sequence[str]) -> list[str]:
        found = await who_serves(self._dht, uids) if uids else []
        return [uid for uid, address in zip(uids, found, strict=True) if address is None]

    async def _adopt(self, uid: str, reader: LoopThread) -> bool:
        try:
            expert = await reader.run_blocking(lambda: self._restored(uid))
            await self._server.add(expert)
        except Exception as error:  # noqa: BLE001 - of a checkpoint, or of a class of one's own
            self._num_failures[uid] = self._num_failures.get(uid, 0) + 1
            self._not_before[uid] = self._round + 2 ** min(self._num_failures[uid], 10)
            log.warning("The expert %s could not be adopted: %s", uid, error)
            return False
        self._missed.pop(uid, None)
        self._num_failures.pop(uid, None)
        self._not_before.pop(uid, None)
        self.num_adopted += 1
        log.info(
            "The expert %s, which nobody served, is served here after %d updates.", uid, expert.num_updates
        )
        if self._on_adopted is not None:
            told = self._on_adopted(uid)
            if inspect.isawaitable(told):
                await told
        return True

    def _restored(self, uid: str) -> Expert:
        saved = self._checkpoints.load(uid)
        if saved is None:
            raise UsageError("none of its checkpoints is whole.")
        expert = self._make_expert(saved)
        for warning in expert.load(saved.state):
            log.warning("%s", warning)
        expert.num_changes = 0
        return expert
