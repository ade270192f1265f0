"""How long a batch waits for its experts: until each sample has enough answers, and a little for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.core import Deadline, Scope, running_clock


class Patience:
    """The rule: `k_min` answers for each sample before `deadline`; then `after_s` for the others.

    Without `after_s` the others are waited for as long as answers keep coming: until none came for three
    times as long as it took to have enough, or for `quiet_s` where that is longer.
    """

    def __init__(
        self, k_min: int, deadline: Deadline | None, after_s: float | None, quiet_s: float = 1.0
    ) -> None:
        self.k_min = max(1, k_min)  # who needs none would rather have one
        self.deadline = deadline
        self.after_s = after_s
        self.quiet_s = quiet_s


@dataclass(slots=True)
class Call:
    """One expert's part of a batch."""

    ask: Callable[[], Coroutine[Any, Any, bool]]
    """True is an answer."""
    rows: torch.Tensor
    """The samples that it is for."""
    is_relied_on: bool = True
    """Whether samples that lack answers wait for it; else only those do that can rely on no other."""


async def ask_all(calls: Sequence[Call], num_samples: int, patience: Patience) -> bool:
    """Run all calls at once. Late ones are cut off: those that nobody needed any more, when it gives True."""
    clock = running_clock()
    began_s = clock.now_s()
    waiting = _Waiting(calls, num_samples, patience.k_min)

    async def one(call: Call) -> None:
        waiting.ended(call, is_answered=await call.ask())

    async with Scope("experts") as scope:
        for call in calls:
            scope.start(one(call))
        deadline = patience.deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline.timeout_s):
                await waiting.is_enough.wait()
                await _the_others(waiting, patience, clock.now_s() - began_s)
        except TimeoutError:
            scope.cancel()
    return waiting.is_enough.is_set()


async def _the_others(waiting: _Waiting, patience: Patience, elapsed_s: float) -> None:
    if patience.after_s is not None:
        async with asyncio.timeout(patience.after_s):
            await waiting.is_all.wait()
        return
    while not waiting.is_all.is_set():
        waiting.has_moved.clear()
        async with asyncio.timeout(max(patience.quiet_s, 3 * elapsed_s)):
            await waiting.has_moved.wait()


class _Waiting:
    """Tells when every sample has enough answers or can have no more, and when all calls have ended."""

    def __init__(self, calls: Sequence[Call], num_samples: int, k_min: int) -> None:
        self.is_enough = asyncio.Event()
        self.is_all = asyncio.Event()
        self.has_moved = asyncio.Event()
        self._num_calls = len(calls)
        self._num_relied_on = _count([call for call in calls if call.is_relied_on], num_samples)
        """Of each sample: calls that are open or answered."""
        self._num_open = self._num_relied_on.clone()
        self._num_open_others = _count([call for call in calls if not call.is_relied_on], num_samples)
        self._lacking = torch.full_like(self._num_open, k_min)
        self._update()

    def ended(self, call: Call, *, is_answered: bool) -> None:
        """A call is over."""
        self._num_calls -= 1
        (self._num_open if call.is_relied_on else self._num_open_others)[call.rows] -= 1
        if call.is_relied_on and not is_answered:
            self._num_relied_on[call.rows] -= 1
        if is_answered:
            self._lacking[call.rows] -= 1
        self._update()

    def _update(self) -> None:
        if self._num_calls == 0:
            self.is_all.set()
        if not self.is_enough.is_set():
            num_awaited = torch.where(self._num_relied_on > 0, self._num_open, self._num_open_others)
            if not bool(((self._lacking > 0) & (num_awaited > 0)).any()):
                self.is_enough.set()
        self.has_moved.set()


def _count(calls: Sequence[Call], num_samples: int) -> torch.Tensor:
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(call.rows for call in calls)])
    return torch.bincount(rows, minlength=num_samples)
