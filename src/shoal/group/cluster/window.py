"""Windows over several machines: workers of one machine use its own group, others are called.

A call is answered on the mesh's loop, while the worker itself computes; what both touch is under a lock that
is held only while something is copied. A window is made without waiting for other machines: what comes before
it is there waits for it.

Between machines all passes through memory of the host: of a window on a GPU, slots that others write lie
there and are copied when they are read, and what is published is copied when somebody asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from shoal.core import Deadline, DeadlineExceeded, PeerLost, TensorError, UsageError
from shoal.group.base import (
    Done,
    Handle,
    Snapshot,
    T,
    Window,
    WindowForm,
    WindowSlot,
    Write,
    check_rank,
    held_by_itself,
)
from shoal.group.cluster.links import flat_bytes, view_of
from shoal.group.cluster.mesh import poll_until
from shoal.group.kernels import CopiedSnapshot, MemorySlot, check_write
from shoal.tensors.dtypes import DTYPES, dtype_name
from shoal.tensors.memory import tensor_over
from shoal.transport import Head, Reply

if TYPE_CHECKING:
    from shoal.group.cluster.group import ClusterGroup

_READ, _WRITE = "group.read", "group.write"
_MAX_SPARES = 2


class _Reading(msgspec.Struct, frozen=True, array_like=True):
    """Asks for what is published, once it is of this version."""

    window: str
    version: int


class _Writing(msgspec.Struct, frozen=True, array_like=True):
    """Writes into the caller's slot; `number` counts windows of the name, `turn` the caller's writes here."""

    window: str
    number: int
    turn: int
    kind: Literal["put", "add", "send"]
    weight: float
    mass: float
    note: bytes


class _LockedSlot(MemorySlot):
    """A slot in memory of this process that a worker of another machine writes."""

    def __init__(self, source: int, form: WindowForm) -> None:
        super().__init__(source, dataclasses.replace(form, device=None))
        self.lock = threading.Lock()
        self.is_held = False
        """Whether this worker holds it, to read it."""
        self._turn = 0
        """Of the write that comes next: they are taken in the order in which they were begun."""

    def try_write(self, turn: int, write: Write) -> bool:
        """Takes a write in, unless an earlier one is missing, or the slot is held, or full for a send."""
        if turn != self._turn or not self.may_take(write) or not self.lock.acquire(blocking=False):
            return False
        try:
            self.take(write)
            self._turn += 1
        finally:
            self.lock.release()
        return True


class ClusterWindow(Window):
    """One worker's side of a window; `local` is that of its machine.

    `number` counts windows of this name that have slots; 0 if it has none, and only publishes. It is in the
    `registry` of open windows until it is closed.
    """

    def __init__(
        self,
        group: ClusterGroup,
        form: WindowForm,
        number: int,
        local: Window,
        sources: Sequence[int],
        registry: dict[str, ClusterWindow],
    ) -> None:
        super().__init__(form)
        self.number = number
        self._group = group
        self._members = group.membership
        self._local = local
        self._sources = sources
        self._registry = registry
        self._slots = {
            source: _LockedSlot(source, form) for source in sources if self._members.place_of(source) is None
        }
        self._turns: dict[int, int] = {}
        self.published: torch.Tensor | None = None
        self._version = 0
        self._written: torch.cuda.Event | None = None
        """On a GPU: when what is published is there."""
        self._is_torn = False
        """Whether a change of what is published was broken off."""
        self._lock = threading.Lock()
        """Of what is published."""
        self._spares: list[torch.Tensor] = []
        """Memory for copies that has been used before, and whose pages are there."""

    # --- slots ---

    def _write(self, to: int, write: Write) -> Handle[None]:
        place = self._find(to)
        if not self.number or (to == self._group.rank and to not in self._sources):
            raise self._no_slot(to, to)
        if place is not None:
            return self._local._write(place, write)
        check_write(write, self)
        if self._members.is_gone(to, self._group.next_seq):
            return Done(None)
        turn = self._turns.get(to, 0)
        self._turns[to] = turn + 1
        memory = view_of(flat_bytes(write.tensor.detach().cpu().contiguous()))
        writing = _Writing(self.name, self.number, turn, write.kind, write.weight, write.mass, write.note)
        call = self._group.mesh.call(to, _WRITE, writing, [memory])
        return self._answer(call, write.kind, lambda reply: None)

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[WindowSlot]:
        """Holds a slot while the block lasts."""
        place = self._find(source)
        if source not in self._sources:
            raise self._no_slot(self._group.rank, source)
        if place is not None:
            with self._local.slot(place) as inside:
                inside.source = source
                yield inside
            return
        slot = self._slots[source]
        if slot.is_held:
            raise held_by_itself(self._group.rank, f"slot of rank {source} in window {self.name!r}")
        with slot.lock:  # a write holds it only while it is copied
            slot.is_held = True
            try:
                yield slot if self.device.type == "cpu" else _DeviceSlot(slot, self.device)
            finally:
                slot.is_held = False

    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them."""
        self._check_open()
        inside = [self._members.ranks_here[place] for place in self._local.filled()]
        return sorted(inside + [source for source, slot in self._slots.items() if slot.num_writes])

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Waits until there is one, or nobody is left who could write."""

        def look() -> bool:
            return bool(self.filled()) or set(self._sources).isdisjoint(self._group.members)

        with contextlib.suppress(DeadlineExceeded):
            self._group.wait(look, deadline, f"window {self.name}")
        return self.filled()

    # --- what is published ---

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Publishes for this machine where it lies, for others as a copy when they ask."""
        self._check_open()
        self._local.publish(tensor, version)
        with self._lock:
            self.published, self._version = tensor.detach().view(-1), version
            self._note_written()

    def reclaim(self, version: int) -> None:
        """Makes snapshots void; waits while a copy is made for somebody."""
        self._check_open()
        self._local.reclaim(version)
        with self._lock:
            pass

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Lets nobody read it inside."""
        self._check_open()
        with self._lock, self._local.changing(version):
            self._is_torn = True
            yield
            self._version, self._is_torn = version, False
            self._note_written()

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Gives the memory of a worker of this machine itself, a copy from others."""
        place = self._find(peer)
        if place is not None:
            inside = self._local.fetch(place)

            def rename() -> Snapshot | None:
                found = inside.wait()
                if found is not None:
                    found.rank = peer
                return found

            return self._group.handle(inside, "fetch", rename)

        def convert(reply: Reply) -> Snapshot | None:
            if reply.payload is None:
                return None
            content = torch.frombuffer(reply.buffers[0], dtype=torch.uint8).view(DTYPES[reply.payload[1]])
            return CopiedSnapshot(peer, reply.payload[0], content.to(self.device))

        return self._answer(self._group.mesh.call(peer, _READ, _Reading(self.name, 0)), "fetch", convert)

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Receives straight into its place."""
        place = self._find(peer)
        if place is not None:
            return self._local.read(place, into, version=version)
        is_in_place = into.is_contiguous() and not into.is_cuda
        host = into.detach() if is_in_place else torch.empty(into.shape, dtype=into.dtype)
        memory = view_of(flat_bytes(host))

        def allocate(head: Head) -> Sequence[memoryview]:
            if not head.sizes:
                return []
            dtype = head.payload[1]
            if list(head.sizes) != [memory.nbytes] or dtype != dtype_name(into.dtype):
                raise TensorError(
                    f"{head.total_bytes} bytes of {dtype}, published as {self.name!r} by rank {peer}, do not "
                    f"fit into {memory.nbytes} of {dtype_name(into.dtype)}."
                )
            return [memory]

        def convert(reply: Reply) -> int | None:
            if reply.payload is None:
                return None
            if not is_in_place:
                into.detach().copy_(host)
            return int(reply.payload[0])

        asked = _Reading(self.name, version)
        return self._answer(self._group.mesh.call(peer, _READ, asked, into=allocate), "read", convert)

    def close(self) -> None:
        """Gives the memory back; what others still write here is dropped. Idempotent."""
        if not self._is_open:
            return
        if self.number:
            self._group.clear_queue("window")
        self._is_open = False
        self._registry.pop(self.name, None)
        self._local.close()

    # --- answers, on the mesh's loop ---

    def take_write(self, source: int, asked: _Writing, buffers: Sequence[memoryview]) -> Callable[[], bool]:
        """Checks what somebody writes; gives what is to be tried until it is taken in."""
        slot = self._slots.get(source)
        if slot is None:
            raise UsageError(f"there is no slot for rank {source} here.", next_step="name it as a source.")
        size_bytes = self.num_elements * self.dtype.itemsize
        if [buffer.nbytes for buffer in buffers] != [size_bytes]:
            came_bytes = sum(buffer.nbytes for buffer in buffers)
            raise TensorError(f"{came_bytes} bytes were written to a window of {size_bytes}.")
        tensor = tensor_over(buffers[0]).view(self.dtype)
        write = Write(asked.kind, tensor, asked.weight, asked.mass, asked.note)
        return lambda: not self._is_open or slot.try_write(asked.turn, write)

    def try_copy(self, version: int) -> Reply | None:
        """Copies what is published, if it is new enough and not being written."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found, version_now = self.published, self._version
            if found is None or self._is_torn or version_now < version:
                return None
            if self._written is not None and not self._written.query():  # type: ignore[no-untyped-call]
                return None
            copy = self._spares.pop() if self._spares else torch.empty_like(found, device="cpu")
            copy.copy_(found)
        finally:
            self._lock.release()

        def give_back() -> None:
            if len(self._spares) < _MAX_SPARES:
                self._spares.append(copy)

        return Reply([version_now, dtype_name(copy.dtype)], [view_of(flat_bytes(copy))], on_sent=give_back)

    # --- the rest ---

    def _note_written(self) -> None:
        """Remembers, of a GPU, what the caller has given to it until now."""
        if self.published is not None and self.published.is_cuda:
            self._written = torch.cuda.current_stream(self.published.device).record_event()

    def _answer(self, call: Handle[Reply], what: str, convert: Callable[[Reply], T]) -> Handle[T | None]:
        """Gives what a peer answers; None when it is gone."""

        def result() -> T | None:
            try:
                return convert(call.wait())
            except PeerLost:
                return None

        return self._group.handle(call, f"{what} {self.name}", result)

    def _find(self, rank: int) -> int | None:
        """Gives the place of a rank of this machine; None for others."""
        self._check_open()
        check_rank(rank, self._group.size)
        return self._members.place_of(rank)

    def _check_open(self) -> None:
        self._group.check_usable()
        super()._check_open()


