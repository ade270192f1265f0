"""A few tensors in flat buckets, and their averages over the group, which outlive the loss of a member."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.group import Group, Handle
from shoal.tensors import Bucket, BucketLayout
from shoal.topology import Weights

PACK_BYTES = 64 * 2**20
"""Of one operation: few of them, and little memory beside the model."""


def start_mean(group: Group, tensor: torch.Tensor) -> Handle[torch.Tensor]:
    """In place, over the members that are there. Others' bits may differ: each sums in its own order."""
    others = [rank for rank in group.members if rank != group.rank]
    return group.exchange(tensor, Weights.uniform(others, others))


def start_copy(group: Group, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
    """In place, from `root`; who finds it gone keeps what it has, so that its loss ends nothing."""
    if group.rank != root:
        return group.exchange(tensor, Weights(0.0, {root: 1.0}, {}))
    others = [rank for rank in group.members if rank != root]
    return group.exchange(tensor, Weights(1.0, {}, dict.fromkeys(others, 1.0)))


def packed(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    """Copies of the tensors in a few buckets of private memory, each with the tensors that it copies.

    Complex ones as real ones with one dimension more. A bucket is filled when it is asked for.
    """
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for layout in BucketLayout.plan(tensors, max_bytes=PACK_BYTES):
        bucket = Bucket(layout)
        members = layout.pick(tensors)
        bucket.load(members)
        yield bucket, members
