"""One-sided operations that could not be done when they were asked for, and are tried again.

Those of one lane follow each other. They are tried when somebody looks (`is_done`, `wait`), and whenever the
group makes progress.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic

from shoal.core import Deadline, ShoalError, UsageError
from shoal.group.base import Done, Handle, T
from shoal.group.engine import Engine

Attempt = Callable[[], list[T] | None]
"""Try once, never block: None for 'not yet', else the result alone in a list."""


class Errands:
    """Those of one worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[Hashable, deque[_Errand[Any]]] = {}
        self._guard = threading.Lock()
        self._pid = os.getpid()
        engine.besides = self.progress

    def begin(self, lane: Hashable, what: str, attempt: Attempt[T]) -> Handle[T]:
        """Do it now, or as soon as possible after those before it in its lane."""
        self._engine.check_usable()
        if lane in self._lanes:
            self.progress()
        if lane not in self._lanes:
            result = attempt()
            if result is not None:
                return Done(result[0])
        errand = _Errand(self._engine, what, attempt)
        self._lanes.setdefault(lane, deque()).append(errand)
        return errand

    @property
    def is_busy(self) -> bool:
        """Whether any is left to do."""
        return bool(self._lanes)

    def progress(self) -> None:
        """Try the first of each lane, and those behind it."""
        if not self._lanes or os.getpid() != self._pid or not self._guard.acquire(blocking=False):
            return
        try:
            for lane, errands in tuple(self._lanes.items()):
                while errands and errands[0].is_over():
                    errands.popleft()
                if not errands:
                    self._lanes.pop(lane, None)
        finally:
            self._guard.release()

    def drop(self, is_dropped: Callable[[Hashable], bool], why: str) -> None:
        """Forget those of some lanes: who waits for one gets a UsageError."""
        for lane in [lane for lane in self._lanes if is_dropped(lane)]:
            for errand in self._lanes.pop(lane):
                errand.fail(UsageError(why, next_step="wait for its handle first."))


class _Errand(Handle[T], Generic[T]):
    def __init__(self, engine: Engine, what: str, attempt: Attempt[T]) -> None:
        self._engine = engine
        self._what = what
        self._attempt = attempt
        self._result: list[T] | None = None
        self._error: ShoalError | None = None

    def is_over(self) -> bool:
        """After one more attempt."""
        if self._result is None and self._error is None:
            try:
                self._result = self._attempt()
            except ShoalError as error:
                self._error = error
        return self._is_known()

    def fail(self, error: ShoalError) -> None:
        """There will be no more attempts."""
        self._error = error

    def wait(self, deadline: Deadline | None = None) -> T:
        """While the engine lets all errands make progress."""
        if not self.is_done():
            self._engine.wait_until(self._is_known, deadline, self._what)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result[0]

    def is_done(self) -> bool:
        """After one more attempt of this one and those before it."""
        if not self._is_known():
            self._engine.progress()
        return self._is_known()

    def _is_known(self) -> bool:
        return self._result is not None or self._error is not None