class Windows:
    """All windows of one worker; answers those of other machines."""

    def __init__(self, group: ClusterGroup) -> None:
        self._group = group
        self._open: dict[str, ClusterWindow] = {}
        self._numbers: dict[str, int] = {}
        """Alike on all ranks: what comes late is not taken for something of a later window of the name."""
        self._is_over = False
        group.mesh.handle(_READ, self._serve_read, payload_type=_Reading)
        group.mesh.handle(_WRITE, self._serve_write, payload_type=_Writing)

    def make(self, form: WindowForm, sources: Collection[int] | None) -> ClusterWindow:
        """Makes slots for other machines' sources here, for the machine's own in shared memory."""
        group, name = self._group, form.name
        if name in self._open:
            raise UsageError(f"The window {name!r} is open.", next_step="close it, or take another name.")
        group.check_usable()
        number = 0
        inside: Collection[int] = ()
        if sources != ():
            number = self._numbers.get(name, 0) + 1
            if sources is None:
                sources = [rank for rank in range(group.size) if rank != group.rank]
            group.clear_queue("window")
            inside = [place for rank in sources if (place := group.membership.place_of(rank)) is not None]
        what = name, form.num_elements, form.dtype
        local = group.local.window(*what, sources=inside, device=form.device)
        window = self._open[name] = ClusterWindow(group, form, number, local, sorted(sources), self._open)
        if number:
            self._numbers[name] = number  # last: what has a number and is not open is closed
        return window

    def close(self) -> None:
        """Forgets all windows, and lets nobody wait any more for something of this worker. Idempotent."""
        self._is_over = True
        self._open.clear()

    async def _serve_read(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        asked: _Reading = head.payload
        reply: Reply | None = None

        def look() -> bool:
            nonlocal reply
            window = self._open.get(asked.window)
            reply = None if window is None else window.try_copy(asked.version)
            has_nothing = asked.version == 0 and (window is None or window.published is None)
            return reply is not None or has_nothing or self._is_over

        await poll_until(look)
        return reply or Reply(None)

    async def _serve_write(self, head: Head, buffers: Sequence[memoryview]) -> None:
        asked: _Writing = head.payload
        await poll_until(lambda: self._is_closed(asked) or self._find(asked) is not None)
        window = self._find(asked)
        if window is None:
            return  # closed, or this worker has left: writes to one who is gone do nothing
        try_write = window.take_write(self._group.mesh.monitor.rank_of(head), asked, buffers)
        await poll_until(lambda: self._is_over or try_write())
        self._group.mesh.wake()

    def _find(self, asked: _Writing) -> ClusterWindow | None:
        window = self._open.get(asked.window)
        return window if window is not None and window.number == asked.number else None

    def _is_closed(self, asked: _Writing) -> bool:
        """Tells whether the window that somebody writes to is no more, and not only not yet there."""
        is_known = self._numbers.get(asked.window, 0) >= asked.number
        return self._is_over or (is_known and self._find(asked) is None)


class _DeviceSlot(WindowSlot):
    """A slot in memory of the host, of a window on a GPU: its tensor is a copy there."""

    def __init__(self, inner: MemorySlot, device: torch.device) -> None:
        self.source, self.num_writes = inner.source, inner.num_writes
        self.mass, self.note = inner.mass, inner.note
        if self.num_writes:
            self.tensor = inner.tensor.to(device)
        self._inner = inner

    def clear(self) -> None:
        """Empties the slot, once its content was read."""
        self._inner.clear()
        self.num_writes, self.mass, self.note = 0, 0.0, b""
