"""GPU memory that the workers of one machine share, and the order of what their streams do with it.

Memory is mapped by CUDA IPC. Order between processes is kept by words of shared host memory that streams
write and wait for by themselves (`cuStreamWriteValue32`, `cuStreamWaitValue32`): no process waits for the GPU
of another, a processor sees without a call to CUDA what a GPU has done, and a stream that waits for a worker
that was lost goes on as soon as somebody writes the word for it. With interprocess events it would be stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shoal.core import UsageError
from shoal.group.base import T
from shoal.group.functions import share as share_objects
from shoal.group.host.engine import ProgressEngine
from shoal.group.host.memory import (
    DEVICE_CODE,
    FREED,
    NUM_READS,
    READ_CLAIMS,
    READ_TICKETS,
    READS_DONE,
    MappedMemory,
    MemoryFull,
    Segment,
)

if TYPE_CHECKING:
    from shoal.group.host.group import HostGroup

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_HANDLE_BYTES = 64
_MAPPED, _PORTABLE = 2, 1
_ALREADY_REGISTERED = 712
_PEER_ACCESS = 1
_INVALID_CONTEXT = 201
_NO_FLAGS = 0
_WAIT_FOR_WORD, _WRITE_WORD = 1, 2
Word: TypeAlias = tuple[bool, int, int]
"""Of registered host memory: whether a stream writes it or waits for it, its address, and its value."""
GRAIN_BYTES = 2 << 20
"""The driver gives memory in such pieces."""
MakeDevice = Callable[[torch.device], "SharedDevice"]
_still_pinned: deque[tuple[Callable[[], bool], SharedDevice]] = deque()
"""Devices of closed groups whose GPU had work left then, and what tells whether it is done.

They hold the host memory that they have registered: a new mapping at the same addresses could not be.
"""


def open_device(device: torch.device) -> SharedDevice:
    """Gives the device of a tensor; UsageError for kinds whose memory processes cannot share."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise UsageError(
            f"workers of one machine share memory of the CPU and of NVIDIA GPUs, not of {device}.",
            next_step='open the group with shoal.init(backend="gloo"), or keep the model on the CPU.',
        )
    return SharedDevice(torch.cuda.current_device() if device.index is None else device.index)


