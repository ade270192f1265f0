"""Experts on the processor's cores: received memory is the module's input, its output is what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.experts.devices.device import (
    Device,
    Results,
    encoded,
    explained,
    merged,
    received_tensors,
    taken_apart,
)
from shoal.experts.server.jobs import InputCache, Job, JobKind, Outcome
from shoal.experts.settings import ServerSettings

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
    first, *others = received_tensors(job)
    if job.kind is JobKind.FORWARD:
        return first, ()
    return (others[0] if job.kept is None else job.kept), first


def _size_bytes(loaded: _Loaded) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in loaded[0])
