"""A worker's output as lines: whole, bounded, and of a progress bar only what it shows now and then.

Bytes stay bytes: what a worker writes need not be UTF-8.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 1 << 16
"""A longer line is cut into pieces: a worker that never ends its line must not fill the memory."""
BAR_INTERVAL_S = 1.0
"""Between two states shown of a line that is rewritten: each costs a line of its own."""
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
"""Movements of the cursor, which mean nothing among the lines of others; colours stay."""


class Lines:
    """Cuts one stream; `feed` gives what goes to a log file, `shown` what goes to a terminal."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._bar = b""
        self._bar_due_s = 0.0

    def feed(self, data: bytes) -> bytes:
        """Take what was read; all lines that are whole now, as they came."""
        head, newline, tail = data.rpartition(b"\n")
        whole = b""
        if newline:
            whole = bytes(self._rest) + head + newline
            self._rest[:] = tail
        else:
            self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            cut = self._rest.rfind(b"\r") + 1 or len(self._rest)
            whole += self._rest[:cut]
            del self._rest[:cut]
        return whole

    def take_rest(self) -> bytes:
        """The last line, without its end: nothing follows it."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def shown(self, whole: bytes) -> list[bytes]:
        """The lines of what `feed` or `take_rest` gave, without their ends, as a terminal shows them last."""
        lines = whole.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if b"\r" in whole:
            lines = [line for line in map(self._settled, lines) if line is not None]
        if b"\x1b[" in whole:
            lines = [_CURSOR.sub(b"", line) for line in lines]
        return lines

    def bar(self, now_s: float) -> list[bytes]:
        """What the line that is being rewritten shows now, if it changed and the last one is old enough."""
        if now_s < self._bar_due_s or b"\r" not in self._rest:
            return []
        text = _last_state(self._rest)
        if not text.strip() or text == self._bar:
            return []
        self._bar, self._bar_due_s = text, now_s + BAR_INTERVAL_S
        return [_CURSOR.sub(b"", text)]

    def _settled(self, line: bytes) -> bytes | None:
        """What a line shows at its end; None when that has been shown, or was wiped out."""
        text = _last_state(line)
        if b"\r" not in line.rstrip(b"\r"):
            return text
        return None if text == self._bar or not text.strip() else text


def _last_state(line: bytes | bytearray) -> bytes:
    return bytes(line.rstrip(b"\r").rpartition(b"\r")[2])
