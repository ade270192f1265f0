"""Tensors encoded into memory of a size that both ends know beforehand, or into one tensor of bytes.

The size of a `Format` is fixed by codec and model, so that a window can hold what it encodes. `to_bytes`
makes one tensor of whatever a codec gives, which says itself what it is.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from shoal.tensors.buckets import BucketLayout
from shoal.tensors.codecs.base import LOSSY_DTYPES, Codec, Encoded, EncodedMeta, FormatCodec, read_meta
from shoal.tensors.codecs.casts import Plain
from shoal.tensors.codecs.registry import decode
from shoal.tensors.dtypes import DTYPES, dtype_name
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.packing import reshape_dense
from shoal.tensors.specs import TensorSpec, size_bytes
from shoal.transport.memory import ALIGNMENT_BYTES

_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors of one spec are encoded into a fixed number of bytes."""

    meta: EncodedMeta
    sizes: tuple[int, ...]  # of the buffers, in bytes

    @classmethod
    def plan(cls, codec: FormatCodec, spec: TensorSpec) -> Packing:
        """Plans what a codec makes of such a tensor: plain bytes where others would not be fewer."""
        options = codec.options(spec) if spec.dtype in LOSSY_DTYPES else None
        if options is None or codec.size_bytes(spec, options) >= size_bytes(spec):
            return cls(EncodedMeta(Plain.name, spec), (size_bytes(spec),))
        sizes = tuple(size_bytes(part) for part in codec.parts(spec, options))
        return cls(EncodedMeta(codec.name, spec, options), sizes)

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are those of the tensor."""
        return self.meta.codec == Plain.name

    def encode(self, codec: Codec, tensor: torch.Tensor, slot: str) -> torch.Tensor | None:
        """Gives the bytes; None for what holds an inf or a nan, which would not be fewer."""
        encoded = codec.encode(tensor, slot)
        if encoded.meta != self.meta:
            return None
        return torch.cat([tensor_over(bytes_of(buffer)) for buffer in encoded.buffers])

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """Gives the tensor, on the CPU."""
        buffers = [part.numpy().data for part in torch.split(raw, list(self.sizes))]
        return decode(Encoded(self.meta, buffers), sys.maxsize)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of one of several flat tensors, which is encoded by itself."""

    index: int
    span: slice
    packing: Packing

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gives it over the same memory."""
        return reshape_dense(flats[self.index][self.span], self.packing.meta.spec)


class Format:
    """How the flat tensors of a model's parameters, one for each dtype, become one message.

    A dtype goes in one piece where the codec makes that smaller, otherwise parameter by parameter: a low-rank
    codec wants matrices.
    """

    def __init__(self, codec: FormatCodec, parameters: Sequence[torch.Tensor]) -> None:
        self._codec = codec
        layouts = BucketLayout.plan(parameters, max_bytes=sys.maxsize)
        self._pieces = [piece for index, layout in enumerate(layouts) for piece in _cut(codec, index, layout)]
        self._sizes = [sum(piece.packing.sizes) for piece in self._pieces]
        self.size_bytes = sum(self._sizes)
        self.share = self.size_bytes / max(1, sum(layout.size_bytes for layout in layouts))
        """Of the bytes of the parameters."""

    def encode(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gives the message. What holds an inf or a nan counts as zeros."""
        parts = []
        for number, piece in enumerate(self._pieces):
            tensor, slot = piece.of(flats), str(number)
            part = piece.packing.encode(self._codec, tensor, slot)
            if part is None:
                part = piece.packing.encode(self._codec, torch.zeros_like(tensor), slot)
                assert part is not None
            parts.append(part)
        return torch.cat(parts)

    def add(self, message: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Adds what a message says to flat tensors; equal bits to equal ones, wherever it is done."""
        for piece, part in zip(self._pieces, torch.split(message, self._sizes), strict=True):
            piece.of(flats).add_(piece.packing.decode(part))


def _cut(codec: FormatCodec, index: int, layout: BucketLayout) -> list[_Piece]:
    real = DTYPES[layout.dtype].to_real()
    name, num_elements = dtype_name(real), layout.size_bytes // real.itemsize
    whole = _Piece(index, slice(0, num_elements), Packing.plan(codec, TensorSpec(name, (num_elements,))))
    if not whole.packing.is_plain or name != layout.dtype:
        return [whole]
    pieces = []
    for slot in layout.slots:
        start, size = slot.offset_bytes // real.itemsize, size_bytes(slot.spec) // real.itemsize
        if size:
            pieces.append(_Piece(index, slice(start, start + size), Packing.plan(codec, slot.spec)))
    return [whole] if all(piece.packing.is_plain for piece in pieces) else pieces


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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
