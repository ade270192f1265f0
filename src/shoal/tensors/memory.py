"""Memory that tensors live in: aligned blocks, and tensors over memory that belongs to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core.errors import TensorError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register: kernels give equal bits only on equally aligned data."""


def aligned_memory(size_bytes: int) -> memoryview:
    """New writable memory on a 64-byte boundary; its content is whatever was there before."""
    block = torch.empty(size_bytes, dtype=torch.uint8)
    # torch aligns so itself on most platforms, and promises it on none.
    if block.data_ptr() % ALIGNMENT_BYTES == 0:
        return block.numpy().data
    block = torch.empty(size_bytes + ALIGNMENT_BYTES - 1, dtype=torch.uint8)
    start = -block.data_ptr() % ALIGNMENT_BYTES
    return block[start : start + size_bytes].numpy().data


def bytes_of(buffer: ReadableBuffer) -> memoryview:
    """The buffer as a flat view of bytes; TensorError if it is no buffer, or one with gaps."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise TensorError(f"not a buffer: {error}") from None
    if not view.c_contiguous:
        raise TensorError("a buffer has gaps between its bytes; only contiguous ones can hold tensors")
    return view.cast("B") if view.nbytes else memoryview(b"")


def tensor_over(view: memoryview) -> torch.Tensor:
    """A 1-D uint8 tensor that shares the writable, non-empty memory of `view`.

    The tensor holds an export of the buffer, so that an mmap cannot be closed, or a bytearray resized,
    under it: both raise BufferError until the last such tensor is gone.
    """
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))
