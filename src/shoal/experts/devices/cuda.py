"""Experts on a GPU: copies in, computing and copies out overlap, each on a stream of its own.

Requests are received into pinned memory, which the GPU reads by itself, and answers are sent from such. All
computing of all experts is on one stream: what an update writes, the next batch reads. A second thread waits
for batches to end, so that this one can start the next ones meanwhile.

Many network threads want the interpreter's lock, and every call to torch gives it away and has to get it
back: a batch is put on the streams with as few calls as can be, one tensor for all of its requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from shoal.core import LoopThread, PeerLeaving, UsageError
from shoal.experts.devices.device import (
    Device,
    Results,
    T,
    Tensors,
    as_wanted,
    explained,
    keep_stacked,
    merged,
    places,
    received_tensors,
)
from shoal.experts.server.jobs import InputCache, Job, JobKind, Outcome
from shoal.experts.settings import ServerSettings
from shoal.experts.wire import rows_of, stacked
from shoal.tensors import EncodedMeta, TensorSpec
from shoal.tensors.codecs.base import PLAIN
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.memory import tensor_over
from shoal.transport.memory import BufferPool
from shoal.transport.messages import Head

_MAX_PINNED = 4
"""Times what is pinned at the start: beyond it, plain memory is used."""
_DEPTH = 3
"""Batches that are started and not ended: one is copied in, one computed, one copied out."""


class PinnedArena:
    """Pinned memory in large pieces, cut as it is asked for: pinning costs milliseconds, whatever the size.

    What is cut is never given back to the arena; the pool that asks for it uses it again.
    """

    def __init__(self, first_bytes: int, more_bytes: int, max_bytes: int) -> None:
        self._more_bytes = more_bytes
        self._lock = threading.Lock()
        self._piece = _pinned(first_bytes)
        self._at = 0
        self._left_bytes = max_bytes - first_bytes

    def take(self, size_bytes: int) -> Any | None:
        """An array of so many bytes; None when that were more than may be pinned."""
        with self._lock:
            if self._at + size_bytes > len(self._piece):
                piece_bytes = max(size_bytes, self._more_bytes)
                if piece_bytes > self._left_bytes:
                    return None
                self._left_bytes -= piece_bytes
                if size_bytes == piece_bytes:
                    return _pinned(size_bytes)
                self._piece = _pinned(piece_bytes)
                self._at = 0
            taken = self._piece[self._at : self._at + size_bytes]
            self._at += size_bytes
            return taken


class CudaDevice(Device):
    """Computes on one GPU."""

    def __init__(self, settings: ServerSettings, kept: InputCache) -> None:
        if not torch.cuda.is_available():
            raise UsageError(
                f"There is no GPU for --device {settings.device}.",
                cause="torch finds no CUDA device, or is a build without CUDA.",
                next_step="use --device cpu, or see what `shoal doctor` says.",
            )
        super().__init__(f"cuda:{torch.device(settings.device).index or 0}", settings, kept)
        self._num_started = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._waiter = LoopThread("shoal-device-done")

    def open(self, deliver: Callable[[Results], None], on_ready: Callable[[], None]) -> None:
        """Pin memory and make streams."""
        super().open(deliver, on_ready)
        torch.cuda.set_device(self.torch_device)
        precision = "high" if self._settings.precision == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        pinned_bytes = self._settings.pinned_bytes or 1 << 28
        arena = PinnedArena(pinned_bytes, pinned_bytes // 4, _MAX_PINNED * pinned_bytes)
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
            is_closed = self._is_closed
            self._num_started += not is_closed
        if is_closed:
            error = PeerLeaving("this server is leaving.", next_step="ask another one.")
            self._deliver([(job, error) for job in jobs])
            return
        running = _Running()
        try:
            self._put_on_streams(jobs, running)
        except Exception as error:  # noqa: BLE001 - a GPU that has failed, or has no memory left
            told = [job for job, _ in (*running.failed, *running.ended)]
            running.failed += [(job, explained(error, job.expert)) for job in jobs if job not in told]
        self._waiter.loop.call_soon_threadsafe(self._finish, running)

    def between_batches(self, work: Callable[[], T]) -> T:
        """On the stream that computes, and to its end."""
        with torch.cuda.stream(self._computing):
            result = work()
        self._computing.synchronize()
        return result

    def close(self) -> None:
        """Wait for what is under way, which is delivered; what is started from now on is refused."""
        with self._lock:
            self._is_closed = True
        while self._num_started:
            self._waiter.run(asyncio.sleep(0.001))
        self._waiter.__exit__(None, None, None)
        torch.cuda.synchronize(self.torch_device)

    # --- copies in ---

    def _put_on_streams(self, jobs: list[Job], running: _Running) -> None:
        sound: list[Job] = []
        received: list[list[list[torch.Tensor]]] = []
        are_small = all(job.is_small for job in jobs)
        for job in jobs:
            try:
                received.append([] if are_small else received_tensors(job))
                sound.append(job)
            except Exception as error:  # noqa: BLE001 - of what a client has sent
                running.failed.append((job, explained(error, job.expert)))
        if not sound:
            return
        running.held.append(received)
        is_whole = False
        try:
            with torch.cuda.stream(self._copies_in):
                if are_small:
                    inputs, grads = self._copied_in_stacked(sound, running)
                else:
                    inputs, grads = self._copied_in(sound, received)
            self._computing.wait_event(self._copies_in.record_event())
            with torch.cuda.stream(self._computing):
                for part, outputs in self._computed(sound, inputs, grads, running):
                    self._copy_out(part, outputs, running)
            is_whole = not running.failed
        finally:
            if not is_whole:  # the last copy out need not come after everything else
                self._copies_out.wait_stream(self._computing)
                self._copies_out.wait_stream(self._copies_in)
            running.done = self._copies_out.record_event()

    def _copied_in(
        self, jobs: list[Job], received: list[list[list[torch.Tensor]]]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Inputs, and gradients of outputs, of all jobs one after another."""
        if jobs[0].kind is JobKind.FORWARD:
            return self._joined([tensors for (tensors,) in received]), []
        grads = self._joined([first for first, *_ in received])
        inputs = [
            self._joined(others) if job.kept is None else list(job.kept)
            for job, (_, *others) in zip(jobs, received, strict=True)
        ]
        return inputs[0] if len(inputs) == 1 else _Apart(inputs), grads

    def _copied_in_stacked(
        self, jobs: list[Job], running: _Running
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The same of small requests: stacked in pinned memory, so that each tensor takes one copy in."""
        first = self._staged([job.received[0] for job in jobs], running)
        if jobs[0].kind is JobKind.FORWARD:
            return first, []
        inputs = [
            self._staged([job.received[1]], running) if job.kept is None else list(job.kept) for job in jobs
        ]
        return inputs[0] if len(inputs) == 1 else _Apart(inputs), first

    def _staged(
        self, parts: list[tuple[Sequence[EncodedMeta], Sequence[Any]]], running: _Running
    ) -> list[torch.Tensor]:
        staged = stacked(parts, self._pool.allocate)
        running.held.append(staged)
        copied = [tensor.to(self.torch_device, non_blocking=True) for tensor in staged]
        for tensor in copied:
            _keep_for(tensor, self._computing)
        return copied

    def _joined(self, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        joined = []
        for tensors in zip(*parts, strict=True):
            first, num_samples = tensors[0], sum(map(len, tensors))
            whole = torch.empty((num_samples, *first.shape[1:]), dtype=first.dtype, device=self.torch_device)
            start = 0
            for tensor in tensors:
                end = start + len(tensor)
                whole[start:end].copy_(tensor, non_blocking=True)
                start = end
            _keep_for(whole, self._computing)
            joined.append(whole)
        return joined

    # --- computing ---

    def _computed(
        self,
        jobs: list[Job],
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        running: _Running,
    ) -> Iterator[tuple[list[Job], Tensors]]:
        """Outputs of all jobs together; in halves when that fails, until the culprit is by itself."""
        expert, kind = jobs[0].expert, jobs[0].kind
        try:
            together = merged(inputs.parts) if isinstance(inputs, _Apart) else inputs
            outputs = self.compute(expert, kind, together, grads, jobs)
        except Exception as error:  # noqa: BLE001 - whatever a module raises is told to its clients
            if len(jobs) == 1:
                running.failed.append((jobs[0], explained(error, expert)))
                return
            half = len(jobs) // 2
            middle = sum(job.num_samples for job in jobs[:half])
            for some, start, end in ((slice(half), 0, middle), (slice(half, None), middle, None)):
                yield from self._computed(
                    jobs[some], _half(inputs, some, start, end), _cut(grads, start, end), running
                )
            return
        if kind is JobKind.FORWARD:
            if jobs[0].is_small and len(jobs) > 1:
                keep_stacked(self._kept, jobs, together)
            else:
                for job, start, end in places(jobs):
                    if job.keep_as:
                        self._kept.keep(job.keep_as, expert.uid, _owned(_cut(together, start, end)))
        yield jobs, outputs

    # --- copies out ---

    def _copy_out(self, jobs: list[Job], outputs: Tensors, running: _Running) -> None:
        """Into one pinned buffer for each output, of which each job gets its part."""
        dense_outputs = [None if output is None else output.contiguous() for output in outputs]
        self._copies_out.wait_event(self._computing.record_event())
        metas: list[EncodedMeta | None] = []
        buffers: list[memoryview] = []
        for dense in dense_outputs:
            if dense is None:
                metas.append(None)
                continue
            memory = self._pool.allocate(dense.numel() * dense.element_size())
            if len(memory):
                running.held.append(memory)
                _keep_for(dense, self._copies_out)
                with torch.cuda.stream(self._copies_out):
                    tensor_over(memory).view(dense.dtype).copy_(dense.view(-1), non_blocking=True)
            metas.append(EncodedMeta(PLAIN, TensorSpec(dtype_name(dense.dtype), tuple(dense.shape))))
            buffers.append(memory)
        sizes = [job.num_samples for job in jobs]
        running.ended += zip(jobs, rows_of(metas, buffers, sizes), strict=True)

    def _finish(self, running: _Running) -> None:
        """On the other thread: wait until a batch has come through, and deliver it."""
        results: Results = list(running.failed)
        try:
            if running.done is not None:
                running.done.synchronize()
            results += [(job, as_wanted(job, outcome)) for job, outcome in running.ended]
        except Exception as error:  # noqa: BLE001 - a GPU that has failed fails every batch
            results += [(job, explained(error, job.expert)) for job, _ in running.ended]
        running.held.clear()
        with self._lock:
            self._num_started -= 1
        self._on_ready()
        self._deliver(results)


class _Apart(list[torch.Tensor]):
    """Inputs of several jobs that lie in several tensors."""

    def __init__(self, parts: list[list[torch.Tensor]]) -> None:
        super().__init__()
        self.parts = parts


class _Running(msgspec.Struct, eq=False):
    """A batch on its way through the GPU."""

    held: list[Any] = []
    """Memory that the GPU still reads or writes."""
    failed: Results = []
    ended: list[tuple[Job, Outcome]] = []
    done: Any = None


def _half(inputs: Sequence[torch.Tensor], jobs: slice, start: int, end: int | None) -> Sequence[torch.Tensor]:
    """Inputs of these jobs, whose samples are those from `start` to `end`."""
    if not isinstance(inputs, _Apart):
        return _cut(inputs, start, end)
    parts = inputs.parts[jobs]
    return parts[0] if len(parts) == 1 else _Apart(parts)


def _cut(tensors: Sequence[torch.Tensor], start: int, end: int | None) -> Sequence[torch.Tensor]:
    return [tensor[start:end] for tensor in tensors]


def _owned(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors; copies of those that would keep more than twice their size from being freed."""
    return [
        tensor.clone() if 2 * tensor.nbytes < tensor.untyped_storage().nbytes() else tensor
        for tensor in tensors
    ]


def _keep_for(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Have the tensor's memory, once it is freed, not used again before the stream has come so far."""
    tensor.record_stream(stream)


def _pinned(size_bytes: int) -> Any:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
