"""Shoal trains one PyTorch model on many machines, and measures every way of doing so in the same terms.

The names below are loaded when they are first used: importing the package opens nothing, starts nothing and
does not import torch. What is needed more rarely is in the rooms: `shoal.strategies` has all strategies,
`shoal.transport` what moves bytes, and so on.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from shoal._version import __version__

if TYPE_CHECKING:
    from shoal import data, models, strategies, topology
    from shoal.bench.comparison import compare
    from shoal.core import Address, PeerId, ShoalError
    from shoal.core.identity import Identity
    from shoal.data import shard
    from shoal.dht import DHT, connect
    from shoal.experts import (
        Expert,
        ExpertClient,
        ExpertServer,
        MixtureOfExperts,
        RemoteExpert,
        SwitchMixtureOfExperts,
    )
    from shoal.group import Faulty, Group, Metered, Shaped, init
    from shoal.report import Report, read_report
    from shoal.simulate.world import World
    from shoal.strategies import (
        DiLoCo,
        GradientAllReduce,
        LocalSGD,
        NeighborAverage,
        PairAverage,
        ParameterServer,
        Strategy,
        SwarmTraining,
        SynchronousModelAverage,
        TorchDDP,
        from_args,
    )
    from shoal.tensors import Codec, ErrorFeedback
    from shoal.topology import Topology
    from shoal.transport import Membership, Profile, SwarmSecret

_HOMES = {
    "Address": "shoal.core",
    "Codec": "shoal.tensors",
    "DHT": "shoal.dht",
    "DiLoCo": "shoal.strategies",
    "ErrorFeedback": "shoal.tensors",
    "Expert": "shoal.experts",
    "ExpertClient": "shoal.experts",
    "ExpertServer": "shoal.experts",
    "Faulty": "shoal.group",
    "GradientAllReduce": "shoal.strategies",
    "Group": "shoal.group",
    "Identity": "shoal.core.identity",
    "LocalSGD": "shoal.strategies",
    "Membership": "shoal.transport",
    "Metered": "shoal.group",
    "MixtureOfExperts": "shoal.experts",
    "NeighborAverage": "shoal.strategies",
    "PairAverage": "shoal.strategies",
    "ParameterServer": "shoal.strategies",
    "PeerId": "shoal.core",
    "Profile": "shoal.transport",
    "RemoteExpert": "shoal.experts",
    "Report": "shoal.report",
    "Shaped": "shoal.group",
    "ShoalError": "shoal.core",
    "Strategy": "shoal.strategies",
    "SwarmSecret": "shoal.transport",
    "SwarmTraining": "shoal.strategies",
    "SwitchMixtureOfExperts": "shoal.experts",
    "SynchronousModelAverage": "shoal.strategies",
    "Topology": "shoal.topology",
    "TorchDDP": "shoal.strategies",
    "World": "shoal.simulate.world",
    "compare": "shoal.bench.comparison",
    "connect": "shoal.dht",
    "data": "shoal",
    "from_args": "shoal.strategies",
    "init": "shoal.group",
    "models": "shoal",
    "read_report": "shoal.report",
    "shard": "shoal.data",
    "strategies": "shoal",
    "topology": "shoal",
}
"""The public names, and the room that each comes from."""

_MOVED = {
    "AdaptiveDeadline": "shoal.core",
    "Bucket": "shoal.tensors",
    "ChocoSGD": "shoal.strategies",
    "D2": "shoal.strategies",
    "Deadline": "shoal.core",
    "Diff": "shoal.report",
    "Endpoint": "shoal.transport",
    "ExactDiffusion": "shoal.strategies",
    "Extra": "shoal.strategies",
    "GradientTracking": "shoal.strategies",
    "Head": "shoal.transport",
    "HierarchicalAverage": "shoal.strategies",
    "HorovodAllReduce": "shoal.strategies",
    "Key": "shoal.core",
    "Limits": "shoal.transport",
    "LoopThread": "shoal.core",
    "NeighborMomentum": "shoal.strategies",
    "Peer": "shoal.core",
    "Placement": "shoal.core",
    "PushSum": "shoal.strategies",
    "RelaySGD": "shoal.strategies",
    "Reply": "shoal.transport",
    "StalenessAwareSGD": "shoal.strategies",
    "StochasticGradientPush": "shoal.strategies",
    "StreamTransport": "shoal.transport",
    "Transport": "shoal.transport",
    "Weights": "shoal.topology",
    "WindowAverage": "shoal.strategies",
}
"""Names that were public here, and are now in their rooms alone: here they warn, and still work."""

__all__ = [
    "DHT",
    "Address",
    "Codec",
    "DiLoCo",
    "ErrorFeedback",
    "Expert",
    "ExpertClient",
    "ExpertServer",
    "Faulty",
    "GradientAllReduce",
    "Group",
    "Identity",
    "LocalSGD",
    "Membership",
    "Metered",
    "MixtureOfExperts",
    "NeighborAverage",
    "PairAverage",
    "ParameterServer",
    "PeerId",
    "Profile",
    "RemoteExpert",
    "Report",
    "Shaped",
    "ShoalError",
    "Strategy",
    "SwarmSecret",
    "SwarmTraining",
    "SwitchMixtureOfExperts",
    "SynchronousModelAverage",
    "Topology",
    "TorchDDP",
    "World",
    "__version__",
    "compare",
    "connect",
    "data",
    "from_args",
    "init",
    "models",
    "read_report",
    "shard",
    "strategies",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        home = _MOVED[name]
        warnings.warn(
            f"shoal.{name} is now {home}.{name}; the short name goes in a later version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(home), name)
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    home = _HOMES[name]
    value = (
        importlib.import_module(f"shoal.{name}")
        if home == __name__
        else getattr(importlib.import_module(home), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
