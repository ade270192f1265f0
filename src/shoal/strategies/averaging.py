"""Averages over a group of tensors that are packed together, of buffers, and of tensors that travel encoded.

Averages outlive the loss of a member. Encoded ones are gathered by everybody and decoded in rank order, so
that all members get equal bits; what a codec loses is left to `ErrorFeedback`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from shoal.group import Group, Handle
from shoal.group.functions import Continued, start_copy, start_mean
from shoal.tensors import local_part
from shoal.tensors.buckets import packed, packed_on_devices
from shoal.tensors.codecs import Codec, ErrorFeedback, codec_from_name, decode
from shoal.tensors.codecs.formats import from_bytes, to_bytes


def average(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    """Makes tensors of the same shapes and dtypes on all members their means over them. Collective."""
    with torch.no_grad():
        for bucket, members in packed_on_devices(tensors):
            start_mean(group, bucket.flat).wait()
            bucket.store(members)


def mean_over(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gives copies, averaged over the members, whose shapes and dtypes are the same. Collective."""
    means = [tensor.clone() for tensor in tensors]
    average(group, means)
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


def average_buffers(group: Group, model: nn.Module) -> None:
    """Makes every floating-point buffer the mean over the group; counters stay one's own. Collective."""
    average(group, [buffer for buffer in model.buffers() if has_mean(buffer)])


def copy_buffers(group: Group, model: nn.Module) -> None:
    """Makes every buffer that of rank 0, if that is there; whole numbers ride in float64. Collective."""
    buffers = list(model.buffers())
    with torch.no_grad():
        carriers = [buffer if has_mean(buffer) else buffer.double() for buffer in buffers]
        for bucket, members in packed_on_devices(carriers):
            start_copy(group, bucket.flat).wait()
            bucket.store(members)
        for buffer, carrier in zip(buffers, carriers, strict=True):
            if carrier is not buffer:
                buffer.copy_(carrier)


def consensus_distance(group: Group, parameters: Sequence[torch.Tensor]) -> float:
    """sqrt(mean over members i of ‖x_i − x̄‖²), all parameters as one vector. Collective."""
    squared = torch.zeros(1, dtype=torch.float64)
    for bucket, members in packed([parameter.detach() for parameter in parameters]):
        start_mean(group, bucket.flat).wait()
        for mean, own in zip(bucket.views, members, strict=True):
            squared += torch.linalg.vector_norm(local_part(own).cpu() - mean, dtype=torch.float64) ** 2
    start_mean(group, squared).wait()
    return math.sqrt(squared.item())


def make_codec(name: str, rank: int, *, has_feedback: bool = True) -> Codec | None:
    """Makes the codec of this name, with error feedback if it should have it; None for 'none'."""
    if name.strip().lower() == "none":
        return None
    codec = codec_from_name(name)
    codec.reseed(rank)  # so that errors of stochastic rounding cancel in a mean over the workers
    return ErrorFeedback(codec) if has_feedback else codec


def start_coded_mean(group: Group, tensor: torch.Tensor, codec: Codec, slot: str) -> Handle[torch.Tensor]:
    """Starts an encoded mean in place, of equal bits on all; `slot` names it to the codec. Collective."""

    def finish(parts: list[torch.Tensor]) -> torch.Tensor:
        size_bytes = tensor.numel() * tensor.element_size()
        tensor.copy_(decode(from_bytes(parts[0]), size_bytes))
        for part in parts[1:]:
            tensor.add_(decode(from_bytes(part), size_bytes))
        return tensor.mul_(1 / len(parts))

    return Continued(group.all_gather(to_bytes(codec.encode(tensor, slot))), finish)
