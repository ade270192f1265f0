"""Whether a contest can be held as it was asked for: found out before anything runs, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.bench.accuracy_contenders import Contender
from shoal.bench.compare import MAX_EXACT, Try, suited
from shoal.bench.compare_settings import CompareConfig
from shoal.core import UsageError
from shoal.simulate.exact import run_exact
from shoal.simulate.stacked import refuse_unfit
from shoal.simulate.tasks import make_task
from shoal.simulate.world import World
from shoal.strategies.registry import find
from shoal.tensors.codecs import codec_from_name
from shoal.topology import make_topology, make_topology_on

MAX_THREADS = 256
"""Workers up to which each may have a thread of its own."""
_NO_CODEC = "none"


def check_contest(config: CompareConfig) -> list[str]:
    """UsageError for what no run could do; else what will be slow, in sentences.

    The task's data is found, or fetched, on the way.
    """
    for contender in config.contenders:
        _check_options(contender, config.world)
    slow = _check_executors(config)
    make_task(Try(config.contenders[0], config.learning_rates[0], config.seeds[0]).job(config))
    if config.world.faults is not None:
        _check_faults(config.world)
    return slow


def _check_options(contender: Contender, world: World) -> None:
    """That what options name is there."""
    topology, codec = contender.options.get("topology"), contender.options.get("codec", _NO_CODEC)
    try:
        if topology is not None and find(contender.strategy)[0].needs_machines:
            make_topology(topology, world.num_machines)
        elif topology is not None:
            make_topology_on(topology, world.num_workers, world.num_machines)
        if codec != _NO_CODEC:
            codec_from_name(codec)
    except UsageError as error:
        raise UsageError(
            f"{contender.name}: {error.what}", cause=error.cause, next_step=error.next_step
        ) from error


def _check_executors(config: CompareConfig) -> list[str]:
    threaded = []
    for contender in config.contenders:
        tried = Try(contender, config.learning_rates[0], config.seeds[0])
        job, world = tried.job(config), config.world_of(contender, tried.seed)
        if config.executor == "stacked":
            refuse_unfit(job, world)
        elif config.executor == "exact" or suited(job, world) == "exact":
            threaded.append(contender.name)
    size = config.world.num_workers
    if not threaded or size <= MAX_EXACT:
        return []
    if size > MAX_THREADS:
        raise UsageError(
            f"{size} workers are too many to have a thread each, as {_named(threaded, config)} would need.",
            cause="only strategies that mix linearly and in lockstep, without faults, run in one tensor.",
            next_step=f"{_instead(threaded, config)}, or give --workers {MAX_THREADS} or fewer.",
        )
    return [f"Slow with {size} workers, each in a thread of its own: {_named(threaded, config)}."]


def _named(threaded: Sequence[str], config: CompareConfig) -> str:
    return "every strategy" if len(threaded) == len(config.contenders) > 1 else ", ".join(threaded)


def _instead(threaded: Sequence[str], config: CompareConfig) -> str:
    if config.executor == "exact":
        return "leave --executor exact out"
    if config.world.faults is not None:
        return "leave --faults out"
    return f"leave {', '.join(threaded)} out of --strategies"


def _check_faults(world: World) -> None:
    """That its script concerns workers that there are, and what can happen to them."""
    for outcome in run_exact(world, lambda _: None):
        if isinstance(outcome.error, UsageError):
            raise outcome.error
