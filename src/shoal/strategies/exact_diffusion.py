"""`exact-diffusion`: adapt, correct, combine; the limit is the optimum of all workers.

Yuan, Ying, Zhao, Sayed 2019, "Exact diffusion for distributed optimization and learning, part I",
algorithm 1. The same recursion with proximal steps is NIDS (Li, Shi, Yan 2019).
"""

from __future__ import annotations

from typing import ClassVar

from shoal.strategies.corrected import DiffusionStrategy
from shoal.strategies.exact_options import ExactDiffusionOptions
from shoal.strategies.fitting import lazier
from shoal.strategies.options import CommonOptions
from shoal.topology import Topology


class ExactDiffusion(DiffusionStrategy):
    """Adapt, correct, combine with (I + W)/2, which suits every static symmetric topology."""

    name = "exact-diffusion"
    Options: ClassVar[type[CommonOptions]] = ExactDiffusionOptions
    options: ExactDiffusionOptions

    def _make_topology(self) -> Topology:
        return lazier(super()._make_topology(), 0.5)
