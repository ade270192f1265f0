"""Flat buckets: many tensors of one dtype in one block of memory, so that one exchange moves them all.

Every view starts on a 64-byte boundary and keeps its tensor's strides: a view that starts elsewhere, or has
lost channels_last, makes torch choose other kernels and other bits. The gaps between views are zeros, so
that a reduction over the whole of `flat` is clean. Who fills, exchanges and empties buckets is left to
groups and strategies.

Of a DTensor (FSDP2, `fully_shard`) a bucket holds the part that lies on this worker. Its place is as large as
the largest part of all workers, so that buckets are equally long where dimensions do not divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.packing import reshape_dense
from shoal.tensors.specs import TensorSpec, describe, is_sharded, local_part, size_bytes
from shoal.transport.memory import ALIGNMENT_BYTES, aligned_memory

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Large enough that the cost of one exchange hardly counts, small enough to overlap with backward."""


PACK_BYTES = 64 * 2**20
"""Of one operation on many tensors: few operations, and little memory beside the model."""


class BucketSlot(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's place in a bucket; `index` is its position in the sequence that was planned."""

    index: int
    spec: TensorSpec
    offset_bytes: int


class BucketLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where each tensor lies in a bucket: numbers only, equal on all peers that plan equal tensors."""

    dtype: str
    slots: tuple[BucketSlot, ...]
    size_bytes: int
    """A multiple of 64, gaps included."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Positions of the bucket's tensors in the planned sequence, in slot order."""
        return tuple(slot.index for slot in self.slots)

    def pick(self, sequence: Sequence[T]) -> list[T]:
        """The bucket's members, in slot order, of a sequence parallel to the planned one."""
        return [sequence[slot.index] for slot in self.slots]

    def with_flags(self) -> BucketLayout:
        """Gives the layout that also has a flag for each of its tensors, at its end."""
        slot = BucketSlot(-1, TensorSpec(self.dtype, (len(self.slots),)), self.size_bytes)
        end_bytes = self.size_bytes + _aligned(size_bytes(slot.spec))
        return BucketLayout(self.dtype, (*self.slots, slot), end_bytes)

    @staticmethod
    def plan(
        tensors: Iterable[torch.Tensor | TensorSpec],
        *,
        max_bytes: int = DEFAULT_BUCKET_BYTES,
        first_max_bytes: int | None = None,
        is_reversed: bool = False,
    ) -> list[BucketLayout]:
        """Divide tensors among buckets of one dtype each, in the order in which the buckets fill.

        `is_reversed` walks from the last tensor to the first, as backward produces gradients. A smaller
        `first_max_bytes` lets the first bucket of each dtype leave early. A tensor larger than the limit
        has a bucket to itself.
        """
        first_max_bytes = max_bytes if first_max_bytes is None else first_max_bytes
        if min(max_bytes, first_max_bytes) < ALIGNMENT_BYTES:
            raise UsageError(f"a bucket holds at least {ALIGNMENT_BYTES} bytes")
        items = list(tensors)
        specs = [item if isinstance(item, TensorSpec) else describe(local_part(item)) for item in items]
        rooms = [_room_bytes(item, spec) for item, spec in zip(items, specs, strict=True)]
        walk = list(enumerate(specs))
        if is_reversed:
            walk.reverse()
        open_: dict[str, list[BucketSlot]] = {}
        limits: dict[str, int] = {}
        closed: list[list[BucketSlot]] = []

        def end_of(slots: list[BucketSlot]) -> int:
            return slots[-1].offset_bytes + rooms[slots[-1].index] if slots else 0

        for index, spec in walk:
            slots = open_.setdefault(spec.dtype, [])
            limit = limits.setdefault(spec.dtype, first_max_bytes)
            offset = end_of(slots)
            if slots and offset + rooms[index] > limit:
                closed.append(slots)
                open_[spec.dtype] = slots = []
                limits[spec.dtype] = max_bytes
                offset = 0
            slots.append(BucketSlot(index, spec, offset))
        closed.extend(open_.values())
        # A bucket can leave once its last tensor is there.
        rank = {index: position for position, (index, _) in enumerate(walk)}
        closed.sort(key=lambda slots: rank[slots[-1].index])
        return [BucketLayout(slots[0].spec.dtype, tuple(slots), end_of(slots)) for slots in closed]


class Bucket:
    """The memory of one layout.

    `memory` may be any writable buffer on a 64-byte boundary, shared memory included, or a tensor of bytes
    on any device: what its views already hold is left alone, and only the gaps are zeroed, so that several
    processes may attach to it.
    Without it the bucket allocates zeros, on `device`.
    """

    flat: torch.Tensor
    """All of the memory, gaps included, as one 1-D tensor."""
    views: tuple[torch.Tensor, ...]
    """One tensor for each slot, in slot order."""

    def __init__(
        self,
        layout: BucketLayout,
        memory: WriteableBuffer | torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        if isinstance(memory, torch.Tensor) and memory.device.type != "cpu":
            raw = memory.view(torch.uint8)[: layout.size_bytes]
        else:
            buffer = memory.view(torch.uint8).numpy().data if isinstance(memory, torch.Tensor) else memory
            raw = _raw_memory(layout, buffer, torch.device(device))
        if memory is not None:
            _zero_gaps(layout, raw)
        dtype = dtype_named(layout.dtype)
        self.flat = raw.view(dtype)
        self.views = tuple(_view(self.flat, slot) for slot in layout.slots)

    @property
    def buffer(self) -> memoryview:
        """The bucket's bytes, gaps included, for sending or receiving into; CPU only."""
        if self.flat.device.type != "cpu":
            raise UsageError(f"a bucket on {self.flat.device} has no buffer; copy `flat` to the CPU first")
        return self.flat.view(torch.uint8).numpy().data

    def load(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy tensors in, in slot order; None, a gradient that was not computed, becomes zeros."""
        tensors = self._fitting(tensors)
        pairs = list(zip(self.views, tensors, strict=True))
        with torch.no_grad():
            for view in [view for view, tensor in pairs if tensor is None]:
                view.zero_()
            _copy_all([(view, tensor) for view, tensor in pairs if tensor is not None])

    def store(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the views out into tensors, in slot order; None is passed over."""
        tensors = self._fitting(tensors)
        pairs = zip(tensors, self.views, strict=True)
        with torch.no_grad():
            _copy_all([(tensor, view) for tensor, view in pairs if tensor is not None])

    def _fitting(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """All is checked before the first byte moves: copy_ would broadcast, or convert, in silence."""
        if len(tensors) != len(self.views):
            raise TensorError(f"{len(tensors)} tensors for a bucket of {len(self.views)}")
        tensors = [None if tensor is None else local_part(tensor) for tensor in tensors]
        for slot, view, tensor in zip(self.layout.slots, self.views, tensors, strict=True):
            if tensor is not None and (tensor.shape != view.shape or tensor.dtype != view.dtype):
                raise TensorError(
                    f"tensor {slot.index} is {tensor.dtype} of shape {list(tensor.shape)}; "
                    f"its slot is {view.dtype} of shape {list(view.shape)}",
                    next_step="give the tensors in the order of layout.indices; layout.pick(…) does",
                )
        return tensors


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Views a complex tensor as a real one with one dimension more; gives others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def packed(
    tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu"
) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    """Copies the tensors into a few buckets of private memory, each with the tensors that it copies.

    Complex ones as real ones with one dimension more. A bucket is filled when it is asked for.
    """
    tensors = list(map(as_real, tensors))
    for layout in BucketLayout.plan(tensors, max_bytes=PACK_BYTES):
        bucket = Bucket(layout, device=device)
        members = layout.pick(tensors)
        bucket.load(members)
        yield bucket, members


def packed_on_devices(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    """Packs tensors of each device together, in memory of that device: a GPU is not waited for."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        yield from packed([tensor for tensor in tensors if tensor.device == device], device)


class FlaggedBucket:
    """Flat memory that somebody allocates, with views for some tensors and, at its end, a flag for each.

    The flags are of the tensors' dtype, so that a reduction of all tells how many members had which tensor.
    """

    def __init__(self, layout: BucketLayout, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        layout, real = layout.with_flags(), dtype_named(layout.dtype).to_real()
        self.memory = allocate(layout.size_bytes // real.itemsize, real)
        *self.views, self.flags = Bucket(layout, memory=self.memory).views
        self._ones = torch.ones_like(self.flags)

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Copies all tensors by one operation of a device, and sets all flags; False if one is missing."""
        given = []
        for tensor, view in zip(tensors, self.views, strict=True):
            if tensor is None or tensor is view or tensor.layout is not torch.strided:
                return False
            given.append(tensor.detach() if tensor.requires_grad else tensor)
        # not documented, but torch's optimizers write all their parameters by such operations
        torch._foreach_copy_([*self.views, self.flags], [*given, self._ones])
        return True


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _room_bytes(item: torch.Tensor | TensorSpec, spec: TensorSpec) -> int:
    """Counts the bytes of a tensor's place: those of the largest part where workers hold parts of it."""
    if isinstance(item, TensorSpec) or not is_sharded(item):
        return _aligned(size_bytes(spec))
    shape, sharded = list(item.shape), cast(Any, item)
    for num_parts, placement in zip(sharded.device_mesh.shape, sharded.placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // num_parts)
    return _aligned(math.prod(shape) * item.dtype.itemsize)


def _raw_memory(layout: BucketLayout, memory: WriteableBuffer | None, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        if memory is not None:
            raise UsageError(f"memory of the CPU cannot hold a bucket on {device}")
        return torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
    if not layout.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if memory is None:
        return tensor_over(aligned_memory(layout.size_bytes)).zero_()
    view = bytes_of(memory)
    if view.readonly:
        raise UsageError("a bucket needs memory that it may write")
    if len(view) < layout.size_bytes:
        raise UsageError(f"a bucket of {layout.size_bytes} bytes does not fit memory of {len(view)}")
    raw = tensor_over(view[: layout.size_bytes])
    if raw.data_ptr() % ALIGNMENT_BYTES:
        raise UsageError(
            f"a bucket's memory starts on a {ALIGNMENT_BYTES}-byte boundary, this one "
            f"{raw.data_ptr() % ALIGNMENT_BYTES} bytes after one",
            next_step="use aligned_memory(), or an offset into the mmap that is a multiple of 64",
        )
    return raw


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair into the first; inside a GPU by few operations for all."""
    if pairs and all(into.is_cuda and into.device == source.device for into, source in pairs):
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])
        return
    for into, source in pairs:
        into.copy_(source)


def _zero_gaps(layout: BucketLayout, raw: torch.Tensor) -> None:
    for slot in layout.slots:
        end = slot.offset_bytes + size_bytes(slot.spec)
        raw[end : _aligned(end)].zero_()


def _view(flat: torch.Tensor, slot: BucketSlot) -> torch.Tensor:
    spec = slot.spec
    start = slot.offset_bytes // flat.element_size()
    count = size_bytes(spec) // flat.element_size()
    return reshape_dense(flat[start : start + count], spec)
