"""What a device does with a batch of jobs: merge them, compute once, and take the results apart again.

A device is used by one thread, the server's device thread, except where it says otherwise. The one here is
the processor itself: received memory is the module's input, its output is what is sent. A GPU is `cuda`'s.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from shoal.core import RemoteFailure, ShoalError
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import InputCache, Job, JobKind, Outcome
from shoal.experts.settings import ServerSettings
from shoal.experts.wire import from_wire, make_wire_codec, rows_of, stacked, to_wire
from shoal.tensors.codecs.base import PLAIN
from shoal.transport.memory import aligned_memory
from shoal.transport.messages import Head

T = TypeVar("T")
log = logging.getLogger(__name__)


Results = list[tuple[Job, Outcome | Exception]]
Tensors = Sequence[torch.Tensor | None]


class Device(ABC):
    """Computes batches; how it does is the subclass's affair."""

    def __init__(self, name: str, settings: ServerSettings, kept: InputCache) -> None:
        self.torch_device = torch.device(name)
        self._settings = settings
        self._kept = kept

    def allocate(self, head: Head) -> Sequence[Any] | None:
        """Memory for the buffers of a request; None: the transport's own. For any thread."""
        return None

    def can_start(self) -> bool:
        """Whether another batch may be started; where not, `on_ready` is called once it may."""
        return True

    def open(self, deliver: Callable[[Results], None], on_ready: Callable[[], None]) -> None:
        """Begin; results go to `deliver`, from any thread."""
        self._deliver = deliver
        self._on_ready = on_ready

    def compute_here(self, job: Job) -> Outcome | Exception:
        """Compute one small request on the calling thread; only where `can_compute_here`."""
        raise NotImplementedError

    can_compute_here = False
    """Whether a request can be computed by whichever thread has it."""

    @abstractmethod
    def start(self, jobs: list[Job]) -> None:
        """Compute a batch of one expert and kind; its results are delivered now or later."""

    def close(self) -> None:  # noqa: B027 - most devices have nothing to end
        """Deliver what is under way, and let go of everything."""

    def between_batches(self, work: Callable[[], T]) -> T:
        """Run what touches experts: after all batches so far, before all further ones."""
        return work()

    def compute(
        self,
        expert: Expert,
        kind: JobKind,
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        jobs: Sequence[Job] = (),
    ) -> Tensors:
        """Run an expert on tensors of this device; outputs, or gradients of inputs, as its schema says.

        Of a backward, `jobs` are those that the batch consists of.
        """
        if self._settings.precision == "bf16":
            with torch.autocast(self.torch_device.type, dtype=torch.bfloat16):
                return _compute(expert, kind, inputs, grads, jobs)
        return _compute(expert, kind, inputs, grads, jobs)


def _compute(
    expert: Expert,
    kind: JobKind,
    inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    jobs: Sequence[Job],
) -> Tensors:
    if kind is JobKind.FORWARD:
        return expert.forward(inputs)
    return expert.backward(inputs, grads, [job.request_id for job in jobs])


def received_tensors(job: Job) -> list[list[torch.Tensor]]:
    """What came with a request, decoded, on the CPU."""
    return [from_wire(metas, buffers) for metas, buffers in job.received]  # type: ignore[misc]


def encoded(job: Job, tensors: Tensors) -> Outcome | Exception:
    """An answer as its client wants it."""
    try:
        return to_wire(tensors, None if job.codec == PLAIN else make_wire_codec(job.codec))
    except Exception as error:  # noqa: BLE001 - memory may be short; the others of its batch have their answers
        return explained(error, job.expert)


def as_wanted(job: Job, outcome: Outcome) -> Outcome | Exception:
    """What was computed, in the codec that the client has asked for."""
    if job.codec == PLAIN:
        return outcome
    try:
        return encoded(job, from_wire(*outcome))
    except Exception as error:  # noqa: BLE001 - the others of its batch have their answers
        return explained(error, job.expert)


def keep_stacked(kept: InputCache, jobs: Sequence[Job], inputs: Sequence[torch.Tensor]) -> None:
    """Keep the inputs of those jobs of a batch whose backward will come."""
    if any(job.keep_as for job in jobs):
        sizes = [job.num_samples for job in jobs]
        parts = zip(*[tensor.split_with_sizes(sizes) for tensor in inputs], strict=True)
        wanted = [(job.keep_as, part) for job, part in zip(jobs, parts, strict=True) if job.keep_as]
        kept.keep_all(jobs[0].expert.uid, wanted, sum([each.untyped_storage().nbytes() for each in inputs]))


