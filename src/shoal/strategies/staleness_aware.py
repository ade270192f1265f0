"""`staleness-aware`: asynchronous SGD on parameter servers that makes allowance for how old gradients are.

The learning rate is divided by the number of updates that a gradient is behind (Zhang, Gupta, Lian and Liu
2016, "Staleness-aware async-SGD"), and the gradient is corrected for where the parameters have gone in the
meantime (DC-ASGD, Zheng et al. 2017, algorithm 2, with a constant lambda). Both are left to `server` and
`server_update`.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.strategies.options import StrategyOptions
from shoal.strategies.parameter_server import ParameterServer
from shoal.strategies.research_options import StalenessAwareOptions


class StalenessAwareSGD(ParameterServer):
    """`parameter-server` with `staleness_lr` and `delay_compensation` on; all that holds there holds here."""

    name = "staleness-aware"
    Options: ClassVar[type[StrategyOptions]] = StalenessAwareOptions
    options: StalenessAwareOptions
