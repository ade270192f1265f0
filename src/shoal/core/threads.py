"""Threads that only move bytes: blocking sockets copy without the interpreter's lock, which a loop's do not.

They are the exception to the rule of one loop thread for a process. Whoever needs one asks for it here, and
ends it by closing what it blocks on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal.core.deadlines import Deadline

log = logging.getLogger(__name__)


class ByteThreads:
    """Starts threads that move bytes, and waits for their end."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Does `work` in a thread of its own, which is a daemon: a program that forgets to close can end."""
        thread = threading.Thread(target=_guarded, args=(name, work), name=name, daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def join(self, deadline: Deadline) -> bool:
        """Waits until all have ended; False when one has not before the deadline."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline.remaining_s))
        return not any(thread.is_alive() for thread in threads)


def _guarded(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("%s has ended", name)
