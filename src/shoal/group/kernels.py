"""The arithmetic of reductions and weighted averages over parts of several workers' tensors, and of writes.

Memory traffic is what they cost, so every byte is read once and written once: larger tensors go through in
pieces that stay in the processor's cache between the steps. One write into a slot of a window, or one copy of
what is published, is checked here before it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from shoal.core import LimitExceeded, TensorError, UsageError
from shoal.group.base import Reduction, Snapshot, Window, WindowForm, WindowSlot, Write
from shoal.tensors.memory import copy_into
from shoal.topology.weights import are_differences

_PIECE_BYTES = 1 << 18
OPS: tuple[Reduction, ...] = ("sum", "mean", "min", "max")
_HALF = (torch.float16, torch.bfloat16)
MAX_NOTE_BYTES = 4064


def check_reduction(tensor: torch.Tensor, op: Reduction) -> None:
    """Raises UsageError for a reduction that a dtype does not have."""
    if op not in OPS:
        raise UsageError(f"There is no reduction {op!r}.", next_step=f"take one of {', '.join(OPS)}.")
    if op == "mean" and not tensor.is_floating_point():
        raise UsageError(
            f"Cannot take the mean of {str(tensor.dtype).removeprefix('torch.')} tensors: "
            "convert the tensor to a floating-point type first.",
            next_step="all_reduce(tensor.float()), or another reduction.",
        )
    if op == "sum" and tensor.dtype is torch.bool:
        # torch adds booleans as OR, so that the number of true values would always be 1
        raise UsageError(
            "Cannot sum bool tensors: convert to an integer type first.",
            next_step="all_reduce(tensor.int(), 'sum') counts; 'max' is OR and 'min' is AND of bool tensors.",
        )


def check_average(tensor: torch.Tensor) -> None:
    """Raises UsageError for a weighted average that a dtype does not have."""
    if not tensor.is_floating_point():
        raise UsageError(
            f"Cannot average {str(tensor.dtype).removeprefix('torch.')} tensors: convert the tensor to a "
            "floating-point type first.",
            next_step="exchange(tensor.float(), ...).",
        )


def share_bounds(index: int, num_shares: int, num_elements: int, element_bytes: int) -> tuple[int, int]:
    """Finds the bounds of one of several nearly equal parts, each from a 64-byte boundary on."""
    step = max(1, 64 // element_bytes)
    each = -(-num_elements // (num_shares * step)) * step
    return min(index * each, num_elements), min((index + 1) * each, num_elements)


def reduce_to_all(views: Sequence[torch.Tensor], low: int, high: int, op: Reduction) -> None:
    """Replaces elements low to high of all views by their reduction."""
    piece = _PIECE_BYTES // views[0].element_size()
    for start in range(low, high, piece):
        parts = [view[start : min(start + piece, high)] for view in views]
        result = parts[0]
        reduce_into(result, parts, op)
        for part in parts[1:]:
            part.copy_(result)


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Reduces equal parts in the order given, so that all who compute it get equal bits."""
    if len(parts) == 1:
        if out is not parts[0]:
            out.copy_(parts[0])
        return
    if op in ("min", "max"):
        combine = torch.minimum if op == "min" else torch.maximum
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        return
    is_half = out.dtype in _HALF  # kept in single precision until the end
    total = parts[0].float().add_(parts[1]) if is_half else torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total.add_(part)
    if op == "mean":
        total.mul_(1 / len(parts))
    if is_half:
        out.copy_(total)


def mix_into(
    out: torch.Tensor, own: torch.Tensor, own_weight: float, sources: Sequence[tuple[torch.Tensor, float]]
) -> None:
    """Computes `own · own_weight + Σ source · weight`; `out` may be `own` itself.

    Weights that sum to zero are those of differences, `Σ (source − own) · weight`: taken first, so that two
    workers get the same of each other but for the sign, and nothing where all are equal.
    """
    if len(sources) == 1 and own_weight + sources[0][1] == 1.0:
        torch.lerp(own, sources[0][0], sources[0][1], out=out)
        return
    is_difference = are_differences(own_weight, [weight for _, weight in sources])
    is_half = out.dtype in _HALF  # kept in single precision until the end
    for part in _pieces(out):
        mine, parts = own[part], [(source[part], weight) for source, weight in sources]
        if is_difference:
            total = _differences(mine, parts)
        else:
            total = mine.float().mul_(own_weight) if is_half else torch.mul(mine, own_weight, out=out[part])
            for source, weight in parts:
                total.add_(source, alpha=weight)
        if is_difference or is_half:
            out[part].copy_(total)


