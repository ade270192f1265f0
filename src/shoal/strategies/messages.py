"""Flat tensors encoded into messages that all have one size, and the mail that brings them to neighbours.

The size is fixed by codec and model, so that windows can hold a message and both ends know its format. What
the tensors mean is left to the strategies.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.group import Handle, Window
from shoal.strategies.session import TrainingSession
from shoal.tensors import DTYPES, BucketLayout, TensorSpec, size_bytes
from shoal.tensors.codecs import Encoded, EncodedMeta, Plain, decode
from shoal.tensors.codecs.base import LOSSY_DTYPES, FormatCodec
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.packing import reshape_dense
from shoal.topology import Topology

_NOTE = struct.Struct("<QI?")
"""A number that counts what one worker sends another, which piece of the whole it is (0: it is a message),
and whether something was missed."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a flat tensor that is encoded by itself."""

    index: int
    """Of the flat tensor."""
    span: slice
    meta: EncodedMeta
    sizes: tuple[int, ...]
    """Of its buffers, in bytes."""

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Over the same memory."""
        return reshape_dense(flats[self.index][self.span], self.meta.spec)


class Format:
    """How the flat tensors of a model's parameters, one for each dtype, become one message.

    A dtype goes in one piece where the codec makes that smaller, otherwise parameter by parameter: a low-rank
    codec wants matrices.
    """

    def __init__(self, codec: FormatCodec, parameters: Sequence[torch.Tensor]) -> None:
        self._codec = codec
        layouts = BucketLayout.plan(parameters, max_bytes=sys.maxsize)
        self._pieces = [piece for index, layout in enumerate(layouts) for piece in _cut(codec, index, layout)]
        self.size_bytes = sum(size for piece in self._pieces for size in piece.sizes)
        """Of each message."""
        self.share = self.size_bytes / max(1, sum(layout.size_bytes for layout in layouts))
        """Of the bytes of the parameters."""

    def encode(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """The message. What holds an inf or a nan, which would not be smaller encoded, counts as zeros."""
        parts = []
        for number, piece in enumerate(self._pieces):
            tensor = piece.of(flats)
            encoded = self._codec.encode(tensor, str(number))
            if encoded.meta != piece.meta:
                encoded = self._codec.encode(torch.zeros_like(tensor), str(number))
            parts += [tensor_over(bytes_of(buffer)) for buffer in encoded.buffers]
        return torch.cat(parts)

    def add(self, message: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Add what a message says to flat tensors; equal bits to equal ones, wherever it is done."""
        rest = iter(torch.split(message, [size for piece in self._pieces for size in piece.sizes]))
        for piece in self._pieces:
            buffers = [next(rest).numpy().data for _ in piece.sizes]
            piece.of(flats).add_(decode(Encoded(piece.meta, buffers), sys.maxsize))


def _cut(codec: FormatCodec, index: int, layout: BucketLayout) -> Iterator[_Piece]:
    real = DTYPES[layout.dtype].to_real()
    whole = slice(0, layout.size_bytes // real.itemsize)
    name = dtype_name(real)
    piece = _piece(codec, index, whole, TensorSpec(name, (whole.stop,)))
    if _is_smaller(piece) or name != layout.dtype:
        yield piece
        return
    pieces = []
    for slot in layout.slots:
        start = slot.offset_bytes // real.itemsize
        span = slice(start, start + size_bytes(slot.spec) // real.itemsize)
        if span.start < span.stop:
            pieces.append(_piece(codec, index, span, slot.spec))
    yield from pieces if any(map(_is_smaller, pieces)) else [piece]


def _piece(codec: FormatCodec, index: int, span: slice, spec: TensorSpec) -> _Piece:
    options = codec.options(spec) if spec.dtype in LOSSY_DTYPES else None
    if options is None or codec.size_bytes(spec, options) >= size_bytes(spec):
        return _Piece(index, span, EncodedMeta(Plain.name, spec), (size_bytes(spec),))
    sizes = tuple(size_bytes(part) for part in codec.parts(spec, options))
    return _Piece(index, span, EncodedMeta(codec.name, spec, options), sizes)


def _is_smaller(piece: _Piece) -> bool:
    return piece.meta.codec != Plain.name


class Letter(NamedTuple):
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
        self._windows: list[Window] = []
        """One for each source of this worker, so that one can be waited for alone; others may have more."""
        for place in range(topology.degree()):
            own = list(self.sources[place : place + 1])
            self._windows.append(session.window(like, sources=own))
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
        """To all neighbours; the message must not be written until the handles are done.

        `whole` is all that the messages before it say, as bytes.
        """
        handles = []
        self._answered, self._asking = self._asking, []
        pieces = self._pieces(whole()) if self._answered else []
        for to, window in self._routes:
            for place, piece in enumerate(pieces if to in self._answered else [], 1):
                handles.append(window.send(to, piece, note=self._note(to, place)))
            handles.append(window.send(to, message, note=self._note(to, 0)))
        return handles

    def receive(self) -> Mapping[int, Letter]:
        """The next message of each source, by its rank.

        There is none of those that are gone, that cannot be heard, or whose whole has yet to come.
        """
        letters = {}
        for source, window in zip(self.sources, self._windows, strict=False):
            letter = self._next_of(source, window)
            if letter is not None:
                letters[source] = letter
        return letters

    def _next_of(self, source: int, window: Window) -> Letter | None:
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
            return self._letter(source, tensor, pieces)
        return None

    def _letter(self, source: int, message: torch.Tensor, pieces: list[torch.Tensor]) -> Letter | None:
        if source not in self._missing:
            return Letter(message, None)
        if len(pieces) * self._size_bytes < self._whole_bytes:
            return None
        self._missing.remove(source)
        return Letter(message, torch.cat(pieces)[: self._whole_bytes])

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each of the size of a message."""
        short_bytes = -len(whole) % self._size_bytes
        return list(torch.split(torch.cat([whole, whole.new_zeros(short_bytes)]), self._size_bytes))

    def _note(self, to: int, place: int) -> bytes:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        return _NOTE.pack(number, place, to in self._missing)
