"""Wrong bits on purpose."""

from __future__ import annotations

import torch

from shoal.group.base import Snapshot
from shoal.transport.conditions.distributions import Draws


def damage(tensor: torch.Tensor, draws: Draws) -> None:
    """Turn one bit of one element over, in place."""
    if not tensor.numel():
        return
    rest = int(draws.uniform() * tensor.numel())
    place = []
    for extent in reversed(tensor.shape):
        rest, index = divmod(rest, extent)
        place.append(index)
    bit = int(draws.uniform() * 8 * tensor.element_size())
    with torch.no_grad():
        element = tensor[tuple(reversed(place))]
        raw = element.reshape(1).view(torch.uint8).clone()
        raw[bit // 8] ^= 1 << bit % 8
        element.copy_(raw.view(tensor.dtype)[0])


def damage_snapshot(snapshot: Snapshot, draws: Draws) -> Snapshot:
    """A copy with a wrong bit: the publisher's own memory stays as it is."""
    return _DamagedSnapshot(snapshot, draws)


class _DamagedSnapshot(Snapshot):
    def __init__(self, inner: Snapshot, draws: Draws) -> None:
        self.rank = inner.rank
        self.version = inner.version
        self.tensor = inner.tensor.clone()
        self._inner = inner
        damage(self.tensor, draws)

    def is_intact(self) -> bool:
        """As the one that was copied."""
        return self._inner.is_intact()
