"""A run that peers train together, join and leave at any moment: committed states, rounds, commits, forks."""

from shoal.swarm.blocking import BlockingSwarmRun, finder
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.membership import SwarmSettings
from shoal.swarm.optimizers import CommittedAdam, CommittedOptimizer, CommittedSGD, optimizer_named
from shoal.swarm.run import SwarmRun
from shoal.swarm.state import CommittedState
from shoal.swarm.wire import Commit, SwarmMember

__all__ = [
    "BlockingSwarmRun",
    "Commit",
    "CommittedAdam",
    "CommittedOptimizer",
    "CommittedSGD",
    "CommittedState",
    "SampleLedger",
    "SwarmMember",
    "SwarmRun",
    "SwarmSettings",
    "finder",
    "optimizer_named",
]
