"""What is under way over the mesh, seen from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from shoal.core import Deadline, DeadlineExceeded

T = TypeVar("T")
_waiting = threading.Lock()


class MeshHandle(Generic[T]):
    """A result or an error, once there is one; the first that is given counts."""

    __slots__ = ("_ended", "_is_done", "_result", "error", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: Exception | None = None
        self._result: T | None = None
        self._is_done = False
        self._ended: threading.Event | None = None

    def is_done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._is_done

    def result(self) -> T:
        """What has come of it; DeadlineExceeded when nothing has yet."""
        if not self._is_done:
            raise DeadlineExceeded(f"{self.what} is not over yet.", next_step="wait for it first.")
        if self.error is not None:
            raise self.error
        return cast("T", self._result)

    def wait(self, deadline: Deadline | None = None) -> T:
        """The result, when there is one; not for the mesh's own loop, which it would block."""
        if not self._is_done:
            with _waiting:
                ended = self._ended = self._ended or threading.Event()
            # a result that came in this moment may not have seen the event
            if not self._is_done and not ended.wait(None if deadline is None else deadline.timeout_s):
                raise DeadlineExceeded(f"{self.what} was not over before its deadline.")
        return self.result()

    def finish(self, result: T | Exception) -> bool:
        """Give it its end; False when it had one."""
        with _waiting:
            if self._is_done:
                return False
            if isinstance(result, Exception):
                self.error = result
            else:
                self._result = result
            self._is_done = True
            ended = self._ended
        if ended is not None:
            ended.set()
        return True


Wake = Callable[[], None]
"""Called on the mesh's loop: must be quick, and may look at handles only."""
