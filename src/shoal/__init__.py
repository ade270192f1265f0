"""Shoal trains one PyTorch model on many machines, and measures every way of doing so in the same terms.

The names below are loaded when they are first used: importing the package opens nothing, starts nothing and
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal._version import __version__

_HOMES = {
    "AdaptiveDeadline": "shoal.core",
    "Address": "shoal.core",
    "Bucket": "shoal.tensors",
    "ChocoSGD": "shoal.strategies",
    "Codec": "shoal.tensors",
    "D2": "shoal.strategies",
    "DHT": "shoal.dht",
    "Deadline": "shoal.core",
    "DiLoCo": "shoal.strategies",
    "Diff": "shoal.report",
    "Endpoint": "shoal.transport",
    "ErrorFeedback": "shoal.tensors",
    "ExactDiffusion": "shoal.strategies",
    "Expert": "shoal.experts",
    "ExpertClient": "shoal.experts",
    "ExpertServer": "shoal.experts",
    "Extra": "shoal.strategies",
    "Faulty": "shoal.group",
    "GradientAllReduce": "shoal.strategies",
    "GradientTracking": "shoal.strategies",
    "Group": "shoal.group",
    "Head": "shoal.transport",
    "HierarchicalAverage": "shoal.strategies",
    "HorovodAllReduce": "shoal.strategies",
    "Identity": "shoal.core.identity",
    "Key": "shoal.core",
    "Limits": "shoal.transport",
    "LocalSGD": "shoal.strategies",
    "LoopThread": "shoal.core",
    "Membership": "shoal.transport",
    "Metered": "shoal.group",
    "MixtureOfExperts": "shoal.experts",
    "NeighborAverage": "shoal.strategies",
    "NeighborMomentum": "shoal.strategies",
    "PairAverage": "shoal.strategies",
    "ParameterServer": "shoal.strategies",
    "Peer": "shoal.core",
    "PeerId": "shoal.core",
    "Placement": "shoal.core",
    "Profile": "shoal.transport",
    "PushSum": "shoal.strategies",
    "RelaySGD": "shoal.strategies",
    "RemoteExpert": "shoal.experts",
    "Reply": "shoal.transport",
    "Report": "shoal.report",
    "Shaped": "shoal.group",
    "ShoalError": "shoal.core",
    "StalenessAwareSGD": "shoal.strategies",
    "StochasticGradientPush": "shoal.strategies",
    "Strategy": "shoal.strategies",
    "StreamTransport": "shoal.transport",
    "SwarmSecret": "shoal.transport",
    "SwitchMixtureOfExperts": "shoal.experts",
    "SynchronousModelAverage": "shoal.strategies",
    "Topology": "shoal.topology",
    "TorchDDP": "shoal.strategies",
    "Transport": "shoal.transport",
    "Weights": "shoal.topology",
    "WindowAverage": "shoal.strategies",
    "World": "shoal.simulate.world",
    "connect": "shoal.dht",
    "data": "shoal",
    "from_args": "shoal.strategies",
    "init": "shoal.group",
    "models": "shoal",
    "shard": "shoal.data",
    "topology": "shoal",
}

if TYPE_CHECKING:
    from shoal import data, models, topology
    from shoal.core import (
        AdaptiveDeadline,
        Address,
        Deadline,
        Key,
        LoopThread,
        Peer,
        PeerId,
        Placement,
        ShoalError,
    )
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
    from shoal.report import Diff, Report
    from shoal.simulate.world import World
    from shoal.strategies import (
        D2,
        ChocoSGD,
        DiLoCo,
        ExactDiffusion,
        Extra,
        GradientAllReduce,
        GradientTracking,
        HierarchicalAverage,
        HorovodAllReduce,
        LocalSGD,
        NeighborAverage,
        NeighborMomentum,
        PairAverage,
        ParameterServer,
        PushSum,
        RelaySGD,
        StalenessAwareSGD,
        StochasticGradientPush,
        Strategy,
        SynchronousModelAverage,
        TorchDDP,
        WindowAverage,
        from_args,
    )
    from shoal.tensors import Bucket, Codec, ErrorFeedback
    from shoal.topology import Topology, Weights
    from shoal.transport import (
        Endpoint,
        Head,
        Limits,
        Membership,
        Profile,
        Reply,
        StreamTransport,
        SwarmSecret,
        Transport,
    )

__all__ = [
    "D2",
    "DHT",
    "AdaptiveDeadline",
    "Address",
    "Bucket",
    "ChocoSGD",
    "Codec",
    "Deadline",
    "DiLoCo",
    "Diff",
    "Endpoint",
    "ErrorFeedback",
    "ExactDiffusion",
    "Expert",
    "ExpertClient",
    "ExpertServer",
    "Extra",
    "Faulty",
    "GradientAllReduce",
    "GradientTracking",
    "Group",
    "Head",
    "HierarchicalAverage",
    "HorovodAllReduce",
    "Identity",
    "Key",
    "Limits",
    "LocalSGD",
    "LoopThread",
    "Membership",
    "Metered",
    "MixtureOfExperts",
    "NeighborAverage",
    "NeighborMomentum",
    "PairAverage",
    "ParameterServer",
    "Peer",
    "PeerId",
    "Placement",
    "Profile",
    "PushSum",
    "RelaySGD",
    "RemoteExpert",
    "Reply",
    "Report",
    "Shaped",
    "ShoalError",
    "StalenessAwareSGD",
    "StochasticGradientPush",
    "Strategy",
    "StreamTransport",
    "SwarmSecret",
    "SwitchMixtureOfExperts",
    "SynchronousModelAverage",
    "Topology",
    "TorchDDP",
    "Transport",
    "Weights",
    "WindowAverage",
    "World",
    "__version__",
    "connect",
    "data",
    "from_args",
    "init",
    "models",
    "shard",
    "topology",
]


def __getattr__(name: str) -> Any:
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
    return sorted({*globals(), *__all__})
