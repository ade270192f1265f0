"""A few tensors in flat buckets, and their averages over the group, which outlive the loss of a member.

Also what the members' models come to as one: the model that is written down for the whole group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

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


def mean_over(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies, averaged over the members, whose shapes and dtypes are the same. Collective."""
    means = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        for bucket, members in packed(means):
            start_mean(group, bucket.flat).wait()
            bucket.store(members)
    return means


def common_model(group: Group, model: nn.Module, *, are_equal: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model's `state_dict`, each a mean over the members if it may differ.

    Where replicas `are_equal`, only buffers differ. Whole numbers are this worker's own. Collective.
    """
    tensors = own_model(model)
    if len(group.members) == 1:
        return tensors
    parameters = dict(model.named_parameters(remove_duplicate=False)) if are_equal else {}
    names = [name for name, tensor in tensors.items() if name not in parameters and has_mean(tensor)]
    means = mean_over(group, [tensors[name] for name in names])
    return {**tensors, **dict(zip(names, means, strict=True))}


def own_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model's `state_dict`, as this worker has them."""
    state = model.state_dict()
    return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def has_mean(tensor: torch.Tensor) -> bool:
    """Says whether tensors of this type can be averaged; whole numbers cannot."""
    return tensor.is_floating_point() or tensor.is_complex()
