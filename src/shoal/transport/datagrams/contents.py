"""Buffers that travel inside a datagram: from and to the memory of callers and handlers."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.transport.memory import BufferPool
from shoal.transport.messages import Head, Route, fitting_views


def copy_in(pool: BufferPool, buffers: Sequence[bytes]) -> list[memoryview]:
    """The same bytes in aligned memory."""
    if len(buffers) == 1:
        return pool.copy_in([len(buffers[0])], memoryview(buffers[0]))
    views = pool.allocate_all([len(buffer) for buffer in buffers])
    fill_all(views, buffers)
    return views


def memory_for(route: Route, head: Head, buffers: Sequence[bytes], pool: BufferPool) -> Sequence[memoryview]:
    """The same bytes where a handler wants them."""
    if route.allocate is None:
        return copy_in(pool, buffers)
    views = fitting_views(route.allocate(head), head.sizes)
    fill_all(views, buffers)
    return views


def fill_all(views: Sequence[memoryview], buffers: Sequence[bytes]) -> None:
    """Copy each buffer to its place."""
    for view, buffer in zip(views, buffers, strict=True):
        view[:] = buffer
