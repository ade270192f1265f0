"""Flags of `shoal bench training`, by our names and by those that KungFu's users type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from shoal.core import UsageError

STRATEGIES = "all-reduce,neighbor,pair,sma,ddp"

Model = Annotated[
    str, typer.Option(metavar="NAME", help="What is trained, on synthetic data: mlp, resnet18, ResNet50, …")
]
ImageSize = Annotated[
    int | None,
    typer.Option(min=1, help="Side of the images.", show_default="the model's own"),
]
Strategies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Beside 'none' and 'ddp'; your own is package.module:Class.",
        show_default=STRATEGIES,
    ),
]
KungFu = Annotated[
    str | None,
    typer.Option(
        "--kungfu",
        "--kf-optimizer",
        metavar="NAME",
        help="One strategy alone, by KungFu's name: sync-sgd, async-sgd, sma, sync-sgd-nccl, "
        "sync-sgd-hierarchical-nccl.",
    ),
]
NoDdp = Annotated[bool, typer.Option("--no-ddp", help="Leave torch's own DDP out.")]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "--np",
        "-np",
        min=1,
        help="Workers, one thread each.",
        show_default="2, or as many as a launcher started",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Of each worker.", show_default="64 or 32, by model")
]
Fuse = Annotated[
    bool, typer.Option("--fuse", help="Accepted: what is sent is always one flat buffer, or few.")
]
NumWarmup = Annotated[
    int | None,
    typer.Option(
        "--num-warmup-batches",
        min=1,
        help="Iterations before anything is measured.",
        show_default="3, 10 by hand",
    ),
]
Pairs = Annotated[
    int | None,
    typer.Option(
        "--pairs",
        "--num-iters",
        min=1,
        help="Blocks of each strategy beside 'none'; by hand: iterations of a worker.",
        show_default="10, 3000 by hand",
    ),
]
BlockSeconds = Annotated[float | None, typer.Option(min=0.01, help="Length of a block.", show_default="1")]
Iterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="In a block, where workers wait for each other; by hand: the same as --num-iters.",
        show_default="by length",
    ),
]
NumBatches = Annotated[
    int | None,
    typer.Option(
        "--num-batches-per-iter", min=1, help="The same as --iterations, of a block.", show_default=False
    ),
]
SlowWorker = Annotated[
    str | None,
    typer.Option(
        metavar="RANK:FACTOR", help="This worker's iterations take so many times as long; it sleeps in them."
    ),
]
PsHosts = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,…", help="Started by hand: the parameter servers; all meet at the first."
    ),
]
WorkerHosts = Annotated[
    str | None, typer.Option(metavar="HOST:PORT,…", help="Started by hand: the workers; ports are not used.")
]
JobName = Annotated[
    Literal["ps", "worker"] | None, typer.Option(help="Started by hand: what this process is.")
]
TaskIndex = Annotated[int, typer.Option(min=0, help="Started by hand: which one of them.")]


def slow_worker(text: str) -> tuple[int, float]:
    """Rank and factor of `RANK:FACTOR`."""
    rank, _, factor = text.partition(":")
    try:
        slow = int(rank), float(factor)
    except ValueError:
        raise UsageError(
            f"--slow-worker {text} names no worker and factor.", next_step="say --slow-worker 1:10."
        ) from None
    if not slow[1] >= 1:
        raise UsageError(f"--slow-worker {text} is not slower.", next_step="give a factor of 1 or more.")
    return slow


BY_HAND = (
    *("model", "image_size", "strategies", "option", "batch_size", "device", "no_cuda", "fuse", "num_warmup"),
    *("pairs", "iterations", "slow_worker", "ps_hosts", "worker_hosts", "job_name", "task_index", "seed"),
    *("network_interface", "report", "json_file"),
)
"""What means something to a process that is started by hand."""
_OF_WORKERS = ("report", "json_file")


def check_by_hand(given: Mapping[str, str], *, is_server: bool) -> None:
    """UsageError for a flag that means nothing by hand; `given` has flags as typed, by parameter."""
    for name, flag in given.items():
        if name not in BY_HAND:
            raise UsageError(
                f"{flag} means nothing to a process that is started by hand, which --job-name is for.",
                next_step="leave one of them out.",
            )
        if is_server and name in _OF_WORKERS:
            raise UsageError(
                f"A server measures nothing that {flag} could hold.", next_step="give it to the workers."
            )


def one_of(values: Mapping[str, int | None]) -> int | None:
    """What was given of several flags for the same; None for none, and UsageError for more than one."""
    told = {flag: value for flag, value in values.items() if value is not None}
    if len(told) > 1:
        raise UsageError(
            f"{' and '.join(told)} are the same here.", next_step="leave all but one of them out."
        )
    return next(iter(told.values()), None)
