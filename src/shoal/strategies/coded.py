"""Means over the group of tensors that travel encoded.

Everybody gathers what everybody has encoded, and decodes it in rank order: all members get equal bits. What
a codec loses is left to `ErrorFeedback`.
"""

from __future__ import annotations

import struct

import msgspec
import torch

from shoal.core import Deadline
from shoal.group import Group, Handle
from shoal.tensors import ALIGNMENT_BYTES
from shoal.tensors.codecs import Codec, Encoded, ErrorFeedback, codec_from_name, decode, read_meta
from shoal.tensors.memory import bytes_of, tensor_over

_HEAD = struct.Struct("<Q")


def make_codec(name: str, rank: int, *, has_feedback: bool = True) -> Codec | None:
    """The codec of this name, with error feedback if it should have it; None for 'none'.

    It rounds by the rank, so that errors of stochastic rounding cancel in a mean over the workers.
    """
    if name.strip().lower() == "none":
        return None
    codec = codec_from_name(name)
    codec.reseed(rank)
    return ErrorFeedback(codec) if has_feedback else codec


def start_coded_mean(group: Group, tensor: torch.Tensor, codec: Codec, slot: str) -> Handle[torch.Tensor]:
    """In place, over the members that are there; equal bits on all. Collective.

    `slot` names the tensor among those that the codec keeps the rests of.
    """
    packed = to_bytes(codec.encode(tensor, slot))
    return _CodedMean(group.all_gather(packed), tensor)


def to_bytes(encoded: Encoded) -> torch.Tensor:
    """One flat tensor of bytes: the meta and the buffers, each buffer from a 64-byte boundary on."""
    buffers = [bytes_of(buffer) for buffer in encoded.buffers]
    head = msgspec.msgpack.encode([encoded.meta, [len(buffer) for buffer in buffers]])
    end = _aligned(_HEAD.size + len(head))
    places = []
    for buffer in buffers:
        places.append(end)
        end = _aligned(end + len(buffer))
    packed = torch.zeros(end, dtype=torch.uint8)
    memory = packed.numpy().data
    memory[: _HEAD.size] = _HEAD.pack(len(head))
    memory[_HEAD.size : _HEAD.size + len(head)] = head
    for place, buffer in zip(places, buffers, strict=True):
        if len(buffer):
            packed[place : place + len(buffer)].copy_(tensor_over(buffer))
    return packed


def from_bytes(packed: torch.Tensor) -> Encoded:
    """What `to_bytes` was given, over the same memory."""
    memory = packed.numpy().data
    (size,) = _HEAD.unpack(memory[: _HEAD.size])
    meta, sizes = msgspec.msgpack.decode(memory[_HEAD.size : _HEAD.size + size])
    end = _aligned(_HEAD.size + size)
    buffers = []
    for size in sizes:
        buffers.append(memory[end : end + size])
        end = _aligned(end + size)
    return Encoded(read_meta(meta), buffers)


class _CodedMean(Handle[torch.Tensor]):
    def __init__(self, gathered: Handle[list[torch.Tensor]], into: torch.Tensor) -> None:
        self._gathered: Handle[list[torch.Tensor]] | None = gathered
        self._into = into

    def wait(self, deadline: Deadline | None = None) -> torch.Tensor:
        if self._gathered is not None:
            parts = self._gathered.wait(deadline)
            into = self._into
            size_bytes = into.numel() * into.element_size()
            into.copy_(decode(from_bytes(parts[0]), size_bytes))
            for part in parts[1:]:
                into.add_(decode(from_bytes(part), size_bytes))
            into.mul_(1 / len(parts))
            self._gathered = None
        return self._into

    def is_done(self) -> bool:
        return self._gathered is None or self._gathered.is_done()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
