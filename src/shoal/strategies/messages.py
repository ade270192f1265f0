"""Flat tensors encoded into messages that all have one size, and the mail that brings them to neighbours.

The size is fixed by codec and model, so that windows can hold a message and both ends know its format. What
the tensors mean is left to the strategies.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.group import Handle, Window
from shoal.strategies.session import TrainingSession
from shoal.tensors import DTYPES, BucketLayout, TensorSpec, size_bytes
from shoal.tensors.codecs import Codec, Encoded, EncodedMeta, Plain, decode
from shoal.tensors.codecs.base import LOSSY_DTYPES, FormatCodec
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.packing import reshape_dense
from shoal.topology import Topology

_NOTE = struct.Struct("<QI?")
"""A number that counts what one worker sends another, which piece of the whole it is (0: it is a message),
and whether something was missed."""


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


class Received(NamedTuple):
    """What has come from a neighbour."""

    message: torch.Tensor
    whole: torch.Tensor | None
    """All that the messages before it say, where some of them were missed."""


class Mail:
    """Messages to and from the neighbours in a static symmetric topology, each in turn. Collective.

    None is missed but those that are cut off on the way. Who has missed one says so in its next, and gets
    the whole, in pieces, before the next that it hears; what came in between is of no use to it.
    """

    def __init__(
        self, session: TrainingSession, topology: Topology, size_bytes: int, whole_bytes: int
    ) -> None:
        group = session.group
        self.sources = topology.sources(group.rank)
        self._size_bytes = size_bytes
        self._whole_bytes = whole_bytes
        like = torch.empty(size_bytes, dtype=torch.uint8)
        self._windows = [
            session.window(like, sources=self.sources[place : place + 1])
            for place in range(topology.degree())
        ]
        """One for each source of this worker, so that one can be waited for alone; others may have more."""
        self._routes = [
            (destination, self._windows[topology.sources(destination).index(group.rank)])
            for destination in topology.destinations(group.rank)
        ]
        self._num_sent = dict.fromkeys(topology.destinations(group.rank), 0)
        self._num_heard = dict.fromkeys(self.sources, 0)
        self._missing: list[int] = []
        """Those of whom something was missed."""
        self._asking: list[int] = []
        """Those who have missed something of this worker's."""
        self._answered: list[int] = []
        """Those who have been sent the whole in this round."""

    def send(self, message: torch.Tensor, whole: Callable[[], torch.Tensor]) -> list[Handle[None]]:
        """Sends a message to all neighbours; it must not be written until the handles are done.

        `whole` is all that the messages before it say, as bytes, for those who have missed one.
        """
        handles = []
        self._answered, self._asking = self._asking, []
        pieces = self._pieces(whole()) if self._answered else []
        for to, window in self._routes:
            for place, piece in enumerate(pieces if to in self._answered else [], 1):
                handles.append(window.send(to, piece, note=self._note(to, place)))
            handles.append(window.send(to, message, note=self._note(to, 0)))
        return handles

    def receive(self) -> Mapping[int, Received]:
        """Gives the next message of each source, by its rank.

        There is none of those that are gone, that cannot be heard, or whose whole has yet to come.
        """
        windows = zip(self.sources, self._windows, strict=False)
        came = {source: self._next_of(source, window) for source, window in windows}
        return {source: received for source, received in came.items() if received is not None}

    def _next_of(self, source: int, window: Window) -> Received | None:
        pieces: list[torch.Tensor] = []
        while source in window.wait():
            with window.slot(source) as slot:
                number, place, is_asking = _NOTE.unpack(slot.note)
                tensor = slot.tensor.clone()
                slot.clear()
            if number != self._num_heard[source]:
                pieces.clear()
                if source not in self._missing:
                    self._missing.append(source)
            self._num_heard[source] = number + 1
            if place:
                pieces += [tensor] if place == len(pieces) + 1 else []
                continue
            if is_asking and source not in self._answered:
                self._asking.append(source)
            if source not in self._missing:
                return Received(tensor, None)
            if len(pieces) * self._size_bytes < self._whole_bytes:
                return None
            self._missing.remove(source)
            return Received(tensor, torch.cat(pieces)[: self._whole_bytes])
        return None

    def _pieces(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each of the size of a message."""
        short_bytes = -len(whole) % self._size_bytes
        return torch.split(torch.cat([whole, whole.new_zeros(short_bytes)]), self._size_bytes)

    def _note(self, to: int, place: int) -> bytes:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        return _NOTE.pack(number, place, to in self._missing)
