"""Tensors over memory that belongs to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core.errors import TensorError
from shoal.transport.memory import byte_view

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def bytes_of(buffer: ReadableBuffer) -> memoryview:
    """The buffer as a flat view of bytes; TensorError if it is no buffer, or one with gaps."""
    try:
        return byte_view(buffer)
    except (TypeError, ValueError) as error:
        raise TensorError(f"not a buffer: {error}") from None
    except BufferError:
        raise TensorError(
            "a buffer has gaps between its bytes; only contiguous ones can hold tensors"
        ) from None


def tensor_over(view: memoryview) -> torch.Tensor:
    """A 1-D uint8 tensor that shares the writable, non-empty memory of `view`.

    The tensor holds an export of the buffer, so that an mmap cannot be closed, or a bytearray resized,
    under it: both raise BufferError until the last such tensor is gone.
    """
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))
