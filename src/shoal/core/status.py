"""What a worker tells the launcher that started it: one JSON object a line, over an inherited pipe."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import msgspec

from shoal.core.fork import close_in_children
from shoal.core.run_options import RunOptions

MAX_BYTES = 512
"""What POSIX lets a pipe take in one piece everywhere: lines of several processes never mix."""


def tell_launcher(**message: Any) -> None:
    """Send something short that JSON can carry; does nothing without a launcher, or when it has gone."""
    options = RunOptions.from_environment()
    descriptor = options.status_fd
    if descriptor is None or not _is_pipe(descriptor, options.status_inode):
        return
    os.set_inheritable(descriptor, False)
    close_in_children(descriptor)
    line = msgspec.json.encode(message) + b"\n"
    assert len(line) <= MAX_BYTES, f"{len(line)} bytes for the launcher are more than {MAX_BYTES}"
    with contextlib.suppress(OSError):
        os.write(descriptor, line)


def _is_pipe(descriptor: int, inode: int | None) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and inode in (None, found.st_ino)
