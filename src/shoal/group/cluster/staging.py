"""Tensors of a GPU on their way to other machines, through pinned memory of the host.

Large tensors pass in pieces through two buffers: while one piece is sent, received and reduced, the next one
is copied. What is in the host's memory anyway is used where it lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.group.base import Done, Handle
from shoal.group.cluster.operation_queue import Step, Steps

PIECE_BYTES = 16 << 20
"""A network of 10 Gbit/s carries it in 13 ms, so that delays do not count, and a bus of 10 GB/s in 2 ms."""


def is_on_device(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor lies outside the host's memory."""
    return tensor.device.type != "cpu"


class HostStaging:
    """Copies between the memory of a GPU and that of the host; tests give another `takes`."""

    def __init__(
        self, takes: Callable[[torch.Tensor], bool] = is_on_device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.takes = takes
        """Tells which tensors must pass through the host's memory."""
        self._piece_bytes = piece_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Makes memory of the host for a flat tensor; torch keeps pinned memory for the next one."""
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.is_cuda)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> Handle[None]:
        """Begins to copy in the current stream; done when the host may use both."""
        device = out.device if out.is_cuda else source.device
        if device.type != "cuda":
            out.copy_(source)
            return Done(None)
        out.copy_(source, non_blocking=True)
        return Step(torch.cuda.current_stream(device).record_event().query)

    def to_host(self, flat: torch.Tensor) -> Steps:
        """Gives the tensor itself if it is in the host's memory, else a copy there."""
        if not self.takes(flat):
            return flat
        host = self.buffer(flat)
        yield self.copy(host, flat)
        return host

    def to_device(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Gives what came in the host's memory to the current stream of another tensor's device."""
        return host.to(like.device, non_blocking=True)

    def in_pieces(
        self,
        flat: torch.Tensor,
        work: Callable[[int, torch.Tensor], Steps],
        *,
        should_read: bool = True,
        should_write: bool = True,
    ) -> Steps:
        """Does `work(number, piece)` in the host's memory, piece by piece, and copies in and out around it.

        A piece's memory must not be in use any more when its work is over.
        """
        if not self.takes(flat):
            yield from work(0, flat)
            return
        parts = torch.split(flat, max(1, self._piece_bytes // flat.element_size()))
        buffers = [self.buffer(part) for part in parts[:2]]
        pieces = [buffers[index % 2][: part.numel()] for index, part in enumerate(parts)]
        # copies follow each other in their stream: one into a buffer comes after the one out of it before
        copied: list[Handle[None]] = [Done(None), Done(None)]
        if should_read:
            copied[0] = self.copy(pieces[0], parts[0])
        for index, part in enumerate(parts):
            yield copied[index % 2]
            if should_read and index + 1 < len(parts):
                copied[(index + 1) % 2] = self.copy(pieces[index + 1], parts[index + 1])
            yield from work(index, pieces[index])
            if should_write:
                copied[index % 2] = self.copy(part, pieces[index])

    def order(self, tensors: Sequence[torch.Tensor]) -> StreamOrder | None:
        """Gives the stream in which an operation on GPU tensors runs; None for other tensors."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return StreamOrder(self._streams[device], tensors)


class StreamOrder:
    """Runs an operation in a stream beside its caller's, after what the caller's was given before the call.

    An operation goes on whenever some call makes progress. In the stream that is the current one then, it
    would wait for what was given to that stream since, and hold up what comes after.
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> None:
        self._stream = stream
        self._tensors = tensors
        self._event = torch.cuda.current_stream(stream.device).record_event()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the operation's stream the current one, while the operation goes on."""
        return torch.cuda.stream(self._stream)

    def around(self, steps: Steps) -> Steps:
        """Does the steps of an operation after what was recorded, and records its end."""
        self._stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(self._stream)  # it may be dropped before the stream is done with it
        result = yield from steps
        self._event = self._stream.record_event()
        return result

    def follow(self, result: torch.Tensor | list[torch.Tensor]) -> None:
        """Lets the current stream wait for the operation's end, and use its result."""
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._event)
        for tensor in result if isinstance(result, list) else [result]:
            tensor.record_stream(current)
