"""Experts on a GPU: copies in, computing and copies out overlap, each on a stream of its own.

Requests are received into pinned memory, which the GPU reads by itself, and answers are sent from such. All
computing of all experts is on one stream: what an update writes, the next batch reads. A second thread waits
for batches to end, so that this one can start the next ones meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.core import LoopThread, UsageError
from shoal.experts.devices.device import (
    Device,
    Results,
    Tensors,
    encoded,
    explained,
    merged,
    received_tensors,
    taken_apart,
)
from shoal.experts.jobs import Job, JobKind
from shoal.experts.kept import KeptInputs
from shoal.experts.settings import ServerSettings
from shoal.tensors.memory import tensor_over
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Head

_DEPTH = 3
"""Batches that are started and not ended: one is copied in, one computed, one copied out."""


class PinnedArena:
    """Pinned memory in large pieces, cut as it is asked for: pinning costs milliseconds, whatever the size.

    What is cut is never given back to the arena; the pool that asks for it uses it again.
    """

    def __init__(self, first_bytes: int, more_bytes: int) -> None:
        self._more_bytes = more_bytes
        self._lock = threading.Lock()
        self._piece = _pinned(first_bytes)
        self._at = 0

    def take(self, size_bytes: int) -> Any:
        """An array of so many bytes."""
        with self._lock:
            if self._at + size_bytes > len(self._piece):
                self._piece = _pinned(max(size_bytes, self._more_bytes))
                self._at = 0
            taken = self._piece[self._at : self._at + size_bytes]
            self._at += size_bytes
            return taken


class CudaDevice(Device):
    """One GPU."""

    def __init__(self, settings: ServerSettings, kept: KeptInputs) -> None:
        if not torch.cuda.is_available():
            raise UsageError(
                f"There is no GPU for --device {settings.device}.",
                cause="torch finds no CUDA device, or is a build without CUDA.",
                next_step="use --device cpu, or see what `shoal doctor` says.",
            )
        super().__init__(f"cuda:{torch.device(settings.device).index or 0}", settings, kept)
        self._num_started = 0
        self._lock = threading.Lock()
        self._waiter = LoopThread("shoal-device-done")

    def open(self, deliver: Callable[[Results], None], on_ready: Callable[[], None]) -> None:
        """Pin memory and make streams."""
        super().open(deliver, on_ready)
        torch.cuda.set_device(self.torch_device)
        precision = "high" if self._settings.precision == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        arena = PinnedArena(self._settings.pinned_bytes, self._settings.pinned_bytes // 4)
        self._pool = BufferPool(max_idle_bytes=1 << 62, make_storage=arena.take)
        self._copies_in, self._computing, self._copies_out = (
            torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._waiter.__enter__()

    def allocate(self, head: Head) -> Sequence[Any]:
        """Pinned memory for a request."""
        return self._pool.allocate_all(head.sizes)

    def can_start(self) -> bool:
        """While few are under way."""
        return self._num_started < _DEPTH

    def start(self, jobs: list[Job]) -> None:
        """Put a batch on the streams; its results are delivered once it has come through."""
        with self._lock:
            self._num_started += 1
        try:
            running = self._started(jobs)
        except Exception as error:  # noqa: BLE001 - a GPU that has failed, or has no memory left
            running = _Running(failed=[(job, explained(error, job.expert)) for job in jobs])
        self._waiter.loop.call_soon_threadsafe(self._finish, running)

    def close(self) -> None:
        """Wait for what is under way."""
        self._waiter.__exit__(None, None, None)
        torch.cuda.synchronize(self.torch_device)

    def _started(self, jobs: list[Job]) -> _Running:
        running = _Running()
        loaded = []
        for job in jobs:
            try:
                loaded.append((job, self._load(job, running)))
            except Exception as error:  # noqa: BLE001 - of what a client has sent
                running.failed.append((job, explained(error, job.expert)))
        self._computing.wait_event(self._copies_in.record_event())
        if loaded:
            with torch.cuda.stream(self._computing):
                computed = self._compute(loaded, running)
            self._copies_out.wait_event(self._computing.record_event())
            for job, tensors in computed:
                running.ended.append((job, self._copied_out(tensors)))
        running.done = self._copies_out.record_event()
        return running

    def _load(self, job: Job, running: _Running) -> _Loaded:
        """Bring a request's tensors to the GPU."""
        on_host = received_tensors(job)
        running.held.append(on_host)
        with torch.cuda.stream(self._copies_in):
            on_gpu = [
                [tensor.to(self.torch_device, non_blocking=True) for tensor in tensors] for tensors in on_host
            ]
        if job.kind is JobKind.FORWARD:
            inputs, grads = on_gpu[0], []
        else:
            grads = on_gpu[0]
            inputs = on_gpu[1] if job.kept is None else list(job.kept)
        for tensor in (*inputs, *grads):
            _keep_for(tensor, self._computing)
        return inputs, grads

    def _compute(self, batch: Sequence[tuple[Job, _Loaded]], running: _Running) -> list[tuple[Job, Tensors]]:
        jobs = [job for job, _ in batch]
        expert, kind = jobs[0].expert, jobs[0].kind
        try:
            inputs = merged([inputs for _, (inputs, _) in batch])
            grads = merged([grads for _, (_, grads) in batch])
            outputs = self.compute(expert, kind, inputs, grads)
        except Exception as error:  # noqa: BLE001 - whatever a module raises is told to its clients
            if len(batch) == 1:
                running.failed.append((jobs[0], explained(error, expert)))
                return []
            # one request must not spoil the others: each by itself, and only the culprit fails
            return [result for part in batch for result in self._compute([part], running)]
        if kind is JobKind.FORWARD:
            for job, (tensors, _) in batch:
                if job.keep_as:
                    self._kept.keep(job.keep_as, expert.uid, tensors)
        return list(zip(jobs, taken_apart(jobs, outputs), strict=True))

    def _copied_out(self, tensors: Tensors) -> Tensors:
        copies: list[torch.Tensor | None] = []
        with torch.cuda.stream(self._copies_out):
            for tensor in tensors:
                if tensor is None:
                    copies.append(None)
                    continue
                dense = tensor.contiguous()
                memory = self._pool.allocate(dense.numel() * dense.element_size())
                copy = tensor_over(memory).view(dense.dtype).view(dense.shape)
                copy.copy_(dense, non_blocking=True)
                _keep_for(dense, self._copies_out)
                copies.append(copy)
        return copies

    def _finish(self, running: _Running) -> None:
        """On the other thread: wait until a batch has come through, and deliver it."""
        results: Results = list(running.failed)
        try:
            if running.done is not None:
                running.done.synchronize()
            results += [(job, encoded(job, tensors)) for job, tensors in running.ended]
        except Exception as error:  # noqa: BLE001 - a GPU that has failed fails every batch
            results += [(job, explained(error, job.expert)) for job, _ in running.ended]
        running.held.clear()
        with self._lock:
            self._num_started -= 1
        self._on_ready()
        self._deliver(results)


_Loaded = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Inputs, and gradients of outputs."""


class _Running(msgspec.Struct, eq=False):
    """A batch on its way through the GPU."""

    held: list[Any] = []
    """What the GPU still reads."""
    failed: Results = []
    ended: list[tuple[Job, Tensors]] = []
    done: Any = None


def _keep_for(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Have the tensor's memory not used again before the stream has come past this point."""
    tensor.record_stream(stream)


def _pinned(size_bytes: int) -> Any:
    memory: Any = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    assert memory.dtype == np.uint8
    return memory
