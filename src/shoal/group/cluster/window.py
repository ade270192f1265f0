"""One-sided operations between machines: what a worker publishes, its windows and its locks, by calls.

Peers of the same machine use its own group: in a window mates write to shared memory, others by calls to
one's own. A call is answered on the mesh's loop, while the worker itself computes; what both touch is under a
lock that is held only while something is copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from shoal.core import Deadline, DeadlineExceeded, PeerLost, TensorError, UsageError
from shoal.group.base import Done, Handle, Slot, Snapshot, T, Window
from shoal.group.cluster.mesh import MeshHandle, flat_bytes, view_of
from shoal.group.host import HostGroup
from shoal.group.kernels import CopiedSnapshot, Write, WritingWindow, check_write, write_first, write_more
from shoal.tensors.dtypes import DTYPES, dtype_name
from shoal.tensors.memory import tensor_over
from shoal.transport import Head, Reply

if TYPE_CHECKING:
    from shoal.group.cluster.group import TorchGroup

_HELD_S = 1e-4
_READ, _WRITE, _LOCK, _UNLOCK = "group.read", "group.write", "group.lock", "group.unlock"
_SENDS = "group.sends"
_REMEMBERED = 64
_LOOK_S = 2e-4
_SLOWEST_LOOK_S = 5e-3
_MAX_SPARES = 2


class RemoteSlot(Slot):
    """What a worker of another machine has written here; memory of its own from the first write on."""

    def __init__(self, source: int, num_elements: int, dtype: torch.dtype) -> None:
        self.source = source
        self.num_writes = 0
        self.mass = 0.0
        self.note = b""
        self.lock = threading.Lock()
        self.is_held = False
        """By this worker, to read it."""
        self._num_elements = num_elements
        self._dtype = dtype
        self._memory: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """What was written."""
        if self._memory is None:
            self._memory = torch.zeros(self._num_elements, dtype=self._dtype)
        return self._memory

    def clear(self) -> None:
        """The next write starts from nothing."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""

    def take_in(self, write: Write) -> None:
        """One more; the lock is held."""
        if write.kind == "accumulate" and self.num_writes:
            write_more(self.tensor, write)
            self.mass += write.mass
        else:
            write_first(self.tensor, write)
            self.mass = write.mass
        self.note = write.note
        self.num_writes += 1


class Slots:
    """Those of one window at one worker, for sources on other machines."""

    def __init__(self, sources: Sequence[int], num_elements: int, dtype: torch.dtype) -> None:
        self.by_source = {source: RemoteSlot(source, num_elements, dtype) for source in sources}
        self._following = dict.fromkeys(sources, 0)
        """The number of the write that comes next from a source: they are taken in as they were begun."""
        self._size_bytes = num_elements * dtype.itemsize
        self._dtype = dtype

    def check(self, source: int, buffers: Sequence[memoryview]) -> None:
        """UsageError or TensorError for what cannot be written here."""
        if source not in self.by_source:
            raise UsageError(f"there is no slot for rank {source} here.", next_step="name it as a source.")
        if [buffer.nbytes for buffer in buffers] != [self._size_bytes]:
            raise TensorError(
                f"{sum(buffer.nbytes for buffer in buffers)} bytes were written to a window of "
                f"{self._size_bytes}."
            )

    def tensor_in(self, buffers: Sequence[memoryview]) -> torch.Tensor:
        """What came."""
        return tensor_over(buffers[0]).view(self._dtype)

    def try_write(self, source: int, number: int, write: Write) -> bool:
        """Take a write in, unless an earlier one is missing, its slot is held, or full for a send."""
        slot = self.by_source[source]
        if number != self._following[source] or (write.kind == "send" and slot.num_writes):
            return False
        if not slot.lock.acquire(blocking=False):
            return False
        try:
            slot.take_in(write)
            self._following[source] += 1
        finally:
            slot.lock.release()
        return True


