"""Where the lines of workers and the words of the launcher go: a terminal, log files, or a caller's own.

An output never blocks the launcher: a terminal that does not take its lines fills up, the launcher then stops
reading, and the workers wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from shoal.core.errors import UsageError
from shoal.launch.polling import Interest

Stream = Literal["stdout", "stderr"]
MAX_QUEUED_BYTES = 1 << 20
_PIECE_BYTES = 4096
"""What a pipe that is ready takes without blocking."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is cut into pieces: a worker that never ends its line must not fill the memory."""
BAR_INTERVAL_S = 1.0
"""Between two states shown of a line that is rewritten: each costs a line of its own."""
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
"""Movements of the cursor, which mean nothing among the lines of others; colours stay."""


class Output:
    """An output that drops everything; a base for others."""

    is_full = False
    """Whether no more should be read from the workers for now."""
    is_broken = False
    """Whether the reader of what the workers say has gone: nobody wants the run any more."""

    def lines(self, rank: int, stream: Stream, lines: Sequence[bytes]) -> None:
        """Take whole lines of a worker, without their ends."""

    def say(self, text: str) -> None:
        """Take a line of the launcher's own."""

    def interests(self) -> list[Interest]:
        """Say what a poll should wait for to write what is queued; nothing when all is written."""
        return []


class OutputListener(Output):
    """Calls a function with each line; what the launcher says goes to `say`, or nowhere."""

    def __init__(
        self, on_line: Callable[[int, Stream, bytes], None], say: Callable[[str], None] | None = None
    ) -> None:
        self._on_line = on_line
        self._say = say

    def lines(self, rank: int, stream: Stream, lines: Sequence[bytes]) -> None:
        """Pass the lines on, one by one."""
        for line in lines:
            self._on_line(rank, stream, line)

    def say(self, text: str) -> None:
        """Pass the launcher's line on."""
        if self._say is not None:
            self._say(text)


class Terminal(Output):
    """The stdout and stderr of this process, each line with its worker's rank before it."""

    def __init__(self, *, has_prefix: bool = True, descriptors: tuple[int, int] = (1, 2)) -> None:
        self._has_prefix = has_prefix
        # one queue when both are the same file: pieces of lines must not mix
        first = _Target(descriptors[0])
        is_same = os.path.samestat(*map(os.fstat, descriptors))
        self._targets = {"stdout": first, "stderr": first if is_same else _Target(descriptors[1])}

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        """Whether a reader is far behind."""
        return any(len(target.queue) > MAX_QUEUED_BYTES for target in self._targets.values())

    @property
    def is_broken(self) -> bool:  # type: ignore[override]
        """Whether the reader of stdout has gone."""
        return self._targets["stdout"].is_broken

    def lines(self, rank: int, stream: Stream, lines: Sequence[bytes]) -> None:
        """Queue the lines for their stream."""
        prefix = b"[%d] " % rank if self._has_prefix else b""
        self._targets[stream].add(b"".join([prefix + line + b"\n" for line in lines]))

    def say(self, text: str) -> None:
        """Queue the launcher's line for stderr."""
        self._targets["stderr"].add(f"shoal run: {text}\n".encode(errors="backslashreplace"))

    def interests(self) -> list[Interest]:
        """Say where something waits to be written."""
        queued = dict.fromkeys(target for target in self._targets.values() if target.queue)
        return [(target.descriptor, select.POLLOUT, target.write) for target in queued]


class _Target:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.queue = bytearray()
        self.is_broken = False
        self._piece_bytes = MAX_QUEUED_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIECE_BYTES

    def add(self, data: bytes) -> None:
        if not self.is_broken:
            self.queue += data

    def write(self) -> None:
        try:
            del self.queue[: os.write(self.descriptor, self.queue[: self._piece_bytes])]
        except BlockingIOError:
            return
        except OSError:  # its reader has gone, or its disk is full
            self.is_broken = True
            self.queue.clear()


class LogFiles(contextlib.ExitStack):
    """A file for each rank with all that it wrote, as it came; a context manager."""

    def __init__(
        self,
        folder: Path | None,
        num_workers: int,
        say: Callable[[str], None],
        *,
        should_append: bool = False,
    ) -> None:
        super().__init__()
        self._folder = folder
        self._say = say
        self._files: dict[int, IO[bytes]] = {}
        self._mode: Literal["ab", "wb"] = "ab" if should_append else "wb"
        for rank in range(num_workers):
            self.add(rank)

    def add(self, rank: int) -> None:
        """Make the file of one more worker; UsageError when the folder cannot be written."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank-{rank}.log"
            self._files[rank] = self.enter_context(path.open(self._mode, buffering=0))
        except OSError as error:
            self.close()
            raise UsageError(
                f"The log folder {self._folder} cannot be written: {error.strerror}.",
                next_step="name another folder with --log-dir.",
            ) from None

    def write(self, rank: int, data: bytes) -> None:
        """Append; a file that cannot take it is named once and left alone."""
        file = self._files.get(rank)
        try:
            if file is not None:
                file.write(data)
        except OSError as error:
            self._say(f"{self._files.pop(rank).name} cannot be written any more: {error.strerror}")


def settle_own_streams() -> None:
    """Print what is queued before workers print; what is closed becomes the null device.

    A closed descriptor would be taken by the next file, which would then be somebody's stdout.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


class LineSplitter:
    """Cuts a worker's stream into lines: whole, bounded, and of a progress bar what it shows now and then.

    `feed` gives what goes to a log file, `shown` what goes to a terminal. Bytes stay bytes: what a worker
    writes need not be UTF-8.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._bar = b""
        self._bar_due_s = 0.0

    def feed(self, data: bytes) -> bytes:
        """Take what was read; return all lines that are whole now, as they came."""
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
        """Return the last line, without its end: nothing follows it."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def shown(self, whole: bytes) -> list[bytes]:
        """Split what `feed` or `take_rest` gave into lines, as a terminal shows them last."""
        lines = whole.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if b"\r" in whole:
            lines = [line for line in map(self._settled, lines) if line is not None]
        if b"\x1b[" in whole:
            lines = [_CURSOR.sub(b"", line) for line in lines]
        return lines

    def bar(self, now_s: float) -> list[bytes]:
        """Return what a line that is being rewritten shows, if it changed and the last one is old enough."""
        if now_s < self._bar_due_s or b"\r" not in self._rest:
            return []
        text = _last_state(self._rest)
        if not text.strip() or text == self._bar:
            return []
        self._bar, self._bar_due_s = text, now_s + BAR_INTERVAL_S
        return [_CURSOR.sub(b"", text)]

    def _settled(self, line: bytes) -> bytes | None:
        """Return what a line shows at its end; None when that has been shown, or was wiped out."""
        text = _last_state(line)
        if b"\r" not in line.rstrip(b"\r"):
            return text
        return None if text == self._bar or not text.strip() else text


def _last_state(line: bytes | bytearray) -> bytes:
    return bytes(line.rstrip(b"\r").rpartition(b"\r")[2])
