"""One write into a slot of a window, or one copy of what is published: what fits, and the arithmetic."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.core import LimitExceeded, TensorError, UsageError
from shoal.group.base import Handle, Snapshot, Window
from shoal.tensors.memory import copy_into

MAX_NOTE_BYTES = 4064


class CopiedSnapshot(Snapshot):
    """Of its own memory: whatever the publisher does, it stays what it was."""

    def __init__(self, rank: int, version: int, tensor: torch.Tensor) -> None:
        self.rank = rank
        self.version = version
        self.tensor = tensor

    def is_intact(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class Write:
    """What is to be written, and how."""

    kind: Literal["put", "accumulate", "send"]
    tensor: torch.Tensor
    weight: float = 1.0
    mass: float = 0.0
    note: bytes = b""


class WritingWindow(Window):
    """A window whose three kinds of writes go one way."""

    @abc.abstractmethod
    def write(self, to: int, write: Write) -> Handle[None]:
        """Do so."""

    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Overwrite."""
        return self.write(to, Write("put", tensor, weight, mass, note))

    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Add."""
        return self.write(to, Write("accumulate", tensor, weight, mass, note))

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Put, once there is room."""
        return self.write(to, Write("send", tensor, note=note))


def check_write(write: Write, name: str, num_elements: int, dtype: torch.dtype) -> None:
    """TensorError for a tensor that does not fit the window, LimitExceeded for a long note."""
    tensor = write.tensor
    if tensor.numel() != num_elements or tensor.dtype != dtype:
        raise TensorError(
            f"{tensor.numel()} elements of {tensor.dtype} do not fit window {name!r}, whose slots hold "
            f"{num_elements} of {dtype}."
        )
    if write.weight != 1.0 and not dtype.is_floating_point:
        raise UsageError(
            f"{dtype} in window {name!r} cannot be weighted by {write.weight:g}.",
            next_step="use floating point, or no weight.",
        )
    if len(write.note) > MAX_NOTE_BYTES:
        raise LimitExceeded(
            f"A note of {len(write.note)} bytes is longer than the {MAX_NOTE_BYTES} that go with a write.",
            next_step="put what is large into the tensor.",
        )


def write_first(slot: torch.Tensor, write: Write) -> None:
    """`slot = weight · tensor`, whatever was there."""
    flat = write.tensor.detach().reshape(-1)
    if write.weight == 1.0:
        copy_into(slot, flat)
    else:
        torch.mul(flat.to(slot.device), write.weight, out=slot)


def write_more(slot: torch.Tensor, write: Write) -> None:
    """`slot += weight · tensor`."""
    flat = write.tensor.detach().reshape(-1).to(slot.device)
    if slot.dtype.is_floating_point:
        slot.add_(flat, alpha=write.weight)
    else:
        slot.add_(flat)


def copy_out(snapshot: Snapshot, into: torch.Tensor, name: str) -> int:
    """Its version; TensorError when it does not fit."""
    source = snapshot.tensor
    if source.numel() != into.numel() or source.dtype != into.dtype:
        raise TensorError(
            f"{source.numel()} elements of {source.dtype}, published as {name!r} by rank {snapshot.rank}, do "
            f"not fit into {into.numel()} of {into.dtype}."
        )
    copy_into(into, source.view(into.shape))
    return snapshot.version
