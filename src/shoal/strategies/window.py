"""`window`: parameters put into windows of neighbours, and averaged with what neighbours have put (win_put).

Nobody waits: each averages with the newest that has come, however old.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch

from shoal.group import Group
from shoal.group.kernels import mix_into
from shoal.strategies.attachment import Attachment
from shoal.strategies.one_sided import OneSidedStrategy, round_of
from shoal.strategies.options import CommonOptions, WindowOptions
from shoal.topology import Topology, Weights

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class WindowAverage(OneSidedStrategy):
    """`x_i ← W_ii x_i + Σ_j W_ij s_j` after the step; s_j is what j has put here last.

    The weight of a neighbour that has put nothing yet, or is gone, goes to oneself. With `force_barrier` it
    computes what `neighbor` does.
    """

    name = "window"
    Options: ClassVar[type[CommonOptions]] = WindowOptions
    options: WindowOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self._coded: list[torch.Tensor] = []
        """What is written: the parameters themselves, or what the codec makes of them."""
        self._weights = Weights(1.0)
        """Of the round that has begun."""

    def _make_topology(self) -> Topology:
        return self._make(self.options.topology)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        half = _HALVES.get(self.options.codec, dtype)
        return half if half.itemsize < dtype.itemsize else dtype

    def _started(self, attachment: Attachment) -> None:
        super()._started(attachment)
        pairs = zip(self._flats.tensors, self._windows, strict=True)
        self._coded = [
            flat if flat.dtype == window.dtype else torch.empty_like(flat, dtype=window.dtype)
            for flat, window in pairs
        ]

    def _stopped(self) -> None:
        self._coded = []
        super()._stopped()

    def _begin_round(self) -> None:
        if self.options.force_barrier:
            self.group.barrier().wait()
        for flat, coded in zip(self._flats.tensors, self._coded, strict=True):
            if coded is not flat:
                coded.copy_(flat)
        present = self.group.members
        gone = [rank for rank in range(self.group.size) if rank not in present]
        self._weights = self.topology.weights(self.group.rank, self._turn).without(gone)
        for rank, factor in (self._weights.destinations or {}).items():
            for window, coded in zip(self._windows, self._coded, strict=True):
                self._writes.append(window.put(rank, coded, weight=factor, note=self._note()))
        if self.options.force_barrier:
            for write in self._writes:
                write.wait()
            self.group.barrier().wait()

    def _end_round(self) -> None:
        weights = self._weights
        with contextlib.ExitStack() as stack:
            slots = self._slots(stack, weights.sources)
            weights = weights.without([rank for rank in weights.sources if rank not in slots])
            self._note_staleness([round_of(each[0].note) for each in slots.values()])
            if not slots:
                return
            for index, flat in enumerate(self._flats.tensors):
                sources = [
                    (slots[rank][index].tensor.to(flat.dtype), weight)
                    for rank, weight in weights.sources.items()
                ]
                mix_into(flat, flat, weights.own, sources)

    def _average_all(self) -> None:
        """What has come before it is void: it would pull back to older models."""
        super()._average_all()
        for rank in self._windows[0].filled() if self._windows else ():
            with contextlib.ExitStack() as stack:
                for slots in self._slots(stack, [rank]).values():
                    if round_of(slots[0].note) < self.rounds:
                        for slot in slots:
                            slot.clear()
