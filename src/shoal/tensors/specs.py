"""What a tensor looks like on the wire, and whether a claim about one can be believed.

A spec says dtype, shape and strides; the bytes are the tensor's elements in memory order, little-endian,
without gaps. Strides are given only for a dense tensor whose memory order is not the order of its dimensions
(channels_last, transposed). Everything here works on numbers alone: nothing is allocated, and whatever a
peer claims ends in TensorError or LimitExceeded or is true. Bytes are moved in `packing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from shoal.core.errors import LimitExceeded, TensorError
from shoal.tensors.dtypes import dtype_name, dtype_named

MAX_DIMS = 32
"""More dimensions than any model has, and few enough for every torch operation."""

_MAX_ADDRESSABLE_BYTES = 2**63 - 1
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's dtype name, shape, and strides in elements (None: contiguous)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorLimits:
    """What one message may claim."""

    max_tensors: int = 65_536
    """How many tensors one message may hold."""
    max_bytes: int = 4 * 2**30
    """How many bytes all of them may take together."""


DEFAULT_LIMITS = TensorLimits()


def describe(tensor: torch.Tensor) -> TensorSpec:
    """The spec under which `pack` sends the tensor; a tensor that is not dense is sent contiguous."""
    refuse_unsendable(tensor)
    shape = tuple(tensor.shape)
    return TensorSpec(dtype_name(tensor.dtype), shape, wire_strides(shape, tensor.stride()))


def refuse_unsendable(tensor: torch.Tensor) -> None:
    """TensorError for whatever is more than one dense block of memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"expected a tensor, not {type(tensor).__name__}")
    if is_sharded(tensor):
        raise TensorError(
            "a DTensor does not travel: each worker holds a part of it", next_step="send tensor.to_local()"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TensorError(
            f"a tensor of layout {kind} does not travel",
            next_step="send tensor.to_dense(), or its values and indices as tensors of their own",
        )
    if tensor.dim() > MAX_DIMS:
        raise TensorError(f"a tensor of {tensor.dim()} dimensions does not travel; at most {MAX_DIMS} do")
    dtype_name(tensor.dtype)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tells whether this is a DTensor, of which each worker of a mesh holds a part."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Gives the part of a DTensor that lies on this worker, in the same memory; another tensor as it is.

    An operation on the DTensor itself may start a collective of torch's, and wait for other workers.
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast(torch.Tensor, cast(Any, tensor).to_local())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the shape in row-major order, as torch gives them to a new tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gap or overlap, in some order."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != step:
            return False
        step *= size
    return True


def wire_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides to send for a tensor of these: None unless it is dense in an order of its own."""
    plain = contiguous_strides(shape)
    if tuple(strides) == plain or 0 in shape or not is_dense(shape, strides):
        return None
    # The stride of a dimension of size 1 moves nothing, yet torch reads the memory format from it: it is
    # kept while it could belong to a tensor of this size, so that a receiver can hold it to that.
    count = math.prod(shape)
    kept = tuple(
        stride if size > 1 or 1 <= stride <= count else default
        for stride, size, default in zip(strides, shape, plain, strict=True)
    )
    return None if kept == plain else kept


def memory_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The sizes of a checked spec's dimensions in memory order, slowest first, those of size 1 left out."""
    strides = spec.strides or contiguous_strides(spec.shape)
    order = sorted(zip(strides, spec.shape, strict=True), reverse=True)
    return tuple(size for _, size in order if size > 1)


def read_specs(value: object) -> list[TensorSpec]:
    """Specs from what MessagePack decoded (a list of [dtype, shape, strides]); TensorError if it is not."""
    try:
        return msgspec.convert(value, list[TensorSpec])
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise TensorError(f"not a list of tensor specs: {error}") from None


def size_bytes(spec: TensorSpec) -> int:
    """How many bytes the spec takes; TensorError if it describes no tensor that torch could hold."""
    if not isinstance(spec, TensorSpec):
        raise TensorError(f"expected a tensor spec, not {type(spec).__name__}")
    dtype = dtype_named(spec.dtype)
    shape = _integers(spec.shape, "shape")
    span = dtype.itemsize
    for size in shape:
        if size < 0:
            raise TensorError(f"a dimension of size {_short(size)} is not possible")
        # Sizes of 0 count as 1: torch computes strides from the others, and those must not overflow.
        span *= max(size, 1)
        if span > _MAX_ADDRESSABLE_BYTES:
            raise TensorError(
                "a shape claims more elements than an address can reach", cause="a broken or hostile peer"
            )
    if spec.strides is not None:
        _check_strides(shape, spec.strides)
    return 0 if 0 in shape else span


def check(specs: Sequence[TensorSpec], sizes: Sequence[int], limits: TensorLimits = DEFAULT_LIMITS) -> None:
    """Refuse specs that are impossible, too large, or do not fit buffers of `sizes` bytes.

    To be called before memory for the buffers is allocated. LimitExceeded for what is only too much,
    TensorError for the rest.
    """
    if len(specs) > limits.max_tensors:
        raise LimitExceeded(
            f"{len(specs)} tensors in one message, at most {limits.max_tensors} are allowed",
            next_step="send several messages, or raise max_tensors on the receiver",
        )
    if len(specs) != len(sizes):
        raise TensorError(f"{len(specs)} tensor specs came with {len(sizes)} buffers")
    total = 0
    for index, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        wanted = size_bytes(spec)
        if wanted != size:
            raise TensorError(
                f"tensor {index}, {spec.dtype} of shape {list(spec.shape)}, takes {wanted} bytes, "
                f"but its buffer has {size}"
            )
        total += wanted
        if total > limits.max_bytes:
            raise LimitExceeded(
                f"tensors of one message take more than the {limits.max_bytes} bytes allowed",
                next_step="send several messages, or raise max_bytes on the receiver",
            )


def _integers(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise TensorError(f"{what} is a list of integers, not {type(values).__name__}")
    if len(values) > MAX_DIMS:
        raise TensorError(f"{len(values)} dimensions; at most {MAX_DIMS} travel")
    if not all(type(value) is int for value in values):
        raise TensorError(f"{what} holds something that is not an integer")
    return tuple(values)


def _check_strides(shape: tuple[int, ...], claimed: object) -> None:
    strides = _integers(claimed, "strides")
    if len(strides) != len(shape):
        raise TensorError(f"{len(strides)} strides for {len(shape)} dimensions")
    if 0 in shape:
        raise TensorError("a tensor without elements has no strides of its own")
    count = math.prod(shape)
    if not all(1 <= stride <= count for stride in strides) or not is_dense(shape, strides):
        raise TensorError(
            f"strides {[_short(stride) for stride in strides]} do not describe dense memory of "
            f"shape {list(shape)}",
            cause="elements that overlap, or lie outside the buffer",
        )


def _short(number: int) -> str:
    return str(number) if abs(number) < 2**64 else "beyond 64 bits"
