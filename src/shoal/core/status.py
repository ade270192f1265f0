"""What a worker tells the launcher that started it: one JSON object a line, over an inherited pipe."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any, Literal

import msgspec

from shoal.core.fork import close_in_children
from shoal.core.run_options import RunOptions

Phase = Literal["joined", "training", "left", "failing"]
"""Where a worker is on its way: in its group, attached to a strategy, out of the group in order, or about to
end by an error."""
MAX_BYTES = 512
"""What POSIX lets a pipe take in one piece everywhere: lines of several processes never mix."""


class Status(msgspec.Struct, frozen=True):
    """What a launcher understands of what a worker tells; what is missing has not changed."""

    survives_loss: bool | None = None
    """Whether the worker trains on when another one is lost."""
    phase: Phase | None = None
    step: int | None = None
    """The optimizer's steps until now."""
    early_step: int | None = None
    """The step at which it was told to exit with code 0, inside of `attach`."""


def tell_launcher(**message: Any) -> None:
    """Send something short that JSON can carry; does nothing without a launcher, or when it has gone."""
    options = RunOptions.from_environment()
    descriptor = options.status_fd
    if descriptor is None or not _is_pipe(descriptor, options.status_inode):
        return
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)  # training does not wait for a launcher that is stopped
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