class TorchWindow(WritingWindow):
    """One worker's side."""

    def __init__(
        self,
        remote: Remote,
        name: str,
        local: WritingWindow,
        slots: Slots,
        sources: Sequence[int],
    ) -> None:
        self.name = name
        self.num_elements = local.num_elements
        self.dtype = local.dtype
        self._sources = sources
        self._remote = remote
        self._group = remote.group
        self._local = local
        self._slots = slots
        self._num_written: dict[int, int] = {}
        self._is_open = True

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """Held while the block lasts."""
        place = self._check(source)
        if place is not None:
            with self._local.slot(place) as inside:
                inside.source = source
                yield inside
            return
        slot = self._slots.by_source.get(source)
        if slot is None:
            raise UsageError(
                f"rank {self._group.rank} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        if slot.is_held:
            raise UsageError(
                f"rank {self._group.rank} waits for a slot of window {self.name!r}, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        while not slot.lock.acquire(blocking=False):
            time.sleep(_HELD_S)  # a write that is being taken in
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.lock.release()

    def filled(self) -> Sequence[int]:
        """Sources whose slots have something in them."""
        self._check(self._group.rank)
        mates = self._group.ranks_on(self._group.machine)
        inside = [mates[place] for place in self._local.filled()]
        outside = [source for source, slot in self._slots.by_source.items() if slot.num_writes]
        return sorted(inside + outside)

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Until there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = self.filled()
            return bool(found) or self._is_deserted()

        with contextlib.suppress(DeadlineExceeded):
            self._group.wait(look, deadline, f"window {self.name}")
        return found

    def close(self) -> None:
        """Give the memory back; collective."""
        self._check(self._group.rank)
        self._is_open = False
        self._remote.close_window(self.name, self._local)

    def write(self, to: int, write: Write) -> Handle[None]:
        """In shared memory for mates, by a call for others."""
        place = self._check(to)
        if place is not None:
            return self._local.write(place, write)
        check_write(write, self.name, self.num_elements, self.dtype)
        if self._group.is_gone(to, self._group.next_seq):
            return Done(None)
        number = self._num_written.get(to, 0)
        self._num_written[to] = number + 1
        return self._remote.write(self.name, to, number, write)

    def _is_deserted(self) -> bool:
        """Whether nobody is left who could write."""
        members = self._group.members
        return not any(rank in members for rank in self._sources)

    def _check(self, to: int) -> int | None:
        """The place of a rank of this machine; None for others."""
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")
        if not 0 <= to < self._group.size:
            raise UsageError(f"There is no rank {to} among {self._group.size}.", next_step="name a member.")
        return self._group.place_of(to)


class _Reading(msgspec.Struct, frozen=True, array_like=True):
    name: str
    version: int
    """Wait until it is this new."""


class _Writing(msgspec.Struct, frozen=True, array_like=True):
    window: str
    number: int
    """Of the writes from one worker to another, in a window."""
    kind: Literal["put", "accumulate", "send"]
    weight: float
    mass: float
    note: bytes


class _Locking(msgspec.Struct, frozen=True, array_like=True):
    name: str


class _Published:
    """A tensor that others may read, and its version."""

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version
        self.lock = threading.Lock()
        self.is_torn = False
        """A change of it was broken off."""
        self.spares: list[torch.Tensor] = []
        """Memory for copies that has been used before, and whose pages are there."""


class Remote:
    """The one-sided half of a `TorchGroup`."""

    def __init__(self, group: TorchGroup) -> None:
        self.group = group
        self._mesh = mesh = group.mesh
        self._published: dict[str, _Published] = {}
        self._slots: dict[str, Slots] = {}
        self._names: dict[str, str] = {}
        """Under which key the slots of an open window are."""
        self._num_windows = 0
        self._held: dict[str, int] = {}
        """Who holds which of this worker's locks, of those that ask here."""
        self._holding: dict[tuple[str, int], None] = {}
        """Locks of workers of other machines that this one holds."""
        self._guard = threading.Lock()
        self._given_up: dict[tuple[str, int], None] = {}
        """Those that wait no more for one of this worker's locks."""
        self._is_over = False
        self._exchanges: deque[tuple[int, Collection[int]]] = deque(maxlen=_REMEMBERED)
        """The destinations of this worker's last exchanges, by number."""
        mesh.add_listener(self._free_locks)
        mesh.handle(_SENDS, self._serve_sends, payload_type=int)
        mesh.handle(_READ, self._serve_read, payload_type=_Reading)
        mesh.handle(_WRITE, self._serve_write, payload_type=_Writing)
        mesh.handle(_LOCK, self._serve_lock, payload_type=_Locking)
        mesh.handle(_UNLOCK, self._serve_unlock, payload_type=_Locking)

    def leave(self) -> None:
        """Whoever waits for something of this worker waits in vain."""
        self._is_over = True

    def close(self) -> None:
        """Nothing is to be had any more."""
        self._is_over = True
        self._published.clear()
        self._slots.clear()

    # --- snapshots ---

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Here, and inside the machine."""
        self.group.local.publish(name, tensor, version)
        known = self._published.get(name)
        if known is None:
            self._published[name] = _Published(tensor.detach().view(-1), version)
            return
        with known.lock:
            known.tensor, known.version = tensor.detach().view(-1), version

    def reclaim(self, name: str, version: int) -> None:
        """Of what is being copied for somebody the copy is waited for."""
        self.group.local.reclaim(name, version)
        known = self._published.get(name)
        if known is not None:
            with known.lock:
                pass

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """A copy, or a mate's own memory."""
        place = self._place_of(peer)
        if place is not None:
            return _Mapped(self.group.local.fetch(name, place), lambda found: _renamed(found, peer))
        call = self._mesh.call(peer, _READ, _Reading(name, 0))
        return RemoteHandle(self.group, call, f"fetch {name}", _snapshot_from(peer), when_gone=None)

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Nobody reads it inside."""
        known = self._published.get(name)
        if known is None:
            raise UsageError(f"Nothing is published as {name!r}.", next_step="publish it first.")
        with known.lock, self.group.local.changing(name, version):
            known.is_torn = True
            yield
            known.version, known.is_torn = version, False

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Straight into its place."""
        place = self._place_of(peer)
        if place is not None:
            return self.group.local.read(name, place, into, version=version)
        memory = view_of(flat_bytes(into))

        def allocate(head: Head) -> Sequence[memoryview]:
            if not head.sizes:
                return []
            dtype = head.payload[1]
            if list(head.sizes) != [memory.nbytes] or dtype != dtype_name(into.dtype):
                raise TensorError(
                    f"{head.total_bytes} bytes of {dtype}, published as {name!r} by rank {peer}, do not fit "
                    f"into {memory.nbytes} of {dtype_name(into.dtype)}."
                )
            return [memory]

        call = self._mesh.call(peer, _READ, _Reading(name, version), into=allocate)
        return RemoteHandle(
            self.group, call, f"read {name}", lambda reply: reply.payload and reply.payload[0], when_gone=None
        )

    async def _serve_read(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        asked: _Reading = head.payload
        if asked.version == 0 and asked.name not in self._published:
            return Reply(None)
        found: _Published | None = None

        def look() -> bool:
            nonlocal found
            found = None if self._is_over else self._try_take(asked)
            return self._is_over or found is not None

        await _until(look)
        if found is None:
            return Reply(None)
        try:
            copy = _spare_like(found.spares, found.tensor)
            copy.copy_(found.tensor)
            version = found.version
        finally:
            found.lock.release()

        def give_back() -> None:
            if len(found.spares) < _MAX_SPARES:
                found.spares.append(copy)

        content = view_of(flat_bytes(copy))
        return Reply([version, dtype_name(copy.dtype)], [content], on_sent=give_back)

    def _try_take(self, asked: _Reading) -> _Published | None:
        """Hold what is asked for, if it is there, new enough, and not being written."""
        found = self._published.get(asked.name)
        if found is None or not found.lock.acquire(blocking=False):
            return None
        if found.version >= asked.version and not found.is_torn:
            return found
        found.lock.release()
        return None

    # --- windows ---

    def window(
        self, name: str, num_elements: int, dtype: torch.dtype, sources: Collection[int] | None
    ) -> Window:
        """Slots for other machines' sources here, for mates in shared memory; all have theirs on return."""
        group = self.group
        if name in self._names:
            raise UsageError(f"The window {name!r} is open.", next_step="close it, or take another name.")
        sources = [rank for rank in range(group.size) if rank != group.rank] if sources is None else sources
        group.barrier().wait()  # the lane is clear, and nobody has the window of that name any more
        inside = [place for rank in sources if (place := group.place_of(rank)) is not None]
        local = group.local.window(name, num_elements, dtype, sources=inside)
        outside = [rank for rank in sources if group.place_of(rank) is None]
        self._num_windows += 1  # alike on all ranks: a late write is not taken for one to a later window
        key = f"{name} {self._num_windows}"
        slots = self._slots[key] = Slots(outside, num_elements, dtype)
        self._names[name] = key
        group.barrier().wait()
        return TorchWindow(self, name, local, slots, sorted(sources))

    def close_window(self, name: str, local: Window) -> None:
        """Collective."""
        self.group.barrier().wait()
        self._slots.pop(self._names.pop(name, ""), None)
        local.close()

    def write(self, window: str, to: int, number: int, write: Write) -> Handle[None]:
        """A put, an accumulate or a send to another machine."""
        memory = view_of(flat_bytes(write.tensor.detach().contiguous()))
        writing = _Writing(self._names[window], number, write.kind, write.weight, write.mass, write.note)
        call = self._mesh.call(to, _WRITE, writing, [memory])
        return RemoteHandle(self.group, call, f"{write.kind} {window}", lambda reply: None, when_gone=None)

    async def _serve_write(self, head: Head, buffers: Sequence[memoryview]) -> None:
        asked: _Writing = head.payload
        if self._is_over:
            return  # it has left: writes to one who is gone do nothing
        slots = self._slots.get(asked.window)
        if slots is None:
            raise UsageError(
                f"rank {self._mesh.rank} has no window {asked.window!r}.", next_step="open it on all ranks."
            )
        source = self._mesh.rank_of(head)
        slots.check(source, buffers)
        write = Write(asked.kind, slots.tensor_in(buffers), asked.weight, asked.mass, asked.note)
        await _until(lambda: self._is_over or slots.try_write(source, asked.number, write))
        self.group.wake()

    # --- locks ---

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Held at the owner, by itself for those of other machines."""
        place = self._place_of(owner)
        local = self.group.local
        if place is not None and isinstance(local, HostGroup):
            with local.mutex(name, place):
                yield
            return
        if place is not None:
            if self._held.get(name) == owner:
                raise UsageError(
                    f"rank {owner} waits for its own mutex {name!r}, which it holds itself.",
                    next_step="end the first `with` block before the second begins.",
                )
            self.group.wait(lambda: self._try_lock(name, owner), None, f"mutex {name!r}")
            try:
                yield
            finally:
                self._unlock(name, owner)
            return
        if (name, owner) in self._holding:
            raise UsageError(
                f"rank {self.group.rank} waits for mutex {name!r} of rank {owner}, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        try:
            self._ask(owner, _LOCK, name)
        except BaseException:
            self._mesh.call(owner, _UNLOCK, _Locking(name))  # it may be given later
            raise
        self._holding[name, owner] = None
        try:
            yield
        finally:
            del self._holding[name, owner]
            with contextlib.suppress(PeerLost):
                self._ask(owner, _UNLOCK, name)

    def _ask(self, owner: int, method: str, name: str) -> None:
        call = self._mesh.call(owner, method, _Locking(name))
        answer = RemoteHandle(
            self.group, call, f"mutex {name!r} of rank {owner}", lambda reply: reply.payload
        )
        if answer.wait() is False:
            raise PeerLost(f"rank {owner}, whose mutex {name!r} is asked for, has left.", peer=owner)

    async def _serve_lock(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        asked: _Locking = head.payload
        key = asked.name, self._mesh.rank_of(head)
        await _until(lambda: self._is_over or key in self._given_up or self._try_lock(*key))
        self._given_up.pop(key, None)
        return Reply(self._held.get(asked.name) == key[1])

    def _serve_unlock(self, head: Head, buffers: Sequence[memoryview]) -> None:
        asked: _Locking = head.payload
        asker = self._mesh.rank_of(head)
        if self._held.get(asked.name) == asker:
            self._unlock(asked.name, asker)
        else:
            self._given_up[asked.name, asker] = None

    def _try_lock(self, name: str, asker: int) -> bool:
        """Take one of this worker's own locks for somebody."""
        with self._guard:
            if name in self._held:
                return False
            local = self.group.local
            if isinstance(local, HostGroup) and not local.try_lock(name, local.rank):
                return False
            self._held[name] = asker
            return True

    def _free_locks(self) -> None:
        """Who is gone holds nothing any more."""
        for name, holder in tuple(self._held.items()):
            if holder in self._mesh.lost or holder in self._mesh.left:
                self._unlock(name, holder)

    def _unlock(self, name: str, holder: int) -> None:
        with self._guard:
            if self._held.get(name) != holder:
                raise UsageError(f"rank {holder} does not hold the mutex {name!r}.")
            del self._held[name]
            local = self.group.local
            if isinstance(local, HostGroup):
                local.unlock(name, local.rank)
        self.group.wake()

    # --- exchanges ---

    def note_exchange(self, seq: int, destinations: Collection[int]) -> None:
        """Whom this worker sends to in an exchange."""
        self._exchanges.append((seq, destinations))

    def ask_whether_sent(self, seq: int, rank: int) -> MeshHandle[Reply]:
        """Whether a rank sends to this one in an exchange: True, False, or None where it cannot say."""
        return self._mesh.call(rank, _SENDS, seq)

    def _serve_sends(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        asker = self._mesh.rank_of(head)
        found = [destinations for seq, destinations in tuple(self._exchanges) if seq == head.payload]
        return Reply(asker in found[0] if found else None)

    def _place_of(self, rank: int) -> int | None:
        self.group.check_usable()
        if not 0 <= rank < self.group.size:
            raise UsageError(f"There is no rank {rank} among {self.group.size}.", next_step="name a member.")
        return self.group.place_of(rank)


class RemoteHandle(Handle[T]):
    """A call under way; without `when_gone` a lost peer is an error."""

    _NO = object()

    def __init__(
        self,
        group: TorchGroup,
        call: MeshHandle[Reply],
        what: str,
        convert: Callable[[Reply], T],
        when_gone: Any = _NO,
    ) -> None:
        self._group = group
        self._call = call
        self._what = what
        self._convert = convert
        self._when_gone = when_gone

    def wait(self, deadline: Deadline | None = None) -> T:
        """The answer."""
        if not self._call.is_done():
            self._group.wait(self._call.is_done, deadline, self._what)
        try:
            return self._convert(self._call.result())
        except PeerLost:
            if self._when_gone is RemoteHandle._NO:
                raise
            gone: T = self._when_gone
            return gone

    def is_done(self) -> bool:
        """Whether it has come."""
        return self._call.is_done()


class _Mapped(Handle[T]):
    """Another handle, whose result is seen otherwise."""

    def __init__(self, inner: Handle[Any], convert: Callable[[Any], T]) -> None:
        self._inner = inner
        self._convert = convert

    def wait(self, deadline: Deadline | None = None) -> T:
        return self._convert(self._inner.wait(deadline))

    def is_done(self) -> bool:
        return self._inner.is_done()


class _RenamedSnapshot(Snapshot):
    """A mate's, by its rank in the whole group."""

    def __init__(self, inner: Snapshot, rank: int) -> None:
        self.rank = rank
        self.version = inner.version
        self.tensor = inner.tensor
        self._inner = inner

    def is_intact(self) -> bool:
        return self._inner.is_intact()


def _renamed(found: Snapshot | None, rank: int) -> Snapshot | None:
    return None if found is None else _RenamedSnapshot(found, rank)


def _snapshot_from(rank: int) -> Callable[[Reply], Snapshot | None]:
    def convert(reply: Reply) -> Snapshot | None:
        if reply.payload is None:
            return None
        version, dtype = reply.payload
        content = torch.frombuffer(reply.buffers[0], dtype=torch.uint8)
        return CopiedSnapshot(rank, version, content.view(DTYPES[dtype]))

    return convert


async def _until(is_done: Callable[[], bool]) -> None:
    """Look again and again, ever more rarely: what is waited for happens in another thread."""
    nap_s = _LOOK_S
    while not is_done():
        await asyncio.sleep(nap_s)
        nap_s = min(1.25 * nap_s, _SLOWEST_LOOK_S)


def _spare_like(spares: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    while spares:
        spare = spares.pop()
        if spare.shape == like.shape and spare.dtype == like.dtype:
            return spare
    return torch.empty_like(like)
