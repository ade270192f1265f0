"""Log lines about peers that misbehave: one for each, but not five thousand a second."""

from __future__ import annotations

import logging
import threading

from shoal.core import SYSTEM_CLOCK, Clock, Peer

_LINES = 10
_EVERY_S = 1.0
_MAX_TEXT = 500


class Complaints:
    """At most ten lines a second; what was left out is counted in one line. May be used from any thread."""

    def __init__(self, log: logging.Logger, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log = log
        self._clock = clock
        self._since_s = clock.now_s()
        self._num_lines = 0
        self._num_left_out = 0
        self._lock = threading.Lock()

    def add(self, what: str, peer: Peer, why: str) -> None:
        """Say what was done to whom, and why."""
        with self._lock:
            now_s = self._clock.now_s()
            if now_s - self._since_s >= _EVERY_S:
                self._summarize()
                self._since_s, self._num_lines = now_s, 0
            if self._num_lines >= _LINES:
                self._num_left_out += 1
                return
            self._num_lines += 1
        self._log.warning("%s (%s): %s", what, peer, _one_line(why))

    def flush(self) -> None:
        """Tell what was left out so far."""
        with self._lock:
            self._summarize()

    def _summarize(self) -> None:
        if self._num_left_out:
            self._log.warning("and %d more complaints of this kind", self._num_left_out)
            self._num_left_out = 0


def _one_line(text: str) -> str:
    """What a stranger sent may be part of the text: it must not look like further lines of the log."""
    return "".join(character if character.isprintable() else " " for character in text[:_MAX_TEXT])
