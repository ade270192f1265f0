"""Tensors to buffers and back, without copying where memory allows it.

Bytes are little-endian, in the tensor's own memory order. A packed buffer is the tensor's memory, not a
snapshot: it must be sent before the tensor changes. An unpacked tensor is the received buffer.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.errors import TensorError
from shoal.tensors.dtypes import carrier, dtype_name, dtype_named
from shoal.tensors.memory import bytes_of, tensor_over
from shoal.tensors.specs import (
    DEFAULT_LIMITS,
    MAX_DIMS,
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
        if (usual := _packed_usual(tensor)) is not None:
            specs.append(usual[0])
            buffers.append(usual[1])
            continue
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
    usual = [_unpacked_usual(spec, buffer) for spec, buffer in zip(specs, buffers, strict=True)]
    if all(tensor is not None for tensor in usual):
        return usual  # type: ignore[return-value]
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


def _packed_usual(tensor: torch.Tensor) -> tuple[TensorSpec, memoryview] | None:
    """`pack` for what nearly every tensor is: contiguous, on the CPU, of a type that numpy has; else None.

    It takes 3 µs instead of 30, which is felt where one small tensor is sent at a time.
    """
    if type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    name = _USUAL.get(tensor.dtype)
    if name is None or not tensor.is_contiguous() or tensor.dim() == 0 or tensor.numel() == 0:
        return None
    if tensor.dim() > MAX_DIMS or tensor.is_neg():
        return None
    return TensorSpec(name, tuple(tensor.shape)), tensor.detach().numpy().data.cast("B")


def _unpacked_usual(spec: TensorSpec, buffer: ReadableBuffer) -> torch.Tensor | None:
    """`unpack` for the same kind of tensor, when everything fits; None where it must be looked at closely."""
    dtype = _USUAL_NUMPY.get(spec.dtype) if isinstance(spec, TensorSpec) else None
    if dtype is None or spec.strides is not None or type(buffer) is not memoryview or buffer.readonly:
        return None
    size, shape = len(buffer), spec.shape
    if buffer.format != "B" or buffer.ndim != 1 or not buffer.contiguous or not 0 < len(shape) <= MAX_DIMS:
        return None
    if size == 0 or min(shape) < 1 or math.prod(shape) * dtype.itemsize != size:
        return None
    # frombuffer keeps the view itself alive; ndarray(…, buffer) would keep the memory below a pool's lease,
    # which then were given to somebody else while this tensor is in use
    array: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype).reshape(shape)
    return torch.from_numpy(array) if array.flags.aligned else None


_USUAL = {
    dtype: dtype_name(dtype)
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}
_USUAL_NUMPY = {name: np.dtype(name) for name in _USUAL.values()}


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
