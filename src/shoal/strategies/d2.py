"""`d2`: decentralised training over decentralised data (Tang, Lian, Yan, Zhang, Liu 2018, algorithm 1)."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import UsageError
from shoal.strategies.corrected import DiffusionStrategy
from shoal.strategies.exact_options import D2Options
from shoal.strategies.fitting import lazier, smallest_eigenvalue
from shoal.strategies.options import CommonOptions
from shoal.topology import Topology

_LIMIT = -1 / 3
_AIM = -1 / 4
"""Of the smallest eigenvalue, when it is chosen: near −1/3 a disagreement takes long to die out."""


class D2(DiffusionStrategy):
    """`x ← W(2x − x' − lr·(g − g'))`; the smallest eigenvalue of W is above −1/3.

    With (I + W)/2 for W it is exact diffusion; W itself mixes faster where it fits.
    """

    name = "d2"
    Options: ClassVar[type[CommonOptions]] = D2Options
    options: D2Options

    def _make_topology(self) -> Topology:
        topology = super()._make_topology()
        smallest = smallest_eigenvalue(topology)
        laziness = self.options.laziness
        least = max(0.0, (_AIM - smallest) / (1 - smallest)) if smallest < _AIM else 0.0
        if laziness is None:
            return lazier(topology, least)
        if laziness + (1 - laziness) * smallest <= _LIMIT + 1e-9:
            raise UsageError(
                f"d2 needs eigenvalues above −1/3; the smallest of '{topology.name}' with laziness "
                f"{laziness:g} is {laziness + (1 - laziness) * smallest:.3f}.",
                next_step=f"take laziness={least:.2g} or leave it out; full, star and odd rings need none.",
            )
        return lazier(topology, laziness)
