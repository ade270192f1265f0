"""What a device does with a batch of jobs: merge them, compute once, and take the results apart again.

A device is used by one thread, the server's device thread, except where it says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from shoal.core import RemoteFailure, ShoalError
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import InputCache, Job, JobKind, Outcome
from shoal.experts.settings import ServerSettings
from shoal.experts.wire import from_wire, make_wire_codec, to_wire
from shoal.transport.messages import Head

log = logging.getLogger(__name__)

T = TypeVar("T")
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

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The numbers that experts compute with."""
        if self._settings.precision == "bf16":
            return torch.autocast(self.torch_device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

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
        with self.precision():
            if kind is JobKind.FORWARD:
                return expert.forward(inputs)
            return expert.backward(inputs, grads, [job.request_id for job in jobs])


def received_tensors(job: Job) -> list[list[torch.Tensor]]:
    """What came with a request, decoded, on the CPU."""
    return [from_wire(metas, buffers) for metas, buffers in job.received]  # type: ignore[misc]


def encoded(job: Job, tensors: Tensors) -> Outcome | Exception:
    """An answer as its client wants it."""
    try:
        return to_wire(tensors, make_wire_codec(job.codec))
    except Exception as error:  # noqa: BLE001 - memory may be short; the others of its batch have their answers
        return explained(error, job.expert)


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
