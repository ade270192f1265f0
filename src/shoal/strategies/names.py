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
    "gradient-push": ("push-sum", {}),
    "stochastic-gradient-push": ("push-sum", {}),
    "sgp": ("push-sum", {}),
    "ps": ("parameter-server", {}),
    "hvd": ("horovod", {}),
}
"""What other systems call them, and the options that go with the name. `allreduce` is BlueFog's, of
parameters."""

LATER = (
    "gradient-tracking",
    "d2",
    "exact-diffusion",
    "choco",
)


def resolve(name: str) -> tuple[str, dict[str, Any]]:
    """The canonical name, and options that the given one implies; hyphens and underscores are alike."""
    plain = name.strip().lower().replace("_", "-")
    if plain in STRATEGIES:
        return plain, {}
    if plain in ALIASES:
        strategy, options = ALIASES[plain]
        return strategy, dict(options)
    if plain in LATER:
        raise UsageError(
            f"the strategy {name!r} is not there yet.", next_step=f"one of {', '.join(STRATEGIES)}."
        )
    raise UsageError(f"there is no strategy {name!r}.", next_step=f"one of {', '.join(STRATEGIES)}.")


def canonical(name: str) -> str:
    """The strategy's own name."""
    return resolve(name)[0]
