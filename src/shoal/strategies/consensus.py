"""How far the members of a group are from agreeing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.group import Group
from shoal.strategies.averaging import packed, start_mean


def consensus_distance(group: Group, parameters: Sequence[torch.Tensor]) -> float:
    """sqrt(mean over members i of ‖x_i − x̄‖²), all parameters as one vector. Collective."""
    squared = torch.zeros(1, dtype=torch.float64)
    for bucket, members in packed([parameter.detach() for parameter in parameters]):
        start_mean(group, bucket.flat).wait()
        for mean, own in zip(bucket.views, members, strict=True):
            squared += torch.linalg.vector_norm(own.cpu() - mean, dtype=torch.float64) ** 2
    start_mean(group, squared).wait()
    return math.sqrt(squared.item())
