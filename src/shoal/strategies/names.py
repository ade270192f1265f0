"""The strategies by name, without loading any: the command line starts without torch."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import UsageError

STRATEGIES = {
    "all-reduce": "shoal.strategies.all_reduce:GradientAllReduce",
    "ddp": "shoal.strategies.ddp:TorchDDP",
    "neighbor": "shoal.strategies.neighbor:NeighborAverage",
    "hierarchical": "shoal.strategies.hierarchical:HierarchicalAverage",
    "pair": "shoal.strategies.pair:PairAverage",
    "sma": "shoal.strategies.sma:SynchronousModelAverage",
    "local-sgd": "shoal.strategies.local_sgd:LocalSGD",
    "diloco": "shoal.strategies.diloco:DiLoCo",
    "push-sum": "shoal.strategies.push_sum:PushSum",
    "window": "shoal.strategies.window:WindowAverage",
    "parameter-server": "shoal.strategies.parameter_server:ParameterServer",
    "horovod": "shoal.strategies.horovod:HorovodAllReduce",
    "gradient-tracking": "shoal.strategies.gradient_tracking:GradientTracking",
    "exact-diffusion": "shoal.strategies.exact_diffusion:ExactDiffusion",
    "extra": "shoal.strategies.extra:Extra",
    "d2": "shoal.strategies.d2:D2",
    "momentum": "shoal.strategies.neighbor_momentum:NeighborMomentum",
    "choco": "shoal.strategies.choco:ChocoSGD",
    "sgp": "shoal.strategies.sgp:StochasticGradientPush",
    "relay": "shoal.strategies.relay:RelaySGD",
    "staleness-aware": "shoal.strategies.parameter_server:StalenessAwareSGD",
}

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient-allreduce": ("all-reduce", {}),
    "sync-sgd": ("all-reduce", {}),
    "distributed-data-parallel": ("ddp", {}),
    "allreduce": ("neighbor", {"topology": "full"}),
    "neighbor-allreduce": ("neighbor", {}),
    "hierarchical-neighbor-allreduce": ("hierarchical", {}),
    "async-sgd": ("pair", {}),
    "pair-averaging": ("pair", {}),
    "synchronous-averaging": ("sma", {}),
    "localsgd": ("local-sgd", {}),
    "post-local-sgd": ("local-sgd", {}),
    "streaming-diloco": ("diloco", {"fragments": 4, "overlap_steps": 5, "mixing": 0.5}),
    "win-put": ("window", {}),
    "pushsum": ("push-sum", {}),
    "gradient-push": ("sgp", {}),
    "stochastic-gradient-push": ("sgp", {}),
    "dsgt": ("gradient-tracking", {}),
    "nids": ("exact-diffusion", {}),
    "choco-sgd": ("choco", {}),
    "relaysgd": ("relay", {}),
    "relay-sum": ("relay", {}),
    "dmsgd": ("momentum", {}),
    "dsgd-momentum": ("momentum", {}),
    "dc-asgd": ("staleness-aware", {}),
    "ps": ("parameter-server", {}),
    "hvd": ("horovod", {}),
}
"""What other systems call them, and the options that go with the name. `allreduce` is BlueFog's, of
parameters."""


def resolve(name: str) -> tuple[str, dict[str, Any]]:
    """The canonical name, and options that the given one implies; hyphens and underscores are alike."""
    plain = name.strip().lower().replace("_", "-")
    if plain in STRATEGIES:
        return plain, {}
    if plain in ALIASES:
        strategy, options = ALIASES[plain]
        return strategy, dict(options)
    raise UsageError(f"there is no strategy {name!r}.", next_step=f"one of {', '.join(STRATEGIES)}.")


def canonical(name: str) -> str:
    """The strategy's own name."""
    return resolve(name)[0]
