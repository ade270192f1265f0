"""How a worker of a group over several machines waits: woken by its mates, or by its streams."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shoal.core import Deadline, DeadlineExceeded
from shoal.group.host import HostGroup

log = logging.getLogger(__name__)
_SPIN_S = 5e-4
_NAP_S = 5e-3
_LINE_EVERY_S = 10.0


class Waiter(Protocol):
    """Waits in the caller's thread."""

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Until `is_done`; a line every ten seconds says what for, and `whom` if that is known."""

    def wake(self) -> None:
        """Look again; from any thread."""


class LocalWait:
    """Beside mates on the same machine, whose bells ring for this worker too."""

    def __init__(self, local: HostGroup) -> None:
        self._local = local

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """As the machine's group waits."""
        self._local.wait_until(is_done, deadline, what, whom)

    def wake(self) -> None:
        """Ring one's own bell."""
        self._local.wake()


class SoloWait:
    """Alone on a machine."""

    def __init__(self, rank: int, timeout_s: float | None) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._bell = threading.Event()  # law: rung by the mesh's loop thread, heard by the caller's

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Spin briefly, then sleep."""
        if deadline is None and self._timeout_s is not None:
            deadline = Deadline.after(self._timeout_s)
        began_s = time.perf_counter()
        next_line_s = began_s + _LINE_EVERY_S
        while True:
            self._bell.clear()
            if is_done():
                return
            now_s = time.perf_counter()
            if now_s - began_s < _SPIN_S:
                time.sleep(0)
                continue
            if deadline is not None and deadline.is_past:
                raise DeadlineExceeded(
                    f"{self._line(what, whom(), now_s - began_s)}: the deadline has passed.",
                    next_step="see what that rank does, or give a longer --peer-timeout.",
                )
            if now_s > next_line_s:
                next_line_s += _LINE_EVERY_S
                log.warning("%s", self._line(what, whom(), now_s - began_s))
            self._bell.wait(_NAP_S)

    def wake(self) -> None:
        """Set the event."""
        self._bell.set()

    def _line(self, what: str, whom: str, waited_s: float) -> str:
        return f"rank {self._rank}: {what}: waiting{' for ' if whom else ''}{whom}, {waited_s:.0f} s"
