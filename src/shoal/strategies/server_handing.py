"""A state that a server hands to one worker, piece by piece through a window: no other member takes part.

So it can be had at the end, when workers leave one by one. Who asks for it, and when, is left to others.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import torch

from shoal.core.errors import CheckpointError, ShoalError
from shoal.group import Slot, Window
from shoal.tensors import ALIGNMENT_BYTES, DTYPES, TensorSpec, describe, size_bytes
from shoal.tensors.checkpoint import flatten, rebuild
from shoal.tensors.packing import densify, reshape_dense

PIECE_BYTES = 2**20
"""A whole number of alignments."""
_NOTE = struct.Struct("<qq")


class _Head(msgspec.Struct, array_like=True):
    """What comes before the tensors, each of which begins at an alignment."""

    plain: Any = None
    names: list[str] = []
    specs: list[TensorSpec] = []
    problem: str = ""


def hand_state(window: Window, to: int, state: Any) -> None:
    """Send it; returns when `to` has it, or is gone. What cannot travel is the receiver's error."""
    try:
        plain, tensors = flatten(state)
        head = _Head(plain, list(tensors), [describe(tensor) for tensor in tensors.values()])
    except ShoalError as error:
        tensors, head = {}, _Head(problem=error.what)
    encoded = bytearray(msgspec.msgpack.encode(head))
    parts = [torch.frombuffer(encoded, dtype=torch.uint8)]
    parts += [densify(tensor)[0].view(torch.uint8) for tensor in tensors.values() if tensor.numel()]
    note = _NOTE.pack(len(encoded), sum(_aligned(part.numel()) for part in parts))
    piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    num_filled = 0
    for part in parts:
        num_taken = 0
        while num_taken < part.numel():
            if num_filled == PIECE_BYTES:
                window.send(to, piece, note=note).wait()
                num_filled = 0
            taken = part[num_taken:][: PIECE_BYTES - num_filled]
            piece[num_filled : num_filled + taken.numel()] = taken
            num_filled += taken.numel()
            num_taken += taken.numel()
        num_filled = _aligned(num_filled)
    window.send(to, piece, note=note).wait()


class Incoming:
    """A state that comes."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._num_received = self._num_head = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self._num_head > 0 and self._num_received == self._flat.numel()

    def take(self, slot: Slot) -> None:
        """One more piece."""
        if not self._num_head:
            self._num_head, num_bytes = _NOTE.unpack(slot.note)
            self._flat = torch.empty(num_bytes, dtype=torch.uint8)
        room = self._flat[self._num_received :][:PIECE_BYTES]
        room.copy_(slot.tensor[: room.numel()])
        self._num_received += room.numel()

    def state(self) -> Any:
        """What was handed over; CheckpointError when that was not possible."""
        head = msgspec.msgpack.decode(self._flat[: self._num_head].numpy().data, type=_Head)
        if head.problem:
            raise CheckpointError(f"a server's state cannot be had: {head.problem}")
        tensors: dict[str, torch.Tensor] = {}
        start = _aligned(self._num_head)
        for name, spec in zip(head.names, head.specs, strict=True):
            num_bytes = size_bytes(spec)
            raw = self._flat[start : start + num_bytes].view(DTYPES[spec.dtype])
            tensors[name] = reshape_dense(raw, spec)
            start += _aligned(num_bytes)
        return rebuild(head.plain, tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