def mix_on_device(
    out: torch.Tensor,
    own: torch.Tensor,
    own_weight: float,
    sources: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
) -> None:
    """Computes what `mix_into` does; each source has a weight on the device, and one that was meant.

    What a source weighs less than was meant goes to oneself.
    """
    is_half = own.dtype in _HALF
    if len(sources) == 1 and own_weight + sources[0][2] == 1.0 and not is_half:
        torch.lerp(own, sources[0][0], sources[0][1], out=out)
        return
    wide = own.float() if is_half else own
    total = own_weight + sum(weight for _, _, weight in sources)
    if len(sources) == 1 and total == 1.0:
        tensor, weight, _ = sources[0]
        result = torch.lerp(wide, tensor.to(wide.dtype), weight)
    elif are_differences(own_weight, [weight for _, _, weight in sources]):
        result = torch.zeros_like(wide)
        for tensor, weight, _ in sources:
            result.addcmul_(tensor - wide, weight)
    else:
        rest = total - torch.stack([weight for _, weight, _ in sources]).sum() if sources else total
        result = torch.mul(wide, rest, out=None if is_half else out)
        for tensor, weight, _ in sources:
            result.addcmul_(tensor.to(wide.dtype), weight)
    if result is not out:
        out.copy_(result)


def add_differences(
    out: torch.Tensor, own: torch.Tensor, sources: Sequence[tuple[torch.Tensor, float]]
) -> None:
    """Adds `Σ (source − own) · weight` to `out`, which may be `own` itself. Where all are equal, it stays."""
    for part in _pieces(out):
        out[part].add_(_differences(own[part], [(source[part], weight) for source, weight in sources]))


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Cuts what a processor computes into pieces that its cache holds; a GPU takes all at once."""
    piece = 4 * _PIECE_BYTES // tensor.element_size() if tensor.device.type == "cpu" else tensor.numel() or 1
    for start in range(0, tensor.numel(), piece):
        yield slice(start, start + piece)


def _differences(own: torch.Tensor, sources: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Computes `Σ (source − own) · weight`, in single precision at least."""
    wide = own.float() if own.dtype in _HALF else own
    total = torch.zeros_like(wide)
    for source, weight in sources:
        total.add_(source - wide, alpha=weight)
    return total


@dataclass(eq=False)
class CopiedSnapshot(Snapshot):
    """A snapshot with memory of its own: whatever the publisher does, it stays what it was."""

    rank: int
    version: int
    tensor: torch.Tensor

    def is_intact(self) -> bool:
        """Is always true of a copy."""
        return True


class MemorySlot(WindowSlot):
    """A slot in memory of this process alone, which is taken when something is written for the first time."""

    def __init__(self, source: int, form: WindowForm) -> None:
        self.source = source
        self._make = partial(torch.zeros, form.num_elements, dtype=form.dtype, device=form.device)
        self.clear()

    @cached_property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The memory of what was written."""
        return self._make()

    def clear(self) -> None:
        """Empties it; the memory is left as it is."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""

    def may_take(self, write: Write) -> bool:
        """Tells whether there is room: a `send` waits for an empty slot."""
        return write.kind != "send" or self.num_writes == 0

    def take(self, write: Write) -> None:
        """Does one write, for which there is room."""
        has_more = write.kind == "add" and self.num_writes > 0
        (write_more if has_more else write_first)(self.tensor, write)
        self.mass = write.mass + (self.mass if has_more else 0.0)
        self.note = write.note
        self.num_writes += 1


def check_write(write: Write, window: Window) -> None:
    """Raises TensorError for a tensor that does not fit the window, LimitExceeded for a long note.

    What is published must fit like what is written.
    """
    tensor = write.tensor
    if tensor.numel() != window.num_elements or tensor.dtype != window.dtype:
        raise TensorError(
            f"{tensor.numel()} elements of {tensor.dtype} do not fit window {window.name!r}, which is "
            f"made for {window.num_elements} of {window.dtype}."
        )
    if write.weight != 1.0 and not window.dtype.is_floating_point:
        raise UsageError(
            f"{window.dtype} in window {window.name!r} cannot be weighted by {write.weight:g}.",
            next_step="use floating point, or no weight.",
        )
    if len(write.note) > MAX_NOTE_BYTES:
        raise LimitExceeded(
            f"A note of {len(write.note)} bytes is longer than the {MAX_NOTE_BYTES} that go with a write.",
            next_step="put what is large into the tensor.",
        )


def write_first(slot: torch.Tensor, write: Write) -> None:
    """Sets the slot to `weight · tensor`, whatever was there."""
    flat = write.tensor.detach().reshape(-1)
    if write.weight == 1.0:
        copy_into(slot, flat)
    else:
        torch.mul(flat.to(slot.device), write.weight, out=slot)


def write_more(slot: torch.Tensor, write: Write) -> None:
    """Adds `weight · tensor` to the slot."""
    flat = write.tensor.detach().reshape(-1).to(slot.device)
    if slot.dtype.is_floating_point:
        slot.add_(flat, alpha=write.weight)
    else:
        slot.add_(flat)


def copy_out(snapshot: Snapshot, into: torch.Tensor, name: str) -> int:
    """Copies a snapshot, and gives its version; TensorError when it does not fit."""
    source = snapshot.tensor
    if source.numel() != into.numel() or source.dtype != into.dtype:
        raise TensorError(
            f"{source.numel()} elements of {source.dtype}, published as {name!r} by rank {snapshot.rank}, do "
            f"not fit into {into.numel()} of {into.dtype}."
        )
    copy_into(into, source.view(into.shape))
    return snapshot.version
