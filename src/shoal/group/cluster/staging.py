"""Tensors of a GPU on their way to other machines, through pinned memory of the host.

Large tensors pass in pieces through two buffers: while one piece is sent, received and reduced, the next one
is copied, by a stream of its own. What is in the host's memory anyway is used where it lies.
"""

from __future__ import annotations

from collections.abc import Callable

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

    def buffer(self, like: torch.Tensor, num_elements: int | None = None) -> torch.Tensor:
        """Makes memory of the host for a tensor, or a part of it; torch keeps pinned memory for the next."""
        count = like.numel() if num_elements is None else num_elements
        return torch.empty(count, dtype=like.dtype, pin_memory=like.is_cuda)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> Handle[None]:
        """Begins to copy, after what the current stream does; done when the host may use both."""
        device = out.device if out.is_cuda else source.device
        if device.type != "cuda":
            out.copy_(source)
            return Done(None)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            out.copy_(source, non_blocking=True)
        return Step(stream.record_event().query)

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
        # copies follow each other on their stream: one into a buffer comes after the one out of it before
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
        if flat.device in self._streams:
            torch.cuda.current_stream(flat.device).wait_stream(self._streams[flat.device])


class StreamOrder:
    """Orders an operation after what its caller gave to its stream, and what the caller gives later after it.

    An operation goes on whenever some call makes progress, and another stream may be the current one then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.record()

    def record(self) -> None:
        """Remembers what the current stream has been given until now."""
        self._event = torch.cuda.current_stream(self._device).record_event()

    def follow(self) -> None:
        """Lets the current stream wait for what was recorded."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def around(self, steps: Steps) -> Steps:
        """Does the steps of an operation in this order."""
        self.follow()
        result = yield from steps
        self.record()
        return result
