"""Holds a worker's traceback back until it is clear whether the worker ends with it.

When one worker fails, the others soon fail because of it. Who reads the terminal wants the first traceback,
once and whole; which one that is, is known when processes have ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.launch.endings import is_consequence, without_own_numbers

HOLD_S = 1.0
"""A worker that lives on for so long has only printed a traceback."""
LONG_HOLD_S = 5.0
"""One that has lost a peer hardly ever lives on, but its interpreter may take seconds to end."""
ENDING_HOLD_S = 20.0
"""One that has told that it is about to end: on a loaded machine the interpreter takes long for that."""
SAME_S = 30.0
"""A traceback that another worker has shown within this time is not shown again."""
MAX_HELD_BYTES = 1 << 18
_HEADER = b"Traceback (most recent call last):"
_SYNTAX_ERROR = b'  File "'
"""How the report of a syntax error in the program itself begins: it has no header."""


_RANK = re.compile(rb"^\[rank\d+\]:(?: |$)")
"""What torch puts before each line of a traceback once torch.distributed is up; the rank is told anyway."""


class Tracebacks:
    """The stderr of one worker on its way: all from the start of a traceback on is held."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """When the last traceback began; None when something else has followed since it was let go."""
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._is_held = False

    def sift(self, lines: list[bytes], now_s: float) -> list[bytes]:
        """Take lines; those to show now."""
        passed: list[bytes] = []
        if not self._is_held:
            start = next((index for index, line in enumerate(lines) if _begins(line)), None)
            if start is None:
                self.since_s = None
                return lines
            passed, lines = lines[:start], lines[start:]
            self.since_s, self._lines, self._num_bytes, self._is_held = now_s, [], 0, True
        lines = [_bare(line) for line in lines]
        self._lines += lines
        self._num_bytes += sum(map(len, lines))
        if self._num_bytes > MAX_HELD_BYTES:
            passed += self.release()
        return passed

    def release_due(self, now_s: float, *, is_ending: bool = False) -> list[bytes]:
        """What has been held for too long, for a worker that has told that it is about to end, or has not."""
        if not self._is_held or self.since_s is None or now_s < self.since_s + HOLD_S:
            return []
        if now_s < self.since_s + LONG_HOLD_S and is_consequence(self.error):
            return []
        return [] if is_ending and now_s < self.since_s + ENDING_HOLD_S else self.release()

    def release(self) -> list[bytes]:
        """Whatever is held."""
        if not self._is_held:
            return []
        self._is_held = False
        return self._lines

    @property
    def lines(self) -> list[bytes]:
        """The last traceback and what followed it, held or not."""
        return [] if self.since_s is None else self._lines

    @property
    def error(self) -> str:
        """The line of it that names the error; '' when there is none."""
        return last_error(self.lines)


def last_error(lines: Sequence[bytes]) -> str:
    """'ValueError: too large' of a traceback; of several that follow from each other, the last."""
    index = _index_of_error(lines)
    return "" if index is None else _bare(lines[index]).decode(errors="replace")


class ShownTracebacks:
    """What has been shown of all workers of a run, so that workers that fail alike show it once."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, float]] = {}
        """By the text, without what is a worker's own: who showed it, and when."""

    def is_known(self, rank: int, lines: Sequence[bytes], now_s: float) -> bool:
        """Whether another worker has shown this traceback within SAME_S; if not, this one counts as shown."""
        end = _end_of_error(lines)
        if end == 0:
            return False
        text = without_own_numbers(b"\n".join(lines[:end]).decode(errors="replace"))
        by, at_s = self._shown.get(text, (rank, now_s))
        if by != rank and now_s < at_s + SAME_S:
            return True
        self._shown[text] = rank, now_s
        return False

    def shorten(self, rank: int, lines: list[bytes], now_s: float) -> list[bytes]:
        """A block of lines that begins with a traceback; a line instead of that if another has shown it."""
        if not self.is_known(rank, lines, now_s):
            return lines
        return [
            f"{last_error(lines)} (another rank has shown this traceback)".encode(),
            *lines[_end_of_error(lines) :],
        ]


def _index_of_error(lines: Sequence[bytes]) -> int | None:
    """The line that names the error; of several tracebacks that follow from each other, the last."""
    found, is_inside = None, False
    for index, line in enumerate(map(_bare, lines)):
        if _begins(line):
            is_inside = True
        elif is_inside and line and not line[:1].isspace():
            found, is_inside = index, False
    return found


def _end_of_error(lines: Sequence[bytes]) -> int:
    """Behind the traceback and what its error says in further lines; 0 when there is no whole one."""
    index = _index_of_error(lines)
    if index is None:
        return 0
    end = index + 1
    while end < len(lines) and lines[end][:1].isspace():
        end += 1
    return end


def _begins(line: bytes) -> bool:
    return _HEADER in line or _bare(line).startswith(_SYNTAX_ERROR)


def _bare(line: bytes) -> bytes:
    return _RANK.sub(b"", line)
