"""GPU memory of the workers of one machine: collectives, slots of windows and publications in it.

The protocol is that of the CPU: of operation n a worker says that it has arrived, and that it has finished.
On a GPU both are said twice: by the processor when it has *issued* its part, and by the GPU when its part is
*done*, in a word of the control page that its stream writes (`cuda`). An operation that ends the run on a
loss waits on the processor until all have issued their parts, and leaves the rest to the streams. One that
outlives losses waits on the processor until the others' parts are done, so that nothing is mixed in that is
half-written.

Workers that share one GPU take turns on it, and a change from one process to another costs as much as
reducing 100 MB. So there one of them reduces for all, and mixes for all where everybody mixes with everybody.
Workers on GPUs of their own reduce a share each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from shoal.core import UsageError
from shoal.group.functions import share as share_objects
from shoal.group.host.cuda import MakeDevice, SharedDevice, open_device
from shoal.group.host.engine import ProgressEngine
from shoal.group.host.memory import (
    DEVICE_CODE,
    DEVICE_PUBLISHED,
    FREED,
    NUM_READS,
    READ_CLAIMS,
    READ_TICKETS,
    READS_DONE,
    MemoryFull,
)

if TYPE_CHECKING:
    from shoal.group.host.group import HostGroup

GRAIN_BYTES = 2 << 20
"""The driver gives memory in such pieces."""


class DeviceSegment:
    """A range of GPU memory: a region of `stride_bytes` at each rank, all mapped here."""

    def __init__(self, code: int, regions: Mapping[int, torch.Tensor], rank: int) -> None:
        self.code = code
        """A number for its beginning that is the same on all workers."""
        self.regions = regions
        self.stride_bytes = regions[rank].numel()
        self.start = regions[rank].data_ptr()
        self.end = self.start + self.stride_bytes

    def region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Gives a flat tensor in a rank's region."""
        end = offset_bytes + num_elements * dtype.itemsize
        return self.regions[rank][offset_bytes:end].view(dtype)


