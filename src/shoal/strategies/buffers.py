"""Buffers of a model (BatchNorm's statistics) between the members of a group.

A group mixes floating-point tensors; whole numbers and booleans ride in float64, which holds them exactly.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.group import Group
from shoal.strategies.averaging import packed, start_copy, start_mean


def average_buffers(group: Group, model: nn.Module) -> None:
    """Every floating-point buffer becomes the mean over the group; counters stay one's own. Collective."""
    with torch.no_grad():
        for bucket, members in packed([buffer for buffer in model.buffers() if _is_mixable(buffer)]):
            start_mean(group, bucket.flat).wait()
            bucket.store(members)


def copy_buffers(group: Group, model: nn.Module, root: int = 0) -> None:
    """Every buffer becomes that of `root`, as long as it is there. Collective."""
    buffers = list(model.buffers())
    with torch.no_grad():
        carriers = [buffer if _is_mixable(buffer) else buffer.double() for buffer in buffers]
        for bucket, members in packed(carriers):
            start_copy(group, bucket.flat, root).wait()
            bucket.store(members)
        for buffer, carrier in zip(buffers, carriers, strict=True):
            if carrier is not buffer:
                buffer.copy_(carrier)


def _is_mixable(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
