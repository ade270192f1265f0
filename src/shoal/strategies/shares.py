"""Which server holds which parameters, and in which pieces they travel.

Whole parameters, balanced by size: an optimizer may look at all of a parameter at once. A large one is a
chunk by itself, so that its gradient is pushed from where it lies; small ones share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from shoal.strategies.twins import views_over
from shoal.tensors import ALIGNMENT_BYTES, DTYPES, BucketLayout, TensorSpec, describe, size_bytes
from shoal.tensors.packing import reshape_dense

ALONE_BYTES = 2**20
"""From here on a chunk of its own costs less than the copy into a shared one."""
CHUNK_BYTES = 4 * 2**20
"""Of a chunk of small ones: short enough that pushing, applying and pulling overlap."""
MAX_CHUNKS = 256
"""Of one server; a group has names for so many."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parameters of one dtype that one server holds in one piece of memory."""

    number: int
    """Among all chunks of all servers."""
    server: int
    layout: BucketLayout
    """Its indices are positions among all parameters."""
    num_elements: int
    dtype: torch.dtype
    """Of real numbers: a complex parameter travels as twice as many."""

    @property
    def is_alone(self) -> bool:
        """Whether it is one whole parameter, without gaps."""
        return len(self.layout.slots) == 1

    @property
    def spans(self) -> list[slice]:
        """Where each parameter lies among the elements."""
        starts = [slot.offset_bytes // self.dtype.itemsize for slot in self.layout.slots]
        sizes = [size_bytes(slot.spec) // self.dtype.itemsize for slot in self.layout.slots]
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Flat memory of the chunk as tensors of its parameters' shapes and strides."""
        dtype = DTYPES[self.layout.dtype]
        raw = flat.view(torch.uint8)
        return [
            reshape_dense(
                raw[slot.offset_bytes : slot.offset_bytes + size_bytes(slot.spec)].view(dtype), slot.spec
            )
            for slot in self.layout.slots
        ]

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """As `views`, each with a storage of its own: saving or copying one takes no other along."""
        return views_over(self.layout, flat, DTYPES[self.layout.dtype])


def plan_chunks(
    parameters: Sequence[torch.Tensor | TensorSpec], num_servers: int, max_chunks: int = MAX_CHUNKS
) -> list[Chunk]:
    """All chunks, those of all servers in turn, so that the servers work at once; each has one at least."""
    specs = [item if isinstance(item, TensorSpec) else describe(item) for item in parameters]
    shares = [_layouts(specs, indices, max_chunks) for indices in _balance(specs, num_servers)]
    turns = [
        (server, share[turn])
        for turn in range(max(map(len, shares)))
        for server, share in enumerate(shares)
        if turn < len(share)
    ]
    return [_chunk(number, server, layout) for number, (server, layout) in enumerate(turns)]


def _balance(specs: Sequence[TensorSpec], num_servers: int) -> list[list[int]]:
    """The largest first, each to the server that has least."""
    loads = [0] * num_servers
    shares: list[list[int]] = [[] for _ in range(num_servers)]
    for index in sorted(range(len(specs)), key=lambda index: -size_bytes(specs[index])):
        server = loads.index(min(loads))
        loads[server] += max(ALIGNMENT_BYTES, size_bytes(specs[index]))
        shares[server].append(index)
    return [sorted(share) for share in shares]


def _layouts(specs: Sequence[TensorSpec], indices: Sequence[int], max_chunks: int) -> list[BucketLayout]:
    """Large ones first: the last chunk to be pushed is the last to be applied, and a small one ends soonest.

    With few chunks, each holds more: less than a third of them can be large parameters, and of any two
    chunks of small ones that follow each other one is at least half full.
    """
    total = sum(size_bytes(specs[index]) for index in indices)
    alone_bytes = max(ALONE_BYTES, 3 * total // max_chunks)
    alone = [index for index in indices if size_bytes(specs[index]) >= alone_bytes]
    small = [index for index in indices if size_bytes(specs[index]) < alone_bytes]
    layouts = [_moved(BucketLayout.plan([specs[index]])[0], [index]) for index in alone]
    chunk_bytes = max(CHUNK_BYTES, 2 * alone_bytes)
    planned = BucketLayout.plan([specs[index] for index in small], max_bytes=chunk_bytes)
    layouts += [_moved(layout, small) for layout in planned]
    return layouts or [BucketLayout("float32", (), ALIGNMENT_BYTES)]


def _moved(layout: BucketLayout, indices: Sequence[int]) -> BucketLayout:
    slots = tuple(msgspec.structs.replace(slot, index=indices[slot.index]) for slot in layout.slots)
    return msgspec.structs.replace(layout, slots=slots)


def _chunk(number: int, server: int, layout: BucketLayout) -> Chunk:
    dtype = DTYPES[layout.dtype].to_real()
    size = size_bytes(layout.slots[0].spec) if len(layout.slots) == 1 else layout.size_bytes
    # a parameter without elements still has a place
    return Chunk(number, server, layout, max(1, size // dtype.itemsize), dtype)
