"""NVIDIA GPUs, as a group of one machine needs them: memory that other processes map, and streams in order.

Memory is mapped by CUDA IPC. Order between processes is kept by words of shared host memory that streams
write and wait for by themselves (`cuStreamWriteValue32`, `cuStreamWaitValue32`): no process waits for the GPU
of another, a processor sees without a call to CUDA what a GPU has done, and a stream that waits for a worker
that was lost goes on as soon as somebody writes the word for it. With interprocess events it would be stuck.
"""

from __future__ import annotations

import abc
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shoal.core import UsageError
from shoal.group.host.memory import MemoryFull

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_HANDLE_BYTES = 64
_MAPPED, _PORTABLE = 2, 1
_ALREADY_REGISTERED = 712
_PEER_ACCESS = 1
_WRITE_VALUE, _WAIT_VALUE = "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"
_GREATER_OR_EQUAL = 0


class DeviceStream(abc.ABC):
    """A queue of work that a device does in order, while the caller goes on."""

    @abc.abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Gives it some tensor operations."""

    @abc.abstractmethod
    def signal(self, address: int, value: int) -> None:
        """Lets it write a word of registered host memory when all before is done and visible to others."""

    @abc.abstractmethod
    def wait(self, address: int, value: int) -> None:
        """Lets it wait until a word of registered host memory is `value` or more."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until it has done all that it was given."""

    @abc.abstractmethod
    def follow(self, mark: object) -> None:
        """Lets what comes next wait for what a stream was given before `SharedDevice.mark`."""


class SharedDevice(abc.ABC):
    """One accelerator, as one process sees it."""

    name: str
    identity: str
    """Equal for all processes that use the same accelerator."""
    side: DeviceStream
    """The stream of collectives, which overlap with the caller's own work."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies in its memory."""
        return tensor.device.type == "cuda"

    @property
    @abc.abstractmethod
    def caller(self) -> DeviceStream:
        """The stream that the caller's operations go to now."""

    @abc.abstractmethod
    def mark(self, stream: DeviceStream) -> object:
        """Names the place that a stream has come to, for `DeviceStream.follow`."""

    @abc.abstractmethod
    def allocate(self, size_bytes: int) -> tuple[torch.Tensor, bytes]:
        """Takes memory, a flat uint8 tensor of zeros, and a handle by which other processes attach it.

        It goes back when the last tensor over it is gone.
        """

    @abc.abstractmethod
    def attach(self, handle: bytes, size_bytes: int) -> torch.Tensor:
        """Maps memory that another process has allocated, for as long as there are tensors over it."""

    @abc.abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Lets streams write and wait for words of some host memory."""

    @abc.abstractmethod
    def unregister(self, memory: torch.Tensor) -> None:
        """Ends what `register` began."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all that this process gave it."""


MakeDevice = Callable[[torch.device], SharedDevice]


def open_device(device: torch.device) -> SharedDevice:
    """Gives the device of a tensor; UsageError for kinds whose memory processes cannot share."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise UsageError(
            f"workers of one machine share memory of the CPU and of NVIDIA GPUs, not of {device}.",
            next_step='open the group with shoal.init(backend="gloo"), or keep the model on the CPU.',
        )
    return CudaSharedDevice(torch.cuda.current_device() if device.index is None else device.index)


class CudaSharedDevice(SharedDevice):
    """A GPU of this machine."""

    def __init__(self, index: int) -> None:
        self._index = index
        torch.zeros(1, device=f"cuda:{index}")  # the context exists from now on
        properties = torch.cuda.get_device_properties(index)
        self.name = f"cuda:{index} ({properties.name})"
        self.identity = str(properties.uuid)
        self._driver = _Driver(index)
        self._side: torch.cuda.Stream = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
        self.side = _CudaStream(self, self._side)
        self._registered: dict[int, tuple[int, int]] = {}
        """By the first address of registered memory: its end, and how far off the GPU sees it."""

    @property
    def caller(self) -> DeviceStream:
        """torch's current stream of this thread."""
        return _CudaStream(self, torch.cuda.current_stream(self._index))

    def mark(self, stream: DeviceStream) -> object:
        """Records an event."""
        assert isinstance(stream, _CudaStream)
        return stream.stream.record_event()

    def allocate(self, size_bytes: int) -> tuple[torch.Tensor, bytes]:
        """Takes memory of the driver: torch gives parts of blocks, and a handle maps whole ones."""
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
        """Maps it; the GPU may be another one of this machine, if this process sees it."""
        pointer = ctypes.c_uint64()
        opened = _IpcHandle.from_buffer_copy(handle)
        error = self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _PEER_ACCESS)
        self._driver.check(error, "map the memory of another worker")
        return self._tensor(pointer.value, size_bytes, "cuIpcCloseMemHandle")

    def register(self, memory: torch.Tensor) -> None:
        """Pins it and maps it for the GPU."""
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
        self._registered[start] = start + memory.nbytes, seen.value - start

    def unregister(self, memory: torch.Tensor) -> None:
        """Unpins it."""
        if self._registered.pop(memory.data_ptr(), None) is not None:
            self._driver.call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))

    def synchronize(self) -> None:
        """Waits for all streams of this process."""
        torch.cuda.synchronize(self._index)

    def enqueue(self, name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Gives a stream the write of a word, or the wait for one."""
        error = self._driver.call(
            name, stream.cuda_stream, self._seen_by_gpu(address), value, _GREATER_OR_EQUAL
        )
        if error:
            self._driver.check(error, "order its work")

    def _seen_by_gpu(self, address: int) -> int:
        for start, (end, offset) in self._registered.items():
            if start <= address < end:
                return address + offset
        raise UsageError(f"{self.name} cannot reach the host memory at {address:#x}.")

    def _tensor(self, pointer: int, size_bytes: int, release: str) -> torch.Tensor:
        """Makes a tensor; when it and all its views are gone, the driver's function `release` is called."""
        memory = _Memory(pointer, size_bytes)
        end = weakref.finalize(memory, self._driver.call, release, ctypes.c_uint64(pointer))
        end.atexit = False  # the process's end gives everything back
        return torch.as_tensor(memory, device=f"cuda:{self._index}")


class _CudaStream(DeviceStream):
    def __init__(self, device: CudaSharedDevice, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def signal(self, address: int, value: int) -> None:
        self._device.enqueue(_WRITE_VALUE, self.stream, address, value)

    def wait(self, address: int, value: int) -> None:
        self._device.enqueue(_WAIT_VALUE, self.stream, address, value)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def follow(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
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
        for name in (_WRITE_VALUE, _WAIT_VALUE):
            kinds = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            getattr(self._library, name).argtypes = kinds
        self._context = ctypes.c_void_p()
        self._thread = threading.local()
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), index), "be used")

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the driver in the context that torch uses."""
        if not getattr(self._thread, "is_ready", False):
            self._library.cuCtxSetCurrent(self._context)
            self._thread.is_ready = True
        return int(getattr(self._library, name)(*arguments))

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
