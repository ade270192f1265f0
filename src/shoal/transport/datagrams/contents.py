"""Buffers that travel inside a datagram: from and to the memory of callers and handlers."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core import LimitExceeded
from shoal.transport.limits import Limits
from shoal.transport.memory import BufferPool


def check_sizes(sizes: Sequence[int], limits: Limits) -> None:
    """LimitExceeded when a message's buffers are more than this peer takes."""
    total_bytes = sum(sizes)
    if total_bytes > limits.max_message_bytes or len(sizes) > limits.max_buffers:
        raise LimitExceeded(
            f"a message of {total_bytes:,} bytes in {len(sizes):,} buffers is above the limit of "
            f"{limits.max_message_bytes:,} bytes in {limits.max_buffers:,}.",
            next_step="send less at once, or raise the receiver's limits.",
        )


def copy_in(pool: BufferPool, buffers: Sequence[bytes]) -> list[memoryview]:
    """The same bytes in aligned memory."""
    if len(buffers) == 1:
        return pool.copy_in([len(buffers[0])], memoryview(buffers[0]))
    views = pool.allocate_all([len(buffer) for buffer in buffers])
    fill_all(views, buffers)
    return views


def fill_all(views: Sequence[memoryview], buffers: Sequence[bytes]) -> None:
    """Copy each buffer to its place."""
    for view, buffer in zip(views, buffers, strict=True):
        view[:] = buffer
