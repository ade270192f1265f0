"""What the members' models come to as one: the model that is written down for the whole group."""

from __future__ import annotations

import torch
from torch import nn

from shoal.group import Group
from shoal.strategies.averaging import mean_over


def common_model(group: Group, model: nn.Module, *, are_equal: bool) -> dict[str, torch.Tensor]:
    """The tensors of the model's `state_dict`, each a mean over the members if it may differ. Collective.

    Where replicas `are_equal`, only buffers differ. Whole numbers are this worker's own.
    """
    tensors = own_model(model)
    if len(group.members) == 1:
        return tensors
    parameters = dict(model.named_parameters(remove_duplicate=False)) if are_equal else {}
    names = [
        name
        for name, tensor in tensors.items()
        if name not in parameters and (tensor.is_floating_point() or tensor.is_complex())
    ]
    means = mean_over(group, [tensors[name] for name in names])
    return {**tensors, **dict(zip(names, means, strict=True))}


def own_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model's `state_dict`, as this worker has them."""
    state = model.state_dict()
    return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
