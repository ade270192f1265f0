"""Where received bytes lie: 64-byte aligned memory that is used again once nobody looks at it any more."""

from __future__ import annotations

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register: kernels give equal bits only on equally aligned data."""
IDLE_S = 10.0
"""Memory of a pool that nobody has needed for so long goes back to the system."""
_POOLED_FROM_BYTES = 64 << 10  # below this malloc is as fast as the pool
_SLAB_BYTES = 64 << 10
_SLAB_ITEM_BYTES = 8 << 10  # a piece that is kept keeps its whole slab: only small pieces come from one


def byte_view(buffer: Buffer) -> memoryview:
    """A flat view of a C-contiguous buffer's bytes, without a copy; BufferError or TypeError otherwise."""
    if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.contiguous:
        return buffer
    view = memoryview(buffer)
    if type(buffer) is bytes or type(buffer) is bytearray:
        return view
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    if view.nbytes == 0:
        return memoryview(bytearray())  # views with a zero in their shape cannot be cast
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def fill(views: Sequence[memoryview], body: memoryview) -> None:
    """Copy `body` into the buffers, one after another."""
    start = 0
    for view in views:
        end = start + len(view)
        view[:] = body[start:end]
        start = end


def aligned_memory(size_bytes: int) -> memoryview:
    """New writable memory on a 64-byte boundary; its content is whatever was there before."""
    return memoryview(_aligned(np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes))


