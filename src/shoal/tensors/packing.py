"""Tensors to buffers and back, without copying where memory allows it.

Bytes are little-endian, in the tensor's own memory order. A packed buffer is the tensor's memory, not a
snapshot: it must be sent before the tensor changes. An unpacked tensor is the received buffer.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.core.errors import TensorError
from shoal.tensors.dtypes import carrier, dtype_named
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.specs import (
    DEFAULT_LIMITS,
    TensorLimits,
    TensorSpec,
    check,
    describe,
    is_dense,
    refuse_unsendable,
)
from shoal.transport.memory import aligned_memory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def densify(tensor: torch.Tensor) -> tuple[torch.Tensor, TensorSpec]:
    """The tensor's elements in memory order as a 1-D tensor on its device, and its spec.

    Shares the tensor's memory when it is dense; copies to contiguous order when it is not.
    """
    refuse_unsendable(tensor)
    if tensor.is_meta:
        raise TensorError("a tensor on the meta device has no bytes to send")
    try:
        dense = tensor.detach()
        if dense.is_conj() or dense.is_neg():
            dense = dense.resolve_conj().resolve_neg()
        if not dense.is_contiguous() and not is_dense(dense.shape, dense.stride()):
            dense = dense.view(carrier(dense.dtype)).contiguous().view(dense.dtype)
        return dense.as_strided((dense.numel(),), (1,), dense.storage_offset()), describe(dense)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise TensorError(f"the memory of a {type(tensor).__name__} cannot be read: {error}") from error


def reshape_dense(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The inverse of `densify`: a view of `flat` in the shape and strides of a checked spec."""
    if spec.strides is None:
        return flat.view(spec.shape)
    return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


def pack(tensors: Iterable[torch.Tensor]) -> tuple[list[TensorSpec], list[memoryview]]:
    """Specs and raw bytes of the tensors, in order.

    The bytes of a dense tensor on the CPU are its own memory; other tensors are copied.
    """
    _require_little_endian()
    specs, buffers = [], []
    for tensor in tensors:
        flat, spec = densify(tensor)
        specs.append(spec)
        buffers.append(flat.view(torch.uint8).cpu().numpy().data)
    return specs, buffers


def unpack(specs: Sequence[TensorSpec], buffers: Sequence[ReadableBuffer]) -> list[torch.Tensor]:
    """Tensors over the received buffers, writable; TensorError if a buffer does not fit its spec.

    A buffer that is read-only, or too badly aligned for its dtype, is copied; no other is.
    """
    _require_little_endian()
    if len(specs) != len(buffers):
        raise TensorError(f"{len(specs)} tensor specs came with {len(buffers)} buffers")
    views = [bytes_of(buffer) for buffer in buffers]
    # What arrived is already in memory: a limit on it would come too late.
    check(specs, [len(view) for view in views], TensorLimits(max_tensors=sys.maxsize, max_bytes=sys.maxsize))
    return [_over_buffer(spec, view) for spec, view in zip(specs, views, strict=True)]


def allocate_for(
    specs: Sequence[TensorSpec],
    sizes: Sequence[int],
    limits: TensorLimits = DEFAULT_LIMITS,
    allocate: Callable[[int], memoryview] = aligned_memory,
) -> list[memoryview]:
    """Writable buffers that a message of these specs and sizes is received into.

    For the allocate step of a transport handler; everything is checked before the first `allocate`.
    """
    check(specs, sizes, limits)
    return [allocate(size) for size in sizes]


def _over_buffer(spec: TensorSpec, view: memoryview) -> torch.Tensor:
    dtype = dtype_named(spec.dtype)
    with _quiet(dtype):
        if not len(view):
            return torch.empty(spec.shape, dtype=dtype)
        raw = _writable(view)
        if raw.data_ptr() % dtype.itemsize:
            raw = _copied(view)
        if dtype is torch.bool:
            # A byte that is neither 0 nor 1 makes a bool that kernels disagree about.
            raw.clamp_(max=1)
        return reshape_dense(raw.view(dtype), spec)


def _writable(view: memoryview) -> torch.Tensor:
    return _copied(view) if view.readonly else tensor_over(view)


def _copied(view: memoryview) -> torch.Tensor:
    memory = aligned_memory(len(view))
    memory[:] = view
    return tensor_over(memory)


@contextlib.contextmanager
def _quiet(dtype: torch.dtype) -> Iterator[None]:
    """Silence torch's remark, once a process, that complex32 is experimental: we only carry its bytes."""
    if dtype is not torch.complex32:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise TensorError(
            "tensors travel as little-endian bytes, and this machine is big-endian",
            next_step="run this peer on a little-endian machine (x86-64, ARM64)",
        )