class DeviceMemory(MappedMemory[Segment]):
    """One worker's memory on its GPU, and the mapped memory of all others; there is one GPU for a worker."""

    queue: DeviceStream
    """The stream in which operations follow each other: that of the last one; there once one was begun."""

    def __init__(self, group: HostGroup, engine: ProgressEngine, make: MakeDevice = open_device) -> None:
        super().__init__()
        self.is_one_device = True
        """Whether all workers share one GPU."""
        self._group = group
        self._engine = engine
        self._make = make
        self._has_queue = False
        self._device: SharedDevice | None = None
        self._taken_bytes = 0

    @property
    def device(self) -> SharedDevice:
        """The GPU, once memory was taken on it."""
        assert self._device is not None, "no memory of a device was taken yet"
        return self._device

    def join_queue(self) -> DeviceStream:
        """Lets operations go to the stream that fits the caller now, behind all that were begun before.

        Workers that share a GPU use the caller's own: a second stream hides nothing there, and a process with
        work in two of them waits longer for its turn. Those with a GPU each use one beside the caller's.
        """
        stream = self.device.stream_of_group(is_shared=self.is_one_device)
        if not self._has_queue:
            self.queue, self._has_queue = stream, True
        elif stream is not self.queue:
            stream.follow(self.device.mark(self.queue))
            self.queue = stream
        return stream

    def order_caller(self) -> None:
        """Lets what the caller does next wait for the operations that were begun."""
        if self._has_queue and self._device is not None:
            caller = self._device.caller
            if self.queue is not caller:
                caller.follow(self._device.mark(self.queue))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies on a device."""
        return not tensor.is_cpu or (self._device is not None and self._device.takes(tensor))

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Takes memory on all members, and maps everybody's; MemoryFull on all when one has no room."""
        if num_elements <= 0:
            return torch.empty(0, dtype=dtype, device=device)
        rank = self._engine.rank
        size_bytes = -(-num_elements * dtype.itemsize // GRAIN_BYTES) * GRAIN_BYTES
        own, told = self._on_all(lambda: self._allocate(device, size_bytes))

        def attach() -> tuple[dict[int, torch.Tensor], None]:
            others = [(other, handle) for other, _, handle in told if other != rank]
            return {other: self.device.attach(handle, size_bytes) for other, handle in others}, None

        regions, _ = self._on_all(attach)
        self.is_one_device = len({identity for _, identity, _ in told}) == 1
        segment = Segment(DEVICE_CODE + self._taken_bytes, {rank: own, **regions}, rank)
        self._taken_bytes += size_bytes
        self._segments.append(segment)
        return segment.new_region(rank, 0, num_elements, dtype)

    def _allocate(self, device: torch.device, size_bytes: int) -> tuple[torch.Tensor, tuple[int, str, bytes]]:
        """Takes this worker's memory; says its rank, its GPU and the handle by which others attach it."""
        if self._device is None:
            _unpin_what_is_done()
            opened = self._make(device)
            opened.register(self._engine.control.memory)
            self._device = opened
            self._engine.is_on_device = True
        if self.device.index != device.index and device.index is not None:
            raise UsageError(
                f"this worker's memory of the group is on {self.device.name}, not on {device}.",
                next_step="use one GPU in each worker.",
            )
        own, handle = self.device.allocate(size_bytes)
        return own, (self._engine.rank, self.device.identity, handle)

    def _on_all(self, act: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Does something on all members, and collects what each says; what fails on one fails on all."""
        said, problem, is_full = None, "", False
        try:
            result, said = act()
        except (UsageError, RuntimeError, AttributeError) as error:
            problem = str(error) or repr(error)  # whatever it is, the others wait to hear of it
            is_full = isinstance(error, MemoryFull | torch.OutOfMemoryError)
        everybody = share_objects(self._group, [said, problem, is_full])
        for _, text, is_room_missing in everybody:
            if text:
                raise MemoryFull(text) if is_room_missing else UsageError(text)
        return result, [said for said, *_ in everybody]

    def free(self, tensor: torch.Tensor, meet: Callable[[], None]) -> None:
        """Gives memory back once nobody's GPU uses it; `meet` waits for the other workers."""
        segment = self.find(tensor)
        if segment is not None:
            self.device.synchronize()
            meet()
            self.forget(segment)

    def drain(self) -> Callable[[], bool]:
        """Tells, when asked, whether the GPU has done all that this worker gave it until now."""
        if self._device is None:
            return lambda: True
        device = self._device
        streams = [device.caller, self.queue] if self._has_queue else [device.caller]
        marks = [device.mark(stream) for stream in streams]
        return lambda: all(device.is_reached(mark) for mark in marks)

    def close(self) -> None:
        """Gives the memory back, as far as no tensor holds it; what the GPU may still write stays pinned."""
        self._segments.clear()
        if self._device is not None:
            _still_pinned.append((self.drain(), self._device))
            _unpin_what_is_done()


def _unpin_what_is_done() -> None:
    """Gives back the host memory of closed groups that no GPU writes any more."""
    for _ in range(len(_still_pinned)):
        with contextlib.suppress(IndexError):  # another thread has it
            is_done, device = _still_pinned.popleft()
            if is_done():
                device.unregister_all()
            else:
                _still_pinned.append((is_done, device))


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
        self._counters = engine.control.counters
        self._next = 0
        self._is_open = [False] * NUM_READS
        self._fence = threading.Lock()  # law: its atomic operations order stores before loads

    def begin(self, peer: int, number: int) -> tuple[int, int]:
        """Claims a publication of a peer; what it returns names the claim to `end`."""
        index = self._next
        self._next = (index + 1) % NUM_READS
        rank, ticket = self._engine.rank, self._counters[self._engine.rank][READ_TICKETS[index]]
        self.end((index, ticket))
        if ticket and not self._control.is_done_on_device(rank, READS_DONE[index], ticket):
            self._memory.device.caller.synchronize()  # all claims are taken, by reads that are not done
        self._control.set(READ_TICKETS[index], ticket + 1)
        self._control.set(READ_CLAIMS[index], (peer + 1) << 40 | number)
        self._is_open[index] = True
        self._order()
        return index, ticket + 1

    def end(self, claim: tuple[int, int]) -> bool:
        """Says that what is read under a claim was issued to the caller's stream; False when it had ended."""
        index, ticket = claim
        if not self._is_open[index] or self._counters[self._engine.rank][READ_TICKETS[index]] != ticket:
            return False
        self._is_open[index] = False
        self._memory.device.caller.signal(self._control.address(self._engine.rank, READS_DONE[index]), ticket)
        return True

    def follow(self, number: int) -> None:
        """Lets the caller's stream wait for those that read publications up to this number."""
        self._order()
        own = self._engine.rank + 1
        for rank in range(self._engine.size):
            if rank == self._engine.rank or self._engine.is_gone(rank):
                continue
            counters = self._counters[rank]
            for index, place in enumerate(READ_CLAIMS):
                claim = counters[place]
                if claim >> 40 != own or claim & ((1 << 40) - 1) > number:
                    continue
                ticket = counters[READ_TICKETS[index]]
                if not self._control.is_done_on_device(rank, READS_DONE[index], ticket):
                    self._memory.device.caller.wait(self._control.address(rank, READS_DONE[index]), ticket)

    def _order(self) -> None:
        with self._fence:
            pass


# --- NVIDIA ---


class SharedDevice:
    """A GPU of this machine, as one process sees it."""

    def __init__(self, index: int) -> None:
        self._index = self.index = index
        torch.zeros(1, device=f"cuda:{index}")  # the context exists from now on
        properties = torch.cuda.get_device_properties(index)
        self.name = f"cuda:{index} ({properties.name})"
        self.identity = str(properties.uuid)
        """Equal for all processes that use the same GPU."""
        self._driver = driver = _Driver(index)
        word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        copy = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        self.write_word = driver.prepare("cuStreamWriteValue32_v2", *word)
        self.wait_for_word = driver.prepare("cuStreamWaitValue32_v2", *word)
        batch = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
        self.order_words = driver.prepare("cuStreamBatchMemOp_v2", *batch)
        self.copy_from_host = driver.prepare("cuMemcpyHtoDAsync_v2", *copy)
        self.copy_on_device = driver.prepare("cuMemcpyDtoDAsync_v2", *copy)
        self._side: DeviceStream | None = None
        self._streams: dict[int, DeviceStream] = {}
        self._registered: dict[int, tuple[int, int, torch.Tensor]] = {}
        """By the first address of registered memory: its end, how far off the GPU sees it, and the memory."""
        self.seen: dict[int, int] = {}
        """Where the GPU sees words that it has written or waited for: `seen_by_gpu` once found them."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies in its memory."""
        return tensor.is_cuda

    @property
    def caller(self) -> DeviceStream:
        """The stream that the operations of this thread go to now; of each one there is one object."""
        known = self._streams.get(_current_stream(self._index))
        if known is None:
            stream = torch.cuda.current_stream(self._index)
            known = self._streams[stream.cuda_stream] = DeviceStream(self, stream)
        return known

    def stream_of_group(self, *, is_shared: bool) -> DeviceStream:
        """Finds the stream for operations: the caller's on a GPU that is shared, else one beside it."""
        if is_shared:
            return self.caller
        if self._side is None:
            side: torch.cuda.Stream = torch.cuda.Stream(self._index, priority=-1)  # type: ignore[no-untyped-call]
            self._side = DeviceStream(self, side)
        return self._side

    def mark(self, stream: DeviceStream) -> torch.cuda.Event:
        """Names the place that a stream has come to, for `DeviceStream.follow`."""
        event: torch.cuda.Event = stream.stream.record_event()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Tells whether a stream has come to a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def keep(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Lets torch use the memory of a tensor anew only when a stream is through with it."""
        tensor.record_stream(stream.stream)

    def allocate(self, size_bytes: int) -> tuple[torch.Tensor, bytes]:
        """Takes memory, a flat uint8 tensor of zeros, and a handle by which other processes attach it.

        It is the driver's own: torch gives parts of blocks, and a handle maps whole ones. It goes back when
        the last tensor over it is gone.
        """
        pointer = ctypes.c_uint64()
        error = self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        if error == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what torch keeps for later
            error = self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        if error == _OUT_OF_MEMORY:
            raise MemoryFull(
                f"{self.name} has no room for {size_bytes / 1e6:.1f} MB more.",
                next_step="use a smaller model or batch, or fewer workers on one GPU.",
            )
        self._driver.check(error, "take memory")
        handle = (ctypes.c_char * _HANDLE_BYTES)()
        self._driver.check(self._driver.call("cuIpcGetMemHandle", handle, pointer), "share memory")
        memory = self._tensor(pointer.value, size_bytes, "cuMemFree_v2")
        memory.zero_()
        torch.cuda.current_stream(self._index).synchronize()
        return memory, bytes(handle)

    def attach(self, handle: bytes, size_bytes: int) -> torch.Tensor:
        """Maps memory that another process has allocated, for as long as there are tensors over it.

        The GPU may be another one of this machine, if this process sees it.
        """
        pointer = ctypes.c_uint64()
        opened = _IpcHandle.from_buffer_copy(handle)
        error = self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _PEER_ACCESS)
        self._driver.check(error, "map the memory of another worker")
        return self._tensor(pointer.value, size_bytes, "cuIpcCloseMemHandle")

    def register(self, memory: torch.Tensor) -> None:
        """Pins host memory and maps it for the GPU, so that streams write and wait for words in it."""
        start = memory.data_ptr()
        if start in self._registered:
            return
        error = self._driver.call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(start),
            ctypes.c_size_t(memory.nbytes),
            _MAPPED | _PORTABLE,
        )
        if error != _ALREADY_REGISTERED:
            self._driver.check(error, "map host memory")
        seen = ctypes.c_uint64()
        error = self._driver.call(
            "cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(start), ctypes.c_uint(0)
        )
        self._driver.check(error, "map host memory")
        self._registered[start] = start + memory.nbytes, seen.value - start, memory

    def unregister(self, memory: torch.Tensor) -> None:
        """Ends what `register` began."""
        self.seen.clear()
        if self._registered.pop(memory.data_ptr(), None) is not None:
            self._driver.call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))

    def unregister_all(self) -> None:
        """Ends what `register` began for all memory, also that of windows nobody has closed."""
        for _, _, memory in list(self._registered.values()):
            self.unregister(memory)

    def synchronize(self) -> None:
        """Waits until the GPU has done all that this process gave it."""
        torch.cuda.synchronize(self._index)

    def seen_by_gpu(self, address: int) -> int:
        """Finds where the GPU sees registered host memory."""
        for start, (end, offset, _) in self._registered.items():
            if start <= address < end:
                seen = self.seen[address] = address + offset
                return seen
        raise UsageError(f"{self.name} cannot reach the host memory at {address:#x}.")

    def _tensor(self, pointer: int, size_bytes: int, release: str) -> torch.Tensor:
        """Makes a tensor; when it and all its views are gone, the driver's function `release` is called."""
        memory = _Memory(pointer, size_bytes)
        end = weakref.finalize(memory, self._driver.call, release, ctypes.c_uint64(pointer))
        end.atexit = False  # the process's end gives everything back
        return torch.as_tensor(memory, device=f"cuda:{self._index}")


def _current_stream(index: int) -> int:
    """Gives the number of the caller's stream.

    torch's own programs ask for it by a name that is not documented; the documented one makes an object.
    """
    get: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(index).cuda_stream if get is None else get(index)


class DeviceStream:
    """A queue of work that a GPU does in order, while the caller goes on."""

    def __init__(self, device: SharedDevice, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._number = stream.cuda_stream
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        """Gives it some tensor operations."""
        if self._device.caller is self:
            work()
        else:
            with torch.cuda.stream(self.stream):
                work()

    def signal(self, address: int, value: int) -> None:
        """Lets it write a word of registered host memory when all before is done and visible to others."""
        device = self._device
        seen = device.seen.get(address) or device.seen_by_gpu(address)
        device.write_word(self._number, seen, value, _NO_FLAGS)

    def wait(self, address: int, value: int) -> None:
        """Lets it wait until a word of registered host memory is `value` or more; no flag says so."""
        device = self._device
        seen = device.seen.get(address) or device.seen_by_gpu(address)
        device.wait_for_word(self._number, seen, value, _NO_FLAGS)

    def order(self, words: Sequence[Word]) -> None:
        """Lets it write words and wait for words, one after the other, by one call to the driver.

        A call takes 10 to 15 µs in a step whose code has left the processor's caches, however many words.
        """
        if len(words) == 1:
            is_write, address, value = words[0]
            (self.signal if is_write else self.wait)(address, value)
            return
        device, batch = self._device, (_BatchedWord * len(words))()
        for place, (is_write, address, value) in zip(batch, words, strict=True):
            place.kind = _WRITE_WORD if is_write else _WAIT_FOR_WORD
            place.address = device.seen.get(address) or device.seen_by_gpu(address)
            place.value = value
        device.order_words(self._number, len(words), ctypes.addressof(batch), _NO_FLAGS)

    def load(self, tensor: torch.Tensor, address: int) -> None:
        """Lets it fill a tensor from registered host memory, with what is there when it comes to it."""
        self._device.copy_from_host(tensor.data_ptr(), address, tensor.nbytes, self._number)

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        """Lets it copy a tensor without gaps to one that is alike; torch takes five times as long to ask."""
        self._device.copy_on_device(to.data_ptr(), tensor.data_ptr(), tensor.nbytes, self._number)

    def synchronize(self) -> None:
        """Waits until it has done all that it was given."""
        self.stream.synchronize()

    def follow(self, mark: torch.cuda.Event) -> None:
        """Lets what comes next wait for what a stream was given before `SharedDevice.mark`."""
        self.stream.wait_event(mark)


class _Memory:
    """Some GPU memory, in the terms by which torch takes it from others without a copy."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _BatchedWord(ctypes.Structure):
    """One of the driver's `CUstreamBatchMemOpParams`: a word to write, or to wait for (`value` or more)."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    )


class _Driver:
    """The CUDA driver's own interface, for what torch has no function for."""

    def __init__(self, index: int) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise UsageError(
                f"workers cannot share the memory of a GPU here: {error}.",
                next_step='open the group with shoal.init(backend="gloo").',
            ) from None
        self._index = index
        self._context = ctypes.c_void_p()
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), index), "be used")

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the driver in the context that torch uses."""
        self._library.cuCtxPushCurrent_v2(self._context)  # the thread may have come to another GPU since
        try:
            return int(getattr(self._library, name)(*arguments))
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def prepare(self, name: str, *kinds: Any) -> Callable[..., None]:
        """Gives a function that gives a stream some work; several are called in every step of training."""
        function, index = getattr(self._library, name), self._index
        function.argtypes = kinds
        current_device = torch.cuda.current_device

        def enqueue(*arguments: int) -> None:
            error = function(*arguments) if current_device() == index else _INVALID_CONTEXT
            if error == _INVALID_CONTEXT:  # at another GPU, or a thread that has not used one yet
                error = self.call(name, *arguments)
            if error:
                self.check(error, "order its work")

        return enqueue

    def check(self, error: int, what: str) -> None:
        """Raises UsageError for anything but success."""
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise UsageError(
                f"GPU {self._index} could not {what}: {reason} (CUDA error {error}).",
                cause="the driver or the container does not let processes share a GPU's memory.",
                next_step='open the group with shoal.init(backend="gloo"), which goes through host memory.',
            )
