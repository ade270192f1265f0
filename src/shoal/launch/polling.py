"""What a poll waits for, and signals as bytes in a pipe, so that one poll waits for them and for all else."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGTSTP)
"""Whoever started this process so (nohup) did it on purpose."""
Interest = tuple[int, int, Callable[[], object]]
"""A descriptor, poll's event (POLLIN, POLLOUT), and what to do when that is there."""


class SignalInbox:
    """While it is open, signals that would end or stop this process are collected instead.

    Python gives signals to its main thread alone: a launcher in another thread leaves them as they are.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self.descriptor, self._writer = -1, -1
        self._earlier_wakeup = -1

    def __enter__(self) -> Self:
        self.descriptor, self._writer = os.pipe()
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            # by this descriptor a signal is not missed that comes just before the selector waits
            self._earlier_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in CAUGHT:
                is_ignored = signal.getsignal(number) is signal.SIG_IGN
                if not is_ignored or number not in _MAY_BE_IGNORED:
                    self._handlers[number] = signal.signal(number, _do_nothing)
            # a parent that ignores it lets the kernel throw the exit codes of our children away
            self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def take(self) -> list[int]:
        """Those that came, in order."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.descriptor, 512) if number in CAUGHT]
        return []

    def stop_here(self) -> None:
        """Stop as SIGTSTP asks, until SIGCONT; does nothing where no shell could let this process go on."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._earlier_wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        for end in (self.descriptor, self._writer):
            os.close(end)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