class DeviceMemory:
    """One worker's memory on its GPU, and the mapped memory of all others; there is one GPU for a worker."""

    def __init__(self, group: HostGroup, engine: ProgressEngine, make: MakeDevice = open_device) -> None:
        self.is_one_device = True
        """Whether all workers share one GPU."""
        self._group = group
        self._engine = engine
        self._make = make
        self._device: SharedDevice | None = None
        self._segments: list[DeviceSegment] = []
        self._taken_bytes = 0

    @property
    def device(self) -> SharedDevice:
        """The GPU, once memory was taken on it."""
        assert self._device is not None, "no memory of a device was taken yet"
        return self._device

    @property
    def is_open(self) -> bool:
        """Whether memory was taken on a device."""
        return self._device is not None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies on a device."""
        return tensor.device.type != "cpu" or (self._device is not None and self._device.takes(tensor))

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Takes memory on all members, and maps everybody's; MemoryFull on all when one has no room."""
        if num_elements <= 0:
            return torch.empty(0, dtype=dtype, device=device)
        rank = self._engine.rank
        size_bytes = -(-num_elements * dtype.itemsize // GRAIN_BYTES) * GRAIN_BYTES
        own, told = self._allocate(device, size_bytes)
        regions, problem = {rank: own}, ""
        for other, (_, handle) in told.items():
            if other != rank:
                try:
                    regions[other] = self.device.attach(handle, size_bytes)
                except UsageError as error:
                    problem = str(error)
        problems = [text for text in share_objects(self._group, problem) if text]
        if problems:
            raise UsageError(problems[0])
        self.is_one_device = len({identity for identity, _ in told.values()}) == 1
        segment = DeviceSegment(DEVICE_CODE + self._taken_bytes, regions, rank)
        self._taken_bytes += size_bytes
        self._segments.append(segment)
        return segment.region(rank, 0, num_elements, dtype)

    def _allocate(
        self, device: torch.device, size_bytes: int
    ) -> tuple[torch.Tensor, dict[int, tuple[str, bytes]]]:
        """Takes this worker's memory; learns everybody's GPU and handle, by rank."""
        own, handle, identity, problem = torch.empty(0), b"", "", ""
        try:
            if self._device is None:
                opened = self._make(device)
                opened.register(self._engine.control.memory)
                self._device = opened
            identity = self.device.identity
            own, handle = self.device.allocate(size_bytes)
        except UsageError as error:
            problem = str(error)
        everybody = share_objects(self._group, [self._engine.rank, identity, handle, problem])
        problems = [text for *_, text in everybody if text]
        if problems:
            raise MemoryFull(problems[0])
        return own, {rank: (identity, handle) for rank, identity, handle, _ in everybody}

    def free(self, tensor: torch.Tensor, meet: Callable[[], None]) -> None:
        """Gives memory back once nobody's GPU uses it; `meet` waits for the other workers."""
        segment = self._find(tensor)
        if segment is not None:
            self.device.synchronize()
            meet()
            self._segments.remove(segment)

    def find_own(self, tensor: torch.Tensor) -> tuple[DeviceSegment, int] | None:
        """Tells where a tensor lies in group memory; None for other memory and for tensors with gaps."""
        segment = self._find(tensor)
        if segment is None or not tensor.is_contiguous():
            return None
        return segment, tensor.data_ptr() - segment.start

    def at(self, code: int) -> tuple[DeviceSegment, int]:
        """Finds the segment, and the offset in its regions, that a number names."""
        for segment in self._segments:
            if 0 <= code - segment.code < segment.stride_bytes:
                return segment, code - segment.code
        raise UsageError("A peer names GPU memory that this worker has given back.")

    def close(self) -> None:
        """Gives the memory back, for as far as no tensor holds it."""
        self._segments.clear()
        if self._device is not None:
            self._device.unregister(self._engine.control.memory)

    def _find(self, tensor: torch.Tensor) -> DeviceSegment | None:
        pointer = tensor.data_ptr()
        return next((each for each in self._segments if each.start <= pointer < each.end), None)


# --- windows ---


class DeviceSlot:
    """How often one slot in GPU memory was written and read, so that streams wait for each other.

    The counts change when a write or a read is issued, under the slot's lock; GPUs say when it is done.
    """

    SIZE_BYTES = 256
    _WRITES, _IS_SUM, _READS, _WRITTEN, _READ = 0, 1, 8, 16, 24
    """Words of 8 bytes, those of two writers in cache lines of their own."""

    def __init__(self, device: SharedDevice, memory: torch.Tensor) -> None:
        self._device = device
        self._words = memory.numpy().data.cast("B").cast("q")
        self._address = memory.data_ptr()

    def begin_write(self) -> None:
        """Lets the caller's stream wait until the owner's has read what was there."""
        if self._words[self._READS]:
            self._device.caller.wait(self._address + 8 * self._READ, self._words[self._READS])

    def end_write(self, *, is_sum: bool) -> None:
        """Says that a write was issued, which added to earlier ones or not."""
        self._words[self._IS_SUM] = is_sum
        self._words[self._WRITES] += 1
        self._device.caller.signal(self._address + 8 * self._WRITTEN, self._words[self._WRITES])

    def is_written(self) -> bool:
        """Tells whether all writes that were issued are done."""
        return self._words[self._WRITTEN] >= self._words[self._WRITES]

    @property
    def is_sum(self) -> bool:
        """Whether the last write added to what was there."""
        return bool(self._words[self._IS_SUM])

    def end_read(self) -> None:
        """Says that a read was issued."""
        self._words[self._READS] += 1
        self._device.caller.signal(self._address + 8 * self._READ, self._words[self._READS])

    def free(self) -> None:
        """Lets no stream wait for the owner any more: it is lost."""
        self._words[self._READ] = FREED


class DeviceReads:
    """Reads of publications in GPU memory that streams have under way, so that nobody writes over them.

    A reader claims a publication before it looks once more whether that is still valid; a publisher makes it
    void before it looks at the claims. With a fence in between one of the two sees the other (Dekker). The
    publisher's stream then waits until the reader's has read.
    """

    def __init__(self, memory: DeviceMemory, engine: ProgressEngine) -> None:
        self._memory = memory
        self._engine = engine
        self._control = engine.control
        self._next = 0
        self._is_open = [False] * NUM_READS
        self._fence = threading.Lock()  # law: its atomic operations order stores before loads

    def begin(self, peer: int, number: int) -> int:
        """Claims a publication of a peer; the claim's number is for `end`."""
        index = self._next
        self._next = (index + 1) % NUM_READS
        if self._is_open[index]:
            self.end(index)
        rank, ticket = self._engine.rank, self._control.get(self._engine.rank, READ_TICKETS[index])
        if ticket and not self._control.is_done_on_device(rank, READS_DONE[index], ticket):
            self._memory.device.caller.synchronize()  # all claims are taken, by reads that are not done
        self._control.set(READ_TICKETS[index], ticket + 1)
        self._control.set(READ_CLAIMS[index], (peer + 1) << 40 | number)
        self._is_open[index] = True
        self._order()
        return index

    def end(self, index: int) -> None:
        """Says that what is read under a claim was issued to the caller's stream."""
        if self._is_open[index]:
            self._is_open[index] = False
            ticket = self._control.get(self._engine.rank, READ_TICKETS[index])
            word = self._control.address(self._engine.rank, READS_DONE[index])
            self._memory.device.caller.signal(word, ticket)

    def publish(self, number: int) -> None:
        """Says, when the caller's stream has come there, that a publication is written."""
        word = self._control.address(self._engine.rank, DEVICE_PUBLISHED)
        self._memory.device.caller.signal(word, number)

    def follow(self, number: int) -> None:
        """Lets the caller's stream wait for those that read publications up to this number."""
        self._order()
        own = self._engine.rank + 1
        for rank in range(self._engine.size):
            if rank == self._engine.rank or self._engine.is_gone(rank):
                continue
            for index in range(NUM_READS):
                claim = self._control.get(rank, READ_CLAIMS[index])
                if claim >> 40 == own and claim & ((1 << 40) - 1) <= number:
                    ticket = self._control.get(rank, READ_TICKETS[index])
                    self._memory.device.caller.wait(self._control.address(rank, READS_DONE[index]), ticket)

    def _order(self) -> None:
        with self._fence:
            pass
