"""Experts are saved while they serve: copied between two batches, written by a thread of its own.

One expert's copy is in memory at a time. A disk that fails stops nobody: it is told of once, and tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.core import LoopThread, ShoalError, UsageError

if TYPE_CHECKING:
    from shoal.experts.checkpoints import Checkpoints
    from shoal.experts.expert import Expert
    from shoal.experts.server import ExpertServer

log = logging.getLogger(__name__)


class Saver:
    """Saves a server's experts when they have changed, on the loop thread `writer`."""

    def __init__(
        self,
        server: ExpertServer,
        checkpoints: Checkpoints,
        writer: LoopThread,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._server = server
        self._checkpoints = checkpoints
        self._writer = writer
        self._about = dict(about or {})
        self._saved: dict[str, tuple[Expert, int]] = {}  # and how many changes it had
        self._is_failing = False
        self._turn = asyncio.Lock()

    async def save(self) -> int:
        """Save every expert that differs from its newest checkpoint; how many could be saved."""
        num_saved = 0
        async with self._turn:
            for expert in tuple(self._server.experts.values()):
                try:
                    num_saved += await self._save(expert)
                except ShoalError as error:
                    if not self._is_failing:
                        log.error("Experts are not saved, which is tried again from now on: %s", error)
                    self._is_failing = True
            self._saved = {uid: saved for uid, saved in self._saved.items() if uid in self._server.experts}
        return num_saved

    async def run(self, every_s: float) -> None:
        """Save now and every so many seconds, until cancelled."""
        if not every_s > 0:
            raise UsageError(f"Experts cannot be saved every {every_s} s.", next_step="give a time above 0.")
        while True:
            await self.save()
            await asyncio.sleep(every_s)

    async def _save(self, expert: Expert) -> bool:
        uid = expert.uid
        known, num_changes = self._saved.get(uid, (None, 0))
        if known is not expert:
            num_updates = await self._writer.run_blocking(lambda: self._checkpoints.num_updates(uid))
            num_changes = 0 if num_updates == expert.num_updates else -1
        if num_changes == expert.num_changes:
            self._saved[uid] = expert, num_changes
            return False
        state, num_changes = await self._server.on_device(lambda: (expert.state(), expert.num_changes))
        await self._writer.run_blocking(lambda: self._checkpoints.save(uid, state, self._about))
        self._saved[uid] = expert, num_changes
        if self._is_failing:
            log.info("Experts are saved again.")
        self._is_failing = False
        return True