class Cursor:
    """A place in a sequence of buffers that are gone through from front to back, in parts of any size."""

    __slots__ = ("_index", "_offset", "_views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._offset = 0

    def take(self, num_bytes: int) -> list[memoryview]:
        """The next bytes, as pieces of the buffers; there must be as many."""
        pieces = []
        while num_bytes:
            view = self._views[self._index]
            piece = view[self._offset : self._offset + num_bytes]
            num_bytes -= len(piece)
            self._offset += len(piece)
            if self._offset == len(view):
                self._index += 1
                self._offset = 0
            if len(piece):
                pieces.append(piece)
        return pieces


class BufferPool:
    """Hands out aligned memory, and takes it back by itself when the last view of it is gone.

    It matters above 32 MiB, where the C library returns memory to the system each time: allocating and
    filling 64 MiB takes 6.8 ms with it and 18.6 ms without; at 8 MiB it makes no difference. May be used
    from any thread; at most `max_idle_bytes` lie unused. What nobody has needed for `IDLE_S` is given back
    when the pool is next asked: else each size would keep as much as was ever in use of it at once.

    `make_storage` gives memory of a kind of its own, such as what a GPU reads by itself, as an array of so
    many bytes. Such memory is dear: it is kept, what lies unused serves half its size too, and where None is
    given in place of more, plain memory is handed out that does not come back.
    """

    def __init__(
        self,
        max_idle_bytes: int = 256 << 20,
        make_storage: Callable[[int], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._make_storage = make_storage or functools.partial(np.empty, dtype=np.uint8)
        self._is_dear = make_storage is not None
        self._idle: dict[int, list[tuple[float, Any]]] = collections.defaultdict(list)
        """By size class, since when each lies unused: the latest is used again first."""
        self._idle_bytes = 0
        self._clock = clock
        self._trimmed_s = clock()
        self._lock = threading.Lock()
        self._returned: collections.deque[tuple[int, Any]] = collections.deque()
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._slab = _Slab()

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used again."""
        with self._lock:
            self._take_back()
            return self._idle_bytes

    def allocate(self, size_bytes: int) -> memoryview:
        """Writable memory of this size on a 64-byte boundary; its content is whatever was there before."""
        if size_bytes == 0:
            return memoryview(bytearray())
        if size_bytes <= _SLAB_ITEM_BYTES:
            return self._from_slab(size_bytes)
        if size_bytes < _POOLED_FROM_BYTES and not self._is_dear:
            return aligned_memory(size_bytes)
        class_bytes = _size_class(size_bytes)
        with self._lock:
            self._take_back()
            idle = self._idle.get(class_bytes)
            if not idle and self._is_dear:
                class_bytes, idle = self._larger(class_bytes)
            storage = idle.pop()[1] if idle else None
            if storage is not None:
                self._idle_bytes -= class_bytes
            self._trim(self._clock())
        if storage is None:
            storage = self._make_storage(class_bytes + ALIGNMENT_BYTES)
            if storage is None:
                return aligned_memory(size_bytes)
        lease = _aligned(storage, size_bytes)
        # every memoryview and tensor made from the lease keeps it alive; its end is the end of all of them
        self._leases[id(lease)] = weakref.ref(lease, self._returner(id(lease), storage, class_bytes))
        return memoryview(lease)

    def allocate_all(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        """Allocate one buffer for each size."""
        return [self.allocate(size_bytes) for size_bytes in sizes_bytes]

    def copy_in(self, sizes_bytes: Sequence[int], body: memoryview) -> list[memoryview]:
        """New memory that holds the bytes of `body`, cut into buffers of these sizes."""
        size_bytes = len(body)
        if len(sizes_bytes) == 1 and 0 < size_bytes <= _SLAB_ITEM_BYTES:
            slab = self._slab
            start = slab.next_start
            if start + size_bytes <= _SLAB_BYTES:  # as `_from_slab`, for what is done most often
                slab.next_start = (start + size_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES
                view = slab.view[start : start + size_bytes]
            else:
                view = self._from_slab(size_bytes)
            view[:] = body
            return [view]
        views = self.allocate_all(sizes_bytes)
        fill(views, body)
        return views

    def _from_slab(self, size_bytes: int) -> memoryview:
        """A piece of a larger block: what is small should not cost an allocation of its own."""
        slab = self._slab
        start = slab.next_start
        if start + size_bytes > _SLAB_BYTES:
            slab.view, start = self.allocate(_SLAB_BYTES), 0
        end = start + size_bytes
        slab.next_start = (end + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES
        return slab.view[start:end]

    def clear(self) -> None:
        """Give the unused memory back to the system."""
        with self._lock:
            self._returned.clear()
            self._idle.clear()
            self._idle_bytes = 0

    def _trim(self, now_s: float) -> None:
        """Let go of what nobody has needed for long; looked at a few times in that time."""
        if self._is_dear or now_s - self._trimmed_s < IDLE_S / 4:
            return
        self._trimmed_s = now_s
        for class_bytes, idle in self._idle.items():
            num_old = next(
                (at for at, (since_s, _) in enumerate(idle) if now_s - since_s < IDLE_S), len(idle)
            )
            del idle[:num_old]
            self._idle_bytes -= num_old * class_bytes

    def _larger(self, class_bytes: int) -> tuple[int, list[tuple[float, Any]] | None]:
        """The next class, up to twice the size, of which some lies unused; the same class when none does."""
        larger_bytes = class_bytes
        while (larger_bytes := _size_class(larger_bytes + 1)) <= 2 * class_bytes:
            if idle := self._idle.get(larger_bytes):
                return larger_bytes, idle
        return class_bytes, None

    def _take_back(self) -> None:
        now_s = self._clock() if self._returned else 0.0
        while self._returned:
            class_bytes, storage = self._returned.popleft()
            if self._idle_bytes + class_bytes <= self._max_idle_bytes:
                self._idle[class_bytes].append((now_s, storage))
                self._idle_bytes += class_bytes

    def _returner(self, lease_id: int, storage: Any, class_bytes: int) -> Any:
        def give_back(_: object) -> None:
            # may run inside any allocation of any thread: take no lock that this thread may hold already
            self._leases.pop(lease_id, None)
            self._returned.append((class_bytes, storage))
            if self._lock.acquire(blocking=False):
                try:
                    self._take_back()
                finally:
                    self._lock.release()

        return give_back


class _Slab(threading.local):
    """A block that one thread cuts small pieces from; it lives as long as any piece of it."""

    next_start = _SLAB_BYTES
    view = memoryview(b"")


def _aligned(storage: Any, size_bytes: int) -> Any:
    start = -storage.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return storage[start : start + size_bytes]


def _size_class(size_bytes: int) -> int:
    """Round up to a quarter of a power of two: at most a quarter is wasted, and sizes meet again."""
    step = 1 << max(0, size_bytes.bit_length() - 3)
    return -(-size_bytes // step) * step
