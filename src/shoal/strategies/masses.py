"""The one model of workers that count by a mass each: the mean over the masses, not over the workers.

For the push-sum strategies, asynchronous (`push_sum`) and synchronous (`sgp`).
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.group import Group
from shoal.strategies.replicas import mean_over


def mass_factor(group: Group, mass: float) -> float:
    """By which this worker counts in a mean over the members. Collective."""
    masses = group.share(mass)
    return float(mass * len(masses) / sum(masses))


def mean_over_masses(group: Group, model: nn.Module, mass: float) -> dict[str, torch.Tensor]:
    """Of each trainable parameter, by its names in the model's `state_dict`. Collective."""
    factor = mass_factor(group, mass)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    means = mean_over(group, [parameters[name].detach() * factor for name in names])
    return dict(zip(names, means, strict=True))
