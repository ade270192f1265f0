"""What each expert does for a batch, and how what they give is put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoal.core import ShoalError
from shoal.experts.client import Forwarded
from shoal.experts.last_call import ExpertCall
from shoal.experts.names import ExpertAddress


class Share:
    """What one expert does for the batch."""

    def __init__(self, expert: ExpertAddress, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self.expert = expert
        self.rows = rows
        """Which samples, on the CPU."""
        self.positions = positions
        """The same in [batch * k]."""
        self.call = ExpertCall(str(expert.uid), expert.peer, len(rows))
        self.inputs: list[torch.Tensor] = []
        self.forwarded: Forwarded | None = None
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] | None = None
        self.error: ShoalError | None = None
        self.is_left_behind = False
        """Whether the error is only that its answer was not needed any more."""
        self.is_unlike = False
        """Whether the expert takes or gives something else than the others."""


def sum_by_sample(
    shares: Sequence[Share],
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of what these experts gave for their samples, the sum for each sample of a batch with [batch, k] slots.

    By weights of the slots, where there are some; sums in float32 at least.
    """
    batch_size, k = shape
    sample = tensors[0][:1]
    dtype = torch.promote_types(sample.dtype, torch.float32)
    positions = torch.cat([share.positions for share in shares])
    slots = torch.full((batch_size * k,), len(positions))
    slots[positions] = torch.arange(len(positions))
    rows = torch.cat([*tensors, torch.zeros_like(sample)]).to(dtype)  # the last row is for empty slots
    total = nn.functional.embedding_bag(
        slots.view(batch_size, k).to(rows.device),
        rows.view(len(rows), -1),
        mode="sum",
        per_sample_weights=None if weights is None else weights.to(dtype),
    )
    return total.view(batch_size, *sample.shape[1:]).to(sample.dtype)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN and no infinity in it; one pass unless there may be."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
