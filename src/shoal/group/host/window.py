"""Windows of one machine: slots and publications in shared memory, the locks on them, and writes that wait.

A slot is written by its source, in one pass over the memory, under the slot's lock; the first write after a
`clear` is a plain one, so that clearing costs nothing. A source that ends in the middle of a write leaves the
slot marked as torn: then the write did not take place, and where others had been added before it, they are
lost with it.

What a worker publishes is named in its table in the control page, and others read it where it lies. What is
published once and then changed in place is read as a whole copy: each reader has a byte of the publication's
lock, and who changes the memory takes the bytes of all that are not gone. A reader that was given up while it
held its byte learns of it before it uses what it has copied.

Nobody blocks here: what cannot be done when it is asked for is a `PendingWrites` operation, which is tried
again when somebody looks (`is_done`, `wait`) and whenever the group makes progress. Bytes are counted when a
write is issued and when a read has copied.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from shoal.core import Deadline, DeadlineExceeded, UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.group.base import (
    PENDING,
    Done,
    Group,
    Handle,
    Pending,
    PolledHandle,
    Snapshot,
    T,
    Window,
    WindowForm,
    WindowSlot,
    Write,
    check_rank,
    held_by_itself,
)
from shoal.group.functions import share
from shoal.group.host.device import DeviceMemory, DeviceReads, DeviceSlot, SharedDevice
from shoal.group.host.engine import ProgressEngine
from shoal.group.host.memory import (
    DEVICE_CODE,
    DEVICE_PUBLISHED,
    DTYPES,
    NOT_YET,
    PUBLICATIONS,
    PUBLISHED,
    Arena,
    FileSegment,
    Segment,
    code_of,
)
from shoal.group.kernels import MAX_NOTE_BYTES, check_write, copy_out, write_first, write_more
from shoal.group.operations import TrafficCounter

_PUBLICATION_LOCKS = 1 << 61
"""Where the locks of publications begin; those of slots lie at the slot's own place in memory."""
_LOCK_STRIDE = 1 << 10
"""Bytes for each publication: one for each rank that may read it."""
_FLOCK = struct.Struct("@hhqqi0q")
_held_in_process: dict[tuple[int, int, int], tuple[FileLocks, int]] = {}
_CURRENT, _RECLAIMED, _CHANGE, _OPENED, _RECORDS = range(5)
"""Words of an entry in a table of publications; two records follow."""
_NAME, _PLACE, _RECORD_WORDS = 0, 1, 6
"""Words of a record: name, place, number of elements, dtype, number of the publication, and its version."""
_FREE = -1  # the name of an entry that was used and is not; one that was never used has 0, and ends a search
_SETTLED, _WANTED, _CHANGING = range(3)
_REMEMBERED = 4  # publications on a device whose memory may still be read
_LOOKS = 100  # a record changes under a reader only when two newer ones are published in the meantime
_NUM_WRITES, _TORN, _MASS, _NOTE_BYTES, _NOTE = range(5)
_WHOLE, _BEING_WRITTEN, _BEING_ADDED_TO = range(3)
_HEAD_BYTES = 8 * _NOTE + MAX_NOTE_BYTES


