"""A GPU made of a thread: its side stream lags behind by random moments, and its memory is mapped by handles.

The caller's own stream is the caller's thread itself, so tensors may be filled and looked at as usual; what a
group forgets to order shows as stale values.
"""

import ctypes
import mmap
import os
import queue
import random
import threading
import time

import torch

from shoal.group.host.memory import MemoryFull

_LOOK_S = 5e-5
PINNED = []
"""First and last address of all host memory that fakes of this process have registered."""


class FakeDevice:
    """A `SharedDevice` without a GPU.

    `capacity_bytes` is what it has room for; with an `identity` each, workers have GPUs of their own.
    With `is_everything` all tensors count as its own, save those of uint8, in which objects travel.
    """

    def __init__(
        self, *, seed=0, identity="fake", capacity_bytes=1 << 40, longest_s=1e-3, is_everything=False
    ):
        self.name = self.identity = identity
        self.index = None
        self.capacity_bytes = capacity_bytes
        self.gate = threading.Event()
        """While it is not set, the side stream does nothing."""
        self.gate.set()
        self.side = _LaggingStream(random.Random(seed), longest_s, self.gate)
        self._caller = _CallerStream()
        self.registered = []
        self.is_everything = is_everything
        self._own = []

    def takes(self, tensor):
        if self.is_everything:
            return tensor.dtype is not torch.uint8
        pointer = tensor.data_ptr()
        return any(own.data_ptr() <= pointer < own.data_ptr() + own.nbytes for own in self._own)

    @property
    def caller(self):
        return self._caller

    def mark(self, stream):
        return stream.mark()

    def is_reached(self, mark):
        return mark is None or mark.is_set()

    def stream_of_group(self, *, is_shared):
        return self.side

    def keep(self, tensor, stream):
        pass

    def allocate(self, size_bytes):
        if size_bytes > self.capacity_bytes:
            raise MemoryFull(f"{self.name} has no room for {size_bytes} bytes.")
        self.capacity_bytes -= size_bytes
        descriptor = os.memfd_create("fake gpu")
        os.ftruncate(descriptor, size_bytes)
        handle = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        self._own.append(_tensor(descriptor, size_bytes))
        return self._own[-1], handle

    def attach(self, handle, size_bytes):
        descriptor = os.open(handle.decode(), os.O_RDWR)
        try:
            self._own.append(_tensor(descriptor, size_bytes))
        finally:
            os.close(descriptor)
        return self._own[-1]

    def register(self, memory):
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if any(other.data_ptr() == start for other in self.registered):
            return
        for low, high in PINNED:
            assert end <= low or high <= start, (
                "memory that is pinned already, like a driver's 'invalid argument'"
            )
        PINNED.append((start, end))
        self.registered.append(memory)

    def unregister(self, memory):
        if any(other.data_ptr() == memory.data_ptr() for other in self.registered):
            PINNED.remove((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            self.registered = [each for each in self.registered if each.data_ptr() != memory.data_ptr()]

    def unregister_all(self):
        for memory in list(self.registered):
            self.unregister(memory)

    def synchronize(self):
        self._caller.follow(self.side.mark())


def _tensor(descriptor, size_bytes):
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)


def _word(address):
    return ctypes.c_int32.from_address(address)


class _CallerStream:
    def run(self, work):
        work()

    def signal(self, address, value):
        _word(address).value = value

    def wait(self, address, value):
        while _word(address).value < value:
            time.sleep(_LOOK_S)

    def order(self, words):
        for is_write, address, value in words:
            (self.signal if is_write else self.wait)(address, value)

    def load(self, tensor, address):
        ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)

    def copy(self, to, tensor):
        to.copy_(tensor)

    def follow(self, mark):
        if mark is not None:
            mark.wait()

    def mark(self):
        return None

    def synchronize(self):
        pass


class _LaggingStream:
    def __init__(self, choice, longest_s, gate):
        self._choice = choice
        self._gate = gate
        self._longest_s = longest_s
        self._items = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def run(self, work):
        self._items.put(work)

    def signal(self, address, value):
        self._items.put(lambda: _CallerStream().signal(address, value))

    def wait(self, address, value):
        self._items.put(lambda: _CallerStream().wait(address, value))

    def order(self, words):
        self._items.put(lambda: _CallerStream().order(words))

    def load(self, tensor, address):
        self._items.put(lambda: _CallerStream().load(tensor, address))

    def copy(self, to, tensor):
        self._items.put(lambda: to.copy_(tensor))

    def follow(self, mark):
        if mark is not None:
            self._items.put(mark.wait)

    def synchronize(self):
        self.mark().wait()

    def mark(self):
        reached = threading.Event()
        self._items.put(reached.set)
        return reached

    def _work(self):
        while True:
            item = self._items.get()
            self._gate.wait()
            if self._choice.random() < 0.3:
                time.sleep(self._choice.random() * self._longest_s)
            item()
