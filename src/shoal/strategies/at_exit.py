"""Attachments that nobody has closed when the program ends: a loop without `with` may forget it.

They are closed before their groups, the last one first. In a program that fails they are only detached, so
that the others learn of it (see `group.opening`).
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass

from shoal.group.opening import has_failed
from shoal.strategies.attachment import Attachment


@dataclass(frozen=True, slots=True)
class _Entry:
    attachment: Attachment
    pid: int
    """A forked child inherits the entry, and is no worker."""
    earlier_error: object


_open: list[_Entry] = []


def close_at_exit(attachment: Attachment) -> None:
    """Close it when the program ends, unless `forget` comes before."""
    # each time anew: what was registered last is called first, and so before the group's own end
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _open.append(_Entry(attachment, os.getpid(), getattr(sys, "last_value", None)))


def forget(attachment: Attachment | None) -> None:
    """It is closed."""
    _open[:] = [entry for entry in _open if entry.attachment is not attachment]


def _close_all() -> None:
    for entry in reversed(list(_open)):
        if entry.pid != os.getpid():
            continue
        try:
            entry.attachment.close(is_failed=has_failed(entry.earlier_error))
        except BaseException as error:  # noqa: BLE001 - shown as any other, and the group ends as failed
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