def agree_on_sources(group: Group, form: WindowForm, sources: Collection[int] | None) -> dict[int, list[int]]:
    """Learns the sources of each member; UsageError on all when they ask for different windows."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    named = others if sources is None else [rank for rank in range(group.size) if rank in sources]
    told = share(group, [group.rank, named, form.name, form.num_elements, code_of(form.dtype)])
    first, _, *wanted = told[0]
    for rank, _, *what in told:
        if what != wanted:
            raise UsageError(
                f"rank {rank} makes window {what[0]!r} of {what[1]} elements ({DTYPES[what[2]]}) where "
                f"rank {first} makes {wanted[0]!r} of {wanted[1]} ({DTYPES[wanted[2]]}).",
                next_step="let all workers make the same windows in the same order.",
            )
    return {rank: sources for rank, sources, *_ in told}


class SlotCell:
    """The memory of one slot: a head of words and a note, and the tensor behind it.

    Where the tensor is on a device, the words behind the head count what streams do with it.
    """

    on_device: DeviceSlot | None = None

    def __init__(
        self,
        segment: FileSegment,
        start: int,
        num_elements: int,
        dtype: torch.dtype,
        device: tuple[SharedDevice, torch.Tensor] | None = None,
    ) -> None:
        self.lock = segment.code + start
        head = segment.flat[start : start + _HEAD_BYTES].numpy().data.cast("B")
        self.words = head.cast("q")
        self.numbers = head.cast("d")
        self.note = head[8 * _NOTE :]
        behind = segment.flat[start + _HEAD_BYTES :]
        if device is None:
            self.tensor = behind[: num_elements * dtype.itemsize].view(dtype)
        else:
            self.tensor = device[1]
            self.on_device = DeviceSlot(device[0], behind[: DeviceSlot.SIZE_BYTES])

    def is_written(self) -> bool:
        """Tells whether what was written is there, on a device too."""
        return self.on_device is None or self.on_device.is_written()

    def write(self, write: Write) -> None:
        """Does one write; the caller has the lock."""
        words, numbers = self.words, self.numbers
        has_more = write.kind == "add" and words[_NUM_WRITES] > 0
        if has_more and words[_TORN]:
            raise UsageError(
                "An earlier write into the same slot was broken off half-way.",
                next_step="end this worker; what comes after an interrupted operation cannot be right.",
            )
        words[_TORN] = _BEING_ADDED_TO if has_more else _BEING_WRITTEN
        if self.on_device is not None:
            self.on_device.begin_write()
        (write_more if has_more else write_first)(self.tensor, write)
        numbers[_MASS] = write.mass + (numbers[_MASS] if has_more else 0.0)
        words[_NOTE_BYTES] = len(write.note)
        self.note[: len(write.note)] = write.note
        if self.on_device is not None:
            self.on_device.end_write(is_sum=has_more)
        words[_NUM_WRITES] = words[_NUM_WRITES] + 1
        words[_TORN] = _WHOLE


class HostWindow(Window):
    """A window of the workers of one machine; `HostGroup.window` makes one."""

    def __init__(
        self,
        group: Group,
        form: WindowForm,
        sources_of: Mapping[int, Sequence[int]],
        shared: WindowSet,
    ) -> None:
        super().__init__(form)
        self._group = group
        self._shared = shared
        self._engine = shared.engine
        self._rank = shared.engine.rank
        self._sources = sources_of.get(self._rank, ())
        self._memory: list[torch.Tensor] = []
        """What the slots lie in: shared memory, and that of a device, if the window is there."""
        self._words: torch.Tensor | None = None
        """The shared memory in which streams of a device count, if they do."""
        self._cells = self._make_cells(sources_of) if sources_of else {}
        self._engine.on_loss.append(self._lost)
        # a number for the name, never 0
        self._key = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=7).digest()) + 1
        self._published: int | None = None
        """The index of its entry in this worker's table of publications, once it has one."""

    def _make_cells(self, sources_of: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], SlotCell]:
        """Takes memory for all slots; makes those that this worker owns or writes, by owner and source."""
        devices, is_on_device = self._shared.devices, self.device.type != "cpu"
        tensor_bytes = -(-self.num_elements * self.dtype.itemsize // 64) * 64
        slot_bytes = _HEAD_BYTES + (DeviceSlot.SIZE_BYTES if is_on_device else tensor_bytes)
        pairs = [(owner, source) for owner, named in sources_of.items() for source in named]
        region_bytes = -(-len(pairs) * slot_bytes // self._engine.size) or 1
        self._memory.append(self._group.empty(region_bytes, torch.uint8))
        segment = self._shared.arena.find(self._memory[0])
        assert segment is not None
        tensors: Segment | None = None
        if is_on_device:
            device_bytes = tensor_bytes * max(map(len, sources_of.values())) or 1
            self._memory.append(self._group.empty(device_bytes, torch.uint8, device=self.device))
            place = devices.find_own(self._memory[1])
            assert place is not None
            tensors = place[0]
            self._words = segment.flat
            devices.device.register(self._words)
        cells = {}
        for index, (owner, source) in enumerate(pairs):
            if self._rank not in (owner, source):
                continue
            on_device = None
            if tensors is not None:
                at = sources_of[owner].index(source) * tensor_bytes
                on_device = devices.device, tensors.region(owner, at, self.num_elements, self.dtype)
            start = index * slot_bytes
            cells[owner, source] = SlotCell(segment, start, self.num_elements, self.dtype, on_device)
        return cells

    def slot(self, source: int) -> _HostSlot:
        """Holds a slot; PeerLost when the source ended, or was stopped, while it added to what was there."""
        return _HostSlot(self, source, self._cell(self._rank, source))

    def take(self, cell: SlotCell, source: int) -> None:
        """Takes a slot's lock, and voids a write in it that was broken off."""
        self._lock(cell, source)
        try:
            torn = self._torn(cell, source)
            if torn == _BEING_ADDED_TO:
                raise self._engine.lost_error(source)
            if torn == _BEING_WRITTEN:
                cell.words[_NUM_WRITES], cell.words[_TORN] = 0, _WHOLE
        except BaseException:
            self.give_back(cell, source)
            raise

    def give_back(self, cell: SlotCell, source: int) -> None:
        """Gives a slot's lock back; its source may write again."""
        if cell.on_device is not None:
            cell.on_device.end_read()
        self._shared.locks.release(cell.lock)
        self._engine.pipes.wake(source)

    def filled(self) -> Sequence[int]:
        """Lists the sources that have written; not those that are gone and left a slot torn."""
        self._check_open()
        self._engine.progress()
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Sleeps until a source has written."""
        self._check_open()
        found: list[int] = []

        def is_over() -> bool:
            is_all_gone = all(self._engine.is_gone(source) for source in self._sources)
            found[:] = self._filled()
            return bool(found) or is_all_gone

        with contextlib.suppress(DeadlineExceeded):
            self._engine.wait_until(is_over, deadline, f"window {self.name!r}")
        return found

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Names memory of the group for others to read, where it lies."""
        self._check_open()
        check_write(Write("put", tensor), self)
        if version < 0:
            raise UsageError(f"Version {version} of {self.name!r} is negative.", next_step="count from 0.")
        memory = self._shared.devices if self._shared.devices.takes(tensor) else self._shared.arena
        place = memory.find_own(tensor)
        if place is None:
            raise UsageError(
                f"What is published in window {self.name!r} is not memory of the group.",
                next_step="take it from group.empty().",
            )
        table = self._shared.publications
        if self._published is None:
            self._published = table.open(self._key, self.name)
        what = [self._key, place[0].code + place[1], tensor.numel(), code_of(tensor.dtype)]
        table.publish(self._published, what, version)

    def reclaim(self, version: int) -> None:
        """Makes snapshots up to this version void; on a device what comes next waits for those that read."""
        index, table = self._published, self._shared.publications
        if index is None:
            return
        is_replaced = partial(table.is_written_after, index, version)
        if not is_replaced():  # else there would be none to fetch meanwhile
            self._engine.wait_until(is_replaced, None, f"reclaim {self.name!r}")
        table.reclaim(index, version)
        table.follow_readers(index, version)

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Waits until those that copy it now have done so.

        After a block that ends in an exception nobody can read it until another one has ended well.
        """
        self._check_open()
        index, table = self._published, self._shared.publications
        record = None if index is None else table.record(self._rank, index)
        self._check_change(None if record is None else record[-1], version)
        assert index is not None
        assert record is not None
        *what, _, before = record
        self._engine.check_usable()
        table.set_change(index, _WANTED)
        taken: list[tuple[int, int]] = []
        try_lock = partial(self._try_lock_readers, index, taken)
        try:
            if not try_lock():
                self._engine.wait_until(try_lock, None, f"changing {self.name!r}")
            table.set_change(index, _CHANGING)
            table.reclaim(index, before)
            table.follow_readers(index, before)
            yield
            table.publish(index, what, version)
            if what[_PLACE] >= DEVICE_CODE:
                # until the stream has written all, a reader would take it for the version before
                self._shared.devices.device.caller.synchronize()
            table.set_change(index, _SETTLED)
        finally:
            self._release(taken)
            self._engine.pipes.wake_others()

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Looks at the peer's memory itself: nothing is copied."""
        self._check_open()
        check_rank(peer, self._engine.size)
        snapshot = None if self._engine.is_gone(peer) else self._shared.publications.fetch(peer, self._key)
        if snapshot is not None and peer != self._rank:
            self._shared.counter.received_from[peer] += snapshot.tensor.nbytes
        return Done(snapshot)

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies from the peer's memory in this worker's own thread, while nobody changes it."""
        self._check_open()
        check_rank(peer, self._engine.size)
        into = into.detach()
        table, locks, publication = (
            self._shared.publications,
            self._shared.locks,
            self._engine.control.publication,
        )

        def attempt() -> int | Pending | None:
            if self._engine.is_gone(peer):
                return None
            found = table.newest(peer, self._key)
            if found is None:
                return PENDING if version else None
            if found.version < version:
                return PENDING
            if peer == self._rank:
                return copy_out(found, into, self.name)
            lock = _lock_of(peer, found.index) + self._rank
            # one that waits to change it comes first: readers alone would never let it
            if publication(peer, found.index)[_CHANGE] != _SETTLED or not locks.try_take(lock):
                return PENDING
            try:
                if publication(peer, found.index)[_CHANGE] == _CHANGING:
                    return PENDING  # it has ended in the midst of it
                # only what is found under the lock stays as it is
                held = table.newest(peer, self._key)
                if held is None or held.index != found.index or held.version < version:
                    return PENDING
                was_intact = held.is_intact()
                got = copy_out(held, into, self.name)
                if self._shared.devices.takes(held.tensor):
                    self._shared.devices.device.caller.synchronize()  # it may be changed from now on
                if was_intact and not held.is_intact():
                    return PENDING  # it was reclaimed or closed meanwhile, and may have been written
            finally:
                locks.release(lock)
                self._engine.pipes.wake(peer)
            self._engine.check_own_verdict()
            self._shared.counter.received_from[peer] += into.nbytes
            return got

        what = f"read {self.name!r} of rank {self._engine.name_of(peer)}"
        return self._shared.pending.begin((self, object()), what, attempt)

    def close(self) -> None:
        """Gives the memory back; operations that are still under way are dropped."""
        if not self._is_open:
            return
        self._is_open = False
        self._shared.pending.drop(self, f"Window {self.name!r} was closed before it was written or read.")
        self._cells.clear()
        self._engine.on_loss.remove(self._lost)
        for tensor in reversed(self._memory):  # first: until all have come, some may read what is published
            if tensor is self._memory[0] and self._words is not None:
                self._shared.devices.device.unregister(self._words)  # now that no stream writes it
            self._group.free(tensor)
        if self._published is not None:
            self._shared.publications.close(self._published)

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Writes at once, unless the slot's owner holds it, or it is full for a send."""
        cell = self._cell(to, self._rank)
        check_write(write, self)
        self._shared.counter.write(write.tensor.nbytes, to)

        def attempt() -> Pending | None:
            if self._engine.is_gone(to):
                return None
            if not self._shared.locks.try_take(cell.lock):
                return PENDING
            try:
                if write.kind == "send" and cell.words[_NUM_WRITES]:
                    return PENDING
                if not cell.is_written():
                    return PENDING  # one after the other, so that the owner finds a moment to read
                cell.write(write)
            finally:
                self._shared.locks.release(cell.lock)
            self._engine.pipes.wake(to)
            return None

        what = f"{write.kind} to rank {self._engine.name_of(to)} in window {self.name!r}"
        return self._shared.pending.begin((self, to), what, attempt)

    def _filled(self) -> list[int]:
        found = []
        for source in self._sources:
            is_gone = self._engine.is_gone(source)  # before the words, which then change no more
            cell = self._cells[self._rank, source]
            if cell.words[_NUM_WRITES] > 0 and cell.is_written() and not (is_gone and cell.words[_TORN]):
                found.append(source)
        return found

    def _torn(self, cell: SlotCell, source: int) -> int:
        """Tells whether a write was broken off; waits until those that a device does are done."""
        if cell.on_device is not None and not cell.is_written():
            what = f"a write of rank {self._engine.name_of(source)} in window {self.name!r}"
            self._engine.wait_until(lambda: cell.is_written() or self._engine.is_gone(source), None, what)
            if not cell.is_written():
                return _BEING_ADDED_TO if cell.on_device.is_sum else _BEING_WRITTEN
        return cell.words[_TORN]

    def _lost(self, rank: int) -> None:
        """Frees streams that wait for a lost owner; in the watching thread."""
        for (owner, _), cell in tuple(self._cells.items()):
            if owner == rank and cell.on_device is not None:
                cell.on_device.free()

    def _cell(self, owner: int, source: int) -> SlotCell:
        self._check_open()
        check_rank(owner, self._engine.size)
        check_rank(source, self._engine.size)
        if (owner, source) not in self._cells:
            raise self._no_slot(self._engine.name_of(owner), self._engine.name_of(source))
        return self._cells[owner, source]

    def _lock(self, cell: SlotCell, source: int) -> None:
        """Waits for a slot; PeerLost when its source is gone and still has the lock: it was stopped."""
        locks, engine = self._shared.locks, self._engine
        what = f"slot of rank {engine.name_of(source)} in window {self.name!r}"
        engine.check_usable()
        if locks.is_held_here(cell.lock):
            raise held_by_itself(engine.name_of(self._rank), what)
        is_taken = locks.try_take(cell.lock)

        def try_again() -> bool:
            nonlocal is_taken
            was_gone = engine.is_gone(source)  # before the attempt: with its process the lock is free
            is_taken = is_taken or locks.try_take(cell.lock)
            if not is_taken:
                if was_gone:
                    raise engine.lost_error(source)
                engine.blocker = source
            return is_taken

        try:
            if not is_taken:
                engine.wait_until(try_again, None, what)
        except BaseException:
            if is_taken:
                locks.release(cell.lock)
            raise

    def _try_lock_readers(self, index: int, taken: list[tuple[int, int]]) -> bool:
        """Takes the bytes of all readers that are there, or none."""
        if taken:
            return True
        at, size = _lock_of(self._rank, index), self._engine.size
        there = [rank for rank in range(size) if not self._engine.is_gone(rank)]
        # in one piece where that can be; one that was given up may be stopped with its byte in its hands
        for first, count in [(0, size)] if len(there) == size else [(rank, 1) for rank in there]:
            if not self._shared.locks.try_take(at + first, count):
                self._release(taken)
                blocker = self._shared.locks.first_taken(at + first, count)
                if blocker is not None:
                    self._engine.blocker = first + blocker
                return False
            taken.append((at + first, count))
        return True

    def _release(self, taken: list[tuple[int, int]]) -> None:
        while taken:
            self._shared.locks.release(*taken.pop())


@dataclass(eq=False)
class WindowSet:
    """What all windows of one worker share: locks, operations that wait, and the table of publications."""

    engine: ProgressEngine
    arena: Arena
    counter: TrafficCounter
    devices: DeviceMemory

    def __post_init__(self) -> None:
        self.locks = FileLocks(self.arena.files[0])
        self.pending = PendingWrites(self.engine)
        self.publications = PublicationTable(self.engine, self.arena, self.devices)


class PublicationTable:
    """The table of what a worker publishes, in the control page, and its view of the others' tables.

    An entry belongs to one open window that has published. Two records take turns in it, so that there is
    always a whole one; each has a number that no other publication of this worker has had, and counts only
    once the worker has told that it has come so far (PUBLISHED).
    """

    def __init__(self, engine: ProgressEngine, arena: Arena, devices: DeviceMemory) -> None:
        self._engine = engine
        self._rank = engine.rank
        self._arena = arena
        self._devices = devices
        self._control = engine.control
        self._pipes = engine.pipes
        self._reads = DeviceReads(devices, engine)
        self._own: dict[int, int] = {}
        self._num_published = 0
        self._on_device: dict[int, deque[tuple[int, int]]] = {}
        """Versions that an entry has published on a device, and their numbers."""
        self._found: dict[tuple[int, int], int] = {}
        """Indices of entries that were found, by peer and name; an entry may have been closed since."""

    def open(self, key: int, name: str) -> int:
        """Takes an entry for a window that publishes for the first time."""
        if key in self._own.values():
            raise UsageError(
                f"Another window {name!r} of this worker publishes already.",
                next_step="close it first, or take another name.",
            )
        index = next((index for index in range(PUBLICATIONS) if index not in self._own), None)
        if index is None:
            raise UsageError(
                f"A worker publishes in at most {PUBLICATIONS} windows at the same time.",
                next_step="close those that are not needed any more.",
            )
        self._own[index] = key
        self._control.set_publication(index, _RECLAIMED, NOT_YET, _SETTLED, self._num_published + 1)
        return index

    def close(self, index: int) -> None:
        """Gives an entry back; snapshots of it are void, since it is no more what they have seen opened."""
        nothing = [_FREE, *[0] * (_RECORD_WORDS - 1)]
        self._control.set_publication(index, _OPENED, 0, *nothing, *nothing)
        del self._own[index]
        self._on_device.pop(index, None)
        self._tell()

    def publish(self, index: int, what: Sequence[int], version: int) -> None:
        """Publishes memory: its name, place, number of elements and dtype."""
        number = self._num_published + 1
        if what[_PLACE] >= DEVICE_CODE:  # it counts once the caller's stream has come here, too
            self._devices.device.caller.signal(self._control.address(self._rank, DEVICE_PUBLISHED), number)
            self._on_device.setdefault(index, deque(maxlen=_REMEMBERED)).append((version, number))
        turn = 1 - self._control.publication(self._rank, index)[_CURRENT]
        self._control.set_publication(index, _RECORDS + turn * _RECORD_WORDS, *what, number, version)
        self._control.set_publication(index, _CURRENT, turn)
        self._tell()

    def follow_readers(self, index: int, version: int) -> None:
        """Lets the caller's stream wait for those whose streams read an entry up to this version."""
        known = self._on_device.get(index)
        if not known:
            return
        numbers = [number for published, number in known if published <= version]
        if numbers:
            self._reads.follow(numbers[-1])  # they only grow

    def is_written_after(self, index: int, version: int) -> bool:
        """Tells whether one of the two newest of an entry, above a version, is there to fetch.

        On a device that is when its stream has come to it.
        """
        known = self._on_device.get(index)
        if not known:
            return True
        # what is written later is written after what was written before
        first = next((number for published, number in list(known)[-2:] if published > version), None)
        return first is None or self._control.is_done_on_device(self._rank, DEVICE_PUBLISHED, first)

    def reclaim(self, index: int, version: int) -> None:
        """Makes snapshots up to this version void from now on."""
        self._control.set_publication(index, _RECLAIMED, version)
        self._tell()

    def set_change(self, index: int, state: int) -> None:
        """Says whether this worker is about to change what it has published, or in the midst of it."""
        self._control.set_publication(index, _CHANGE, state)

    def fetch(self, peer: int, key: int) -> Snapshot | None:
        """Finds the newest of a peer's; one on a device is claimed, and nobody writes over it."""
        for _ in range(_LOOKS):
            found = self.newest(peer, key)
            if found is None or peer == self._rank or not self._devices.takes(found.tensor):
                return found
            claim = self._reads.begin(peer, found.number)
            if found.is_intact():
                found.end_claim = weakref.finalize(found, self._reads.end, claim)
                found.end_claim.atexit = False
                return found
            self._reads.end(claim)
        return None

    def newest(self, peer: int, key: int) -> _SharedSnapshot | None:
        """Finds the newest of a peer's; None when there is none, or the peer was stopped while publishing."""
        self._pipes.take_in()
        index = self._find(peer, key)
        if index is None:
            return None
        for look in range(_LOOKS):
            words = self._control.publication(peer, index)
            # while a peer that publishes is held up, the record before is there
            start = _RECORDS + (words[_CURRENT] ^ (look & 1)) * _RECORD_WORDS
            record = words[start : start + _RECORD_WORDS]
            name, place, num_elements, dtype, number, version = record
            # the name, too: a processor that reorders stores may show what the entry was before
            is_told = name == key and 0 < number <= self._control.get(peer, PUBLISHED)
            if place >= DEVICE_CODE:
                is_told = is_told and self._control.is_done_on_device(peer, DEVICE_PUBLISHED, number)
            again = self._control.publication(peer, index)
            # not the other words: were a wish to change what it has published enough to look at the record
            # before, its older version would be taken for that of the same memory
            is_whole = again[start : start + _RECORD_WORDS] == record and again[_OPENED] == words[_OPENED]
            if is_told and is_whole:
                segment, offset = (self._devices if place >= DEVICE_CODE else self._arena).at(place)
                tensor = segment.region(peer, offset, num_elements, DTYPES[dtype])
                return _SharedSnapshot(
                    self._engine, peer, index, words[_OPENED], number, peer, version, tensor
                )
            self._pipes.take_in()
        return None

    def record(self, peer: int, index: int) -> list[int]:
        """Reads the newer record of an entry."""
        words = self._control.publication(peer, index)
        start = _RECORDS + words[_CURRENT] * _RECORD_WORDS
        return words[start : start + _RECORD_WORDS]

    def _find(self, peer: int, key: int) -> int | None:
        found = self._found.get((peer, key))
        if found is not None:
            words = self._control.publication(peer, found)
            if words[_RECORDS + words[_CURRENT] * _RECORD_WORDS + _NAME] == key:
                return found
        for index in range(PUBLICATIONS):
            name = self.record(peer, index)[_NAME]
            if name == key:
                self._found[peer, key] = index
                return index
            if not name:
                break
        return None

    def _tell(self) -> None:
        self._num_published += 1
        self._pipes.tell(PUBLISHED, self._num_published)


@dataclass(eq=False)
class _SharedSnapshot(Snapshot):
    engine: ProgressEngine
    owner: int
    """Whose table it is in; `rank` may be another one, where this is a machine's group in a larger one."""
    index: int
    opened: int
    number: int
    rank: int
    version: int
    tensor: torch.Tensor
    end_claim: weakref.finalize[..., _SharedSnapshot] | None = None
    """For one on a device, which stays as it is until the reads that were issued until this call are done.
    One that nobody asks for ends with the snapshot."""

    def is_intact(self) -> bool:
        if self.end_claim is not None and self.end_claim():
            return True
        self.engine.pipes.take_in()
        words = self.engine.control.publication(self.owner, self.index)
        return words[_OPENED] == self.opened and words[_RECLAIMED] < self.version  # not closed, nor reclaimed


class _HostSlot(WindowSlot):
    """A slot, inside of its `with` block; a class, since a generator would cost as much as what is done."""

    def __init__(self, window: HostWindow, source: int, cell: SlotCell) -> None:
        self.source = source  # a cluster's window names it by its rank there
        self._place = source
        self._window = window
        self._cell = cell

    def __enter__(self) -> Self:
        cell = self._cell
        self._window.take(cell, self._place)
        self.num_writes = cell.words[_NUM_WRITES]
        self.mass = cell.numbers[_MASS] if self.num_writes else 0.0
        self.note = bytes(cell.note[: cell.words[_NOTE_BYTES]]) if self.num_writes else b""
        self.tensor = cell.tensor
        return self

    def __exit__(self, *raised: object) -> None:
        self._window.give_back(self._cell, self._place)

    def clear(self) -> None:
        """Empties the slot; the memory is left as it is."""
        self._cell.words[_NUM_WRITES] = 0
        self.num_writes, self.mass, self.note = 0, 0.0, b""


class PendingWrites:
    """Writes and reads of one worker that could not be done when they were asked for, and are tried again.

    Those of one queue, a window and whom it writes to, follow each other.
    """

    def __init__(self, engine: ProgressEngine) -> None:
        self._engine = engine
        self._queues: dict[tuple[HostWindow, object], deque[_PendingWrite[Any]]] = {}
        self._guard = threading.Lock()
        self._pid = os.getpid()
        engine.besides = self.progress

    def begin(
        self, queue: tuple[HostWindow, object], what: str, attempt: Callable[[], T | Pending]
    ) -> Handle[T]:
        """Does it now, or as soon as possible after those before it in its queue."""
        self._engine.check_usable()
        if queue in self._queues:
            self.progress()
        if queue not in self._queues:
            result = attempt()
            if result is not PENDING:
                return Done(result)
        pending = _PendingWrite(self._engine, what, attempt)
        self._queues.setdefault(queue, deque()).append(pending)
        return pending

    @property
    def is_busy(self) -> bool:
        """Whether any is left to do."""
        return bool(self._queues)

    def progress(self) -> None:
        """Tries the first of each queue, and those behind it."""
        if not self._queues or os.getpid() != self._pid or not self._guard.acquire(blocking=False):
            return
        try:
            for queue, waiting in tuple(self._queues.items()):
                while waiting and waiting[0].try_again():
                    waiting.popleft()
                if not waiting:
                    self._queues.pop(queue, None)
        finally:
            self._guard.release()

    def drop(self, window: HostWindow | None, why: str) -> None:
        """Forgets those of a window, or of all: who waits for one gets a UsageError."""
        for queue in [queue for queue in self._queues if window is None or queue[0] is window]:
            for pending in self._queues.pop(queue):
                pending.error = UsageError(why, next_step="wait for its handle first.")


class _PendingWrite(PolledHandle[T]):
    def __init__(self, engine: ProgressEngine, what: str, attempt: Callable[[], T | Pending]) -> None:
        super().__init__(attempt)
        self._engine = engine
        self._what = what

    def wait(self, deadline: Deadline | None = None) -> T:
        if not self.is_done():
            self._engine.wait_until(lambda: self.is_over, deadline, self._what)
        return super().wait()

    def is_done(self) -> bool:
        if not self.is_over:
            self._engine.progress()  # which tries those before it, too
        return self.is_over


class FileLocks:
    """The locks that one worker takes: ranges of bytes of a file that all have open.

    Nothing is ever written there. A lock dies with its process. On Linux it belongs to an open file
    description of the worker's own, so that workers of one process keep each other out too; elsewhere to the
    process. Taking succeeds at once or not at all; waiting is the engine's. The kernel orders what is written
    under a lock before what the next holder reads, on all processors.
    """

    def __init__(self, descriptor: int) -> None:
        self._file, self._is_own = _reopen(descriptor)
        close_in_children(self._file)
        status = os.fstat(self._file)
        self._key = (0, 0) if self._is_own else (status.st_dev, status.st_ino)
        self._taken = {} if self._is_own else _held_in_process
        """Who has taken a lock, and in which thread, by the lock's place."""
        self._guard = threading.Lock()

    def try_take(self, at: int, num_bytes: int = 1) -> bool:
        """Takes a lock for this thread, if nobody has it."""
        with self._guard:
            key = (*self._key, at)
            if key in self._taken or not self._file_lock(at, num_bytes, is_taken=True):
                return False
            self._taken[key] = self, threading.get_ident()
            return True

    def release(self, at: int, num_bytes: int = 1) -> None:
        """Gives a lock back; does nothing when it was not taken."""
        with self._guard:
            key = (*self._key, at)
            if self._taken.get(key, (None, 0))[0] is self:
                self._file_lock(at, num_bytes, is_taken=False)
                del self._taken[key]

    def is_held_here(self, at: int) -> bool:
        """Tells whether the calling thread itself has a lock."""
        return self._taken.get((*self._key, at)) == (self, threading.get_ident())

    def first_taken(self, at: int, num_bytes: int) -> int | None:
        """Finds the first byte that another worker has; None also where the system does not say."""
        if not self._is_own or self._file < 0:
            return None
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, num_bytes, 0)
        kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(0, start - at)

    def close(self) -> None:
        """Gives back all locks that are taken."""
        with self._guard:
            if self._file >= 0:
                keep_in_children(self._file)
                os.close(self._file)
                self._file = -1
                for key in [key for key, (holder, _) in self._taken.items() if holder is self]:
                    del self._taken[key]

    def _file_lock(self, at: int, num_bytes: int, *, is_taken: bool) -> bool:
        if self._file < 0:
            return not is_taken
        try:
            if self._is_own:
                kind = fcntl.F_WRLCK if is_taken else fcntl.F_UNLCK
                asked = _FLOCK.pack(kind, os.SEEK_SET, at, num_bytes, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)
            else:
                wanted = fcntl.LOCK_EX | fcntl.LOCK_NB if is_taken else fcntl.LOCK_UN
                fcntl.lockf(self._file, wanted, num_bytes, at)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _reopen(descriptor: int) -> tuple[int, bool]:
    """Makes a descriptor for locks; tells whether its description is not shared with other workers."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # /proc may not be mounted
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), True
    return os.dup(descriptor), False


def _lock_of(owner: int, index: int) -> int:
    """The byte of rank 0 in the lock of a publication."""
    return _PUBLICATION_LOCKS + (owner * PUBLICATIONS + index) * _LOCK_STRIDE
