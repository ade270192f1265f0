"""How the tensors of two replicas meet half-way, piece by piece: arithmetic only, on the device's thread.

One side sends what it has; the other sets itself to the mean and answers with it; the first moves by as much
as the mean differs from what it had sent. Updates that it made meanwhile are kept, and the mean of the two is
what it was. How pieces travel is `meetings`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from shoal.core import TensorError
from shoal.experts.state import cpu_copy
from shoal.tensors import TensorSpec
from shoal.tensors.dtypes import dtype_name

PART_BYTES = 16 << 20
"""What is sent at once: much less than a message may have, so that the device is soon free again."""
_NUM_IN_A_PART = 4096

Tensors = Mapping[str, torch.Tensor]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a tensor, or all of it."""

    name: str
    start: int
    """The first of the rows, which are along the first dimension."""
    spec: TensorSpec


Part = tuple[Piece, ...]


def plan(tensors: Tensors, max_bytes: int = PART_BYTES) -> list[Part]:
    """All tensors cut into parts of at most so many bytes; a single row may be larger."""
    parts: list[Part] = []
    open_part: list[Piece] = []
    room_bytes = max_bytes
    for name, tensor in tensors.items():
        for piece, size_bytes in _pieces(name, tensor, max_bytes):
            if open_part and (size_bytes > room_bytes or len(open_part) == _NUM_IN_A_PART):
                parts.append(tuple(open_part))
                open_part, room_bytes = [], max_bytes
            open_part.append(piece)
            room_bytes -= size_bytes
    if open_part:
        parts.append(tuple(open_part))
    return parts


def take(tensors: Tensors, part: Part) -> list[torch.Tensor]:
    """Copies of these pieces in the CPU's memory."""
    return [cpu_copy(_rows(tensors, piece)) for piece in part]


@torch.no_grad()
def meet(tensors: Tensors, part: Part, theirs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Set these pieces to the mean of what they are and what `theirs` are; the mean, in the CPU's memory.

    TensorError, and nothing is changed, when they are not pieces of the same tensors or not finite.
    """
    check_shapes(tensors, part, theirs)
    rows = [_rows(tensors, piece) for piece in part]
    means = [_mean(mine, other.to(mine.device)) for mine, other in zip(rows, theirs, strict=True)]
    for piece, mine, mean in zip(part, rows, means, strict=True):
        check_finite(piece.name, mean, mine)
    for mine, mean in zip(rows, means, strict=True):
        mine.copy_(mean)
    return [cpu_copy(mean) for mean in means]


@torch.no_grad()
def move(tensors: Tensors, part: Part, sent: Sequence[torch.Tensor], means: Sequence[torch.Tensor]) -> None:
    """Bring these pieces, which were `sent` and may have changed since, to the mean.

    TensorError, and nothing is changed, when it cannot be their mean.
    """
    check_shapes(tensors, part, means)
    for piece, old, mean in zip(part, sent, means, strict=True):
        check_finite(piece.name, mean, old)
    for piece, old, mean in zip(part, sent, means, strict=True):
        now = _rows(tensors, piece)
        before, after = old.to(now.device), mean.to(now.device)
        # by itself the sum would differ from the mean in the last bit, and replicas would never be equal
        now.copy_(torch.where(now == before, after, now + (after - before)))


@torch.no_grad()
def fill(tensors: Tensors, part: Part, given: Sequence[torch.Tensor]) -> None:
    """Write these pieces; TensorError when they are not pieces of the tensors."""
    check_shapes(tensors, part, given)
    for piece, tensor in zip(part, given, strict=True):
        _rows(tensors, piece).copy_(tensor)


def check_shapes(tensors: Tensors, part: Part, given: Sequence[torch.Tensor]) -> None:
    """TensorError when what another replica has given is not these pieces."""
    for piece, tensor in zip(part, given, strict=True):
        mine = _rows(tensors, piece)
        if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
            raise TensorError(
                f"{piece.name[:100]!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
                f"not {dtype_name(mine.dtype)}{list(mine.shape)}",
                cause="replicas of one expert run different models.",
            )


def check_finite(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    """TensorError when a tensor is not finite; what was infinite before, as masks are, may stay so."""
    if not (given.isfinite() | (given == own)).all():
        raise TensorError(f"{name[:100]!r} is not finite", cause="a broken or hostile replica.")


def _pieces(name: str, tensor: torch.Tensor, max_bytes: int) -> list[tuple[Piece, int]]:
    size_bytes = tensor.numel() * tensor.element_size()
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if size_bytes <= max_bytes or not shape or shape[0] < 2:
        return [(Piece(name, 0, TensorSpec(dtype, shape)), size_bytes)]
    row_bytes = size_bytes // shape[0]
    num_rows = max(1, max_bytes // row_bytes)
    pieces = []
    for start in range(0, shape[0], num_rows):
        num = min(num_rows, shape[0] - start)
        pieces.append((Piece(name, start, TensorSpec(dtype, (num, *shape[1:]))), num * row_bytes))
    return pieces


def _rows(tensors: Tensors, piece: Piece) -> torch.Tensor:
    """The piece itself, to be read or written to; TensorError when there is no such piece."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise TensorError(
            f"there is no tensor {piece.name[:100]!r}", cause="replicas of one expert run different models."
        )
    shape = piece.spec.shape
    if tensor.dim() == 0 or (piece.start == 0 and shape == tuple(tensor.shape)):
        return tensor
    num_rows = shape[0] if shape else 0
    if piece.start < 0 or num_rows < 1 or piece.start + num_rows > tensor.shape[0]:
        raise TensorError(f"{piece.name[:100]!r} has {tensor.shape[0]} rows, and not those that were sent")
    return tensor.narrow(0, piece.start, num_rows)


def _mean(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    wide = mine.dtype if mine.dtype.itemsize >= 4 else torch.float32
    mean = torch.lerp(mine.to(wide), theirs.to(wide), 0.5).to(mine.dtype)
    return torch.where(mine == theirs, mine, mean)