def merged(parts: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """The samples of several requests one after another."""
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def taken_apart(jobs: Sequence[Job], tensors: Tensors) -> list[Tensors]:
    """What each job of a batch gets."""
    if len(jobs) == 1:
        return [tensors]
    return [
        [None if tensor is None else tensor[start:end] for tensor in tensors]
        for _, start, end in places(jobs)
    ]


def places(jobs: Sequence[Job]) -> Iterator[tuple[Job, int, int]]:
    """Each job of a batch with the first of its samples, and the first that is not its own."""
    start = 0
    for job in jobs:
        yield job, start, start + job.num_samples
        start += job.num_samples


def explained(error: Exception, expert: Expert) -> Exception:
    """The error that the client is told; whatever a module raises is logged here, once."""
    if isinstance(error, ShoalError):
        return error
    log.warning("the expert %s failed: %s: %s", expert.uid, type(error).__name__, error)
    return RemoteFailure(f"{type(error).__name__}: {error}")


_APART_FROM_BYTES = 1 << 20
"""Requests this large are not merged: copying them costs more than it saves."""


class CpuDevice(Device):
    """Computes on the device thread, with torch's own threads beside it."""

    def __init__(self, settings: ServerSettings, kept: InputCache) -> None:
        super().__init__("cpu", settings, kept)

    can_compute_here = True

    def compute_here(self, job: Job) -> Outcome | Exception:
        """Where it was received."""
        try:
            inputs, grads = _load(job)
            outputs = self.compute(job.expert, job.kind, inputs, grads, (job,))
        except Exception as error:  # noqa: BLE001 - of what a client has sent, or of a module
            return explained(error, job.expert)
        if job.keep_as and job.kind is JobKind.FORWARD:
            self._kept.keep(job.keep_as, job.expert.uid, inputs)
        return encoded(job, outputs)

    def start(self, jobs: list[Job]) -> None:
        """Compute small requests together and large ones one by one."""
        if len(jobs) > 1 and all(job.is_small for job in jobs):
            results = self._results_of_small(jobs)
            if results is not None:
                self._deliver(results)
                return
        loaded: list[tuple[Job, _Loaded]] = []
        failed: Results = []
        for job in jobs:
            try:
                loaded.append((job, _load(job)))
            except Exception as error:  # noqa: BLE001 - of what a client has sent
                failed.append((job, explained(error, job.expert)))
        if failed:
            self._deliver(failed)
        together = []
        for job, tensors in loaded:
            if _size_bytes(tensors) >= _APART_FROM_BYTES:
                self._run([(job, tensors)])
            else:
                together.append((job, tensors))
        if together:
            self._run(together)

    def _results_of_small(self, jobs: list[Job]) -> Results | None:
        """Compute what is a few bytes each, stacked; None when that fails, for whatever reason."""
        expert, kind = jobs[0].expert, jobs[0].kind
        try:
            first = stacked([job.received[0] for job in jobs], aligned_memory)
            if kind is JobKind.FORWARD:
                inputs: Sequence[torch.Tensor] = first
                outputs = self.compute(expert, kind, first, (), jobs)
            else:
                inputs = merged([_load(job)[0] if job.kept is None else job.kept for job in jobs])
                outputs = self.compute(expert, kind, inputs, first, jobs)
        except Exception:  # noqa: BLE001 - the other way finds whose fault it is
            return None
        if kind is JobKind.FORWARD:
            keep_stacked(self._kept, jobs, inputs)
        metas, buffers = to_wire([None if output is None else output.contiguous() for output in outputs])
        sizes = [job.num_samples for job in jobs]
        return [
            (job, as_wanted(job, part))
            for job, part in zip(jobs, rows_of(metas, buffers, sizes), strict=True)
        ]

    def _run(self, batch: Sequence[tuple[Job, _Loaded]]) -> None:
        self._deliver(self._results(batch))

    def _results(self, batch: Sequence[tuple[Job, _Loaded]]) -> Results:
        jobs = [job for job, _ in batch]
        expert, kind = jobs[0].expert, jobs[0].kind
        try:
            inputs = merged([inputs for _, (inputs, _) in batch])
            grads = merged([grads for _, (_, grads) in batch])
            outputs = self.compute(expert, kind, inputs, grads, jobs)
        except Exception as error:  # noqa: BLE001 - whatever a module raises is told to its clients
            if len(batch) == 1:
                return [(jobs[0], explained(error, expert))]
            # one request must not spoil the others: in halves, until the culprit is by itself
            half = len(batch) // 2
            return self._results(batch[:half]) + self._results(batch[half:])
        if kind is JobKind.FORWARD:
            for job, (tensors, _) in batch:
                if job.keep_as:
                    self._kept.keep(job.keep_as, expert.uid, tensors)
        return [
            (job, encoded(job, tensors))
            for job, tensors in zip(jobs, taken_apart(jobs, outputs), strict=True)
        ]


_Loaded = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Inputs, and gradients of outputs."""


def _load(job: Job) -> _Loaded:
    metas, buffers = job.received[0]
    first: Any = from_wire(metas, buffers) if job.known is None else job.known.tensors(buffers)
    if job.kind is JobKind.FORWARD:
        return first, ()
    others: list[Any] = [from_wire(metas, buffers) for metas, buffers in job.received[1:]]
    return (others[0] if job.kept is None else job.kept), first


def _size_bytes(loaded: _Loaded) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in loaded[0])
