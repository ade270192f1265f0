"""Descriptors that children made by fork must not keep.

A DataLoader forks its workers; one that still holds a dead parent's sockets keeps them open, and the peers
learn of the death seconds late. Shoal itself never forks.
"""

from __future__ import annotations

import contextlib
import os

_descriptors: dict[int, None] = {}


def close_in_children(descriptor: int) -> None:
    """Have every later forked child let go of this descriptor first; its number stays taken there."""
    _descriptors[descriptor] = None


def keep_in_children(descriptor: int) -> None:
    """Take it back; call it before the descriptor is closed here, since its number may be used again."""
    _descriptors.pop(descriptor, None)


def _in_child() -> None:
    """Put the null device in their place.

    The child's copy of the object that owned a descriptor closes that number when it is collected; by then a
    closed number could be some file of the child's own.
    """
    if not _descriptors:
        return
    null = None
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in tuple(_descriptors):
        with contextlib.suppress(OSError):
            if null is None:
                os.close(descriptor)
            elif os.fstat(descriptor):  # raises where it is closed already
                os.dup2(null, descriptor, inheritable=False)
    if null is not None:
        os.close(null)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
