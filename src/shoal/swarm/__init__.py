"""A run that peers train together, join and leave at any moment: committed states, rounds, commits, forks."""

# Names are loaded when they are first used: `shoal.swarm.facts`, which a monitor reads, needs no torch.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.swarm.blocking import BlockingSwarmRun, finder
    from shoal.swarm.ledger import SampleLedger
    from shoal.swarm.membership import SwarmSettings
    from shoal.swarm.optimizers import (
        CommittedAdam,
        CommittedOptimizer,
        CommittedSGD,
        OptimizerPart,
        PartitionedOptimizer,
        optimizer_named,
    )
    from shoal.swarm.run import SwarmRun
    from shoal.swarm.state import CommittedState
    from shoal.swarm.wire import Commit, SwarmMember

_HOMES = {
    "BlockingSwarmRun": "blocking",
    "Commit": "wire",
    "CommittedAdam": "optimizers",
    "CommittedOptimizer": "optimizers",
    "CommittedSGD": "optimizers",
    "CommittedState": "state",
    "OptimizerPart": "optimizers",
    "PartitionedOptimizer": "optimizers",
    "SampleLedger": "ledger",
    "SwarmMember": "wire",
    "SwarmRun": "run",
    "SwarmSettings": "membership",
    "finder": "blocking",
    "optimizer_named": "optimizers",
}

__all__ = [
    "BlockingSwarmRun",
    "Commit",
    "CommittedAdam",
    "CommittedOptimizer",
    "CommittedSGD",
    "CommittedState",
    "OptimizerPart",
    "PartitionedOptimizer",
    "SampleLedger",
    "SwarmMember",
    "SwarmRun",
    "SwarmSettings",
    "finder",
    "optimizer_named",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.swarm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.swarm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
