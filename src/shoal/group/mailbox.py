"""Tensors that have come over the mesh, and those that are waited for: each finds its counterpart by its key.

What was asked for before it came is received where it belongs. What nobody has asked for yet lies in memory
of the mailbox, up to a bound; beyond it a sender is told to keep its tensor until it is asked for. For any
thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import torch

from shoal.core import ShoalError, TensorError
from shoal.group.mesh_handle import MeshHandle
from shoal.tensors.memory import copy_into, tensor_over
from shoal.transport import BufferPool, byte_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

Key = tuple[int | str, ...]
T = TypeVar("T")
_Lines = dict[Key, collections.deque[T]]


class NoRoom(ShoalError):
    """The tensor must wait at its sender until somebody asks for it."""


class Wanted(msgspec.Struct, eq=False):
    """A tensor that somebody waits for."""

    source: int | None
    into: torch.Tensor | None
    handle: MeshHandle[torch.Tensor | None]

    def takes(self, source: int) -> bool:
        """Whether one from there will do."""
        return self.source is None or self.source == source


class Coming(msgspec.Struct, eq=False):
    """A tensor whose bytes are arriving."""

    message: object
    """What it comes with, kept because its id names it."""
    source: int
    key: Key
    tensor: torch.Tensor
    """Flat, uint8."""
    wanted: Wanted | None


class Mailbox:
    """Everything that was sent to this worker and is not taken yet, and everything that it waits for."""

    def __init__(self, max_unclaimed_bytes: int) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self.unclaimed_bytes = 0
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._wanted: dict[Key, collections.deque[Wanted]] = {}
        self._arrived: dict[Key, collections.deque[Coming]] = {}
        self._kept: dict[Key, collections.deque[int]] = {}
        """Who keeps a tensor of this key until it is asked for."""
        self._coming: dict[int, Coming] = {}

    def want(
        self, source: int | None, key: Key, into: torch.Tensor | None, handle: MeshHandle[torch.Tensor | None]
    ) -> int | None:
        """Finish the handle with this tensor, now or when it comes; who keeps it and must be asked."""
        wanted = Wanted(source, into, handle)
        with self._lock:
            arrived = _take(self._arrived, key, lambda coming: wanted.takes(coming.source))
            if arrived is None:
                self._wanted.setdefault(key, collections.deque()).append(wanted)
                return _take(self._kept, key, wanted.takes)
            self.unclaimed_bytes -= arrived.tensor.nbytes
        if into is None:
            handle.finish(arrived.tensor)
        elif into.nbytes != arrived.tensor.nbytes:
            handle.finish(_other_size(arrived.source, key, arrived.tensor.nbytes, into.nbytes))
        else:
            copy_into(flat_bytes(into), arrived.tensor)
            handle.finish(into)
        return None

    def expect(self, message: object, source: int, key: Key, size_bytes: int) -> memoryview:
        """Memory for a tensor that begins to arrive; `message` names it to `complete`.

        NoRoom when it must wait at its sender; TensorError when it is not of the size that is wanted.
        """
        with self._lock:
            wanted = _take(self._wanted, key, lambda wanted: wanted.takes(source))
            into = None if wanted is None else wanted.into
            if into is not None and into.nbytes != size_bytes:
                assert wanted is not None
                error = _other_size(source, key, size_bytes, into.nbytes)
                wanted.handle.finish(error)
                raise error
            if wanted is None:
                if self.unclaimed_bytes + size_bytes > self._max_unclaimed_bytes:
                    self._kept.setdefault(key, collections.deque()).append(source)
                    raise NoRoom(NO_ROOM)
                self.unclaimed_bytes += size_bytes
            tensor = self._memory(size_bytes) if into is None else flat_bytes(into)
            self._coming[id(message)] = Coming(message, source, key, tensor, wanted)
        return view_of(tensor)

    def complete(self, message: object) -> MeshHandle[torch.Tensor | None] | None:
        """All bytes of a tensor are here; the handle that this has finished."""
        with self._lock:
            coming = self._coming.pop(id(message))
            wanted = coming.wanted
            if wanted is None:
                wanted = _take(self._wanted, coming.key, lambda wanted: wanted.takes(coming.source))
                if wanted is None:
                    self._arrived.setdefault(coming.key, collections.deque()).append(coming)
                    return None
                self.unclaimed_bytes -= coming.tensor.nbytes
        if wanted.into is None:
            wanted.handle.finish(coming.tensor)
        elif wanted.into.nbytes != coming.tensor.nbytes:
            size_bytes = coming.tensor.nbytes
            wanted.handle.finish(_other_size(coming.source, coming.key, size_bytes, wanted.into.nbytes))
        else:
            if coming.wanted is None:
                copy_into(flat_bytes(wanted.into), coming.tensor)
            wanted.handle.finish(wanted.into)
        return wanted.handle

    def forget(self, handle: MeshHandle[torch.Tensor | None]) -> bool:
        """Wait no more for this; False when it has come, or is coming."""
        with self._lock:
            before = sum(map(len, self._wanted.values()))
            self._wanted = _without(self._wanted, lambda wanted: wanted.handle is handle)
            return sum(map(len, self._wanted.values())) < before

    def give_up(self, is_hopeless: Callable[[int | None], bool]) -> list[Wanted]:
        """Wait no more for what comes from sources of which `is_hopeless` is true; what was waited for.

        What has arrived from them stays.
        """
        with self._lock:
            hopeless = [
                wanted for line in self._wanted.values() for wanted in line if is_hopeless(wanted.source)
            ]
            self._wanted = _without(self._wanted, lambda wanted: is_hopeless(wanted.source))
            self._kept = _without(self._kept, is_hopeless)
            for token, coming in tuple(self._coming.items()):
                if not is_hopeless(coming.source):
                    continue
                del self._coming[token]
                if coming.wanted is None:
                    self.unclaimed_bytes -= coming.tensor.nbytes
                elif is_hopeless(coming.wanted.source):
                    hopeless.append(coming.wanted)
                else:  # somebody else may send it
                    self._wanted.setdefault(coming.key, collections.deque()).appendleft(coming.wanted)
        return hopeless

    def _memory(self, size_bytes: int) -> torch.Tensor:
        return (
            tensor_over(self._pool.allocate(size_bytes)) if size_bytes else torch.empty(0, dtype=torch.uint8)
        )


NO_ROOM = "there is no room for this tensor until it is asked for."


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor of this machine's own memory; TensorError for any other."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TensorError(
            f"A tensor on {tensor.device} of strides {list(tensor.stride())} cannot travel as it is.",
            next_step="give a contiguous tensor on the CPU.",
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor."""
    return byte_view(cast("Buffer", flat.numpy()))


def _other_size(source: int, key: Key, size_bytes: int, into_bytes: int) -> TensorError:
    return TensorError(
        f"rank {source} sent {size_bytes:,} bytes as {key}, for which there are {into_bytes:,} here.",
        cause="the workers disagree on a tensor's shape or dtype.",
        next_step="call the same operations with equal shapes on all workers.",
    )


def _take(lines: _Lines[T], key: Key, is_it: Callable[[T], bool]) -> T | None:
    line = lines.get(key)
    if line is None:
        return None
    for index, item in enumerate(line):
        if is_it(item):
            del line[index]
            if not line:
                del lines[key]
            return item
    return None


def _without(
    lines: dict[Key, collections.deque[T]], is_out: Callable[[T], bool]
) -> dict[Key, collections.deque[T]]:
    kept = {key: collections.deque(item for item in line if not is_out(item)) for key, line in lines.items()}
    return {key: line for key, line in kept.items() if line}
