"""Descriptors that children made by fork must not keep.

A DataLoader forks its workers; one that still holds a dead parent's sockets keeps them open, and the peers
learn of the death seconds late. Shoal itself never forks.
"""

from __future__ import annotations

import contextlib
import os

_descriptors: dict[int, None] = {}


def close_in_children(descriptor: int) -> None:
    """Have every later forked child close this descriptor first."""
    _descriptors[descriptor] = None


def keep_in_children(descriptor: int) -> None:
    """Take it back; call it before the descriptor is closed here, since its number may be used again."""
    _descriptors.pop(descriptor, None)


def _in_child() -> None:
    for descriptor in tuple(_descriptors):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
