"""What the benchmarks that train share: flags, and what is trained on which device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.core import UsageError

if TYPE_CHECKING:
    from shoal.models import ModelEntry

CPU_SIDE = 32
"""Of images on a CPU, unless it is said otherwise: an iteration of 224×224 ones takes many seconds there."""
_DRIVER_ANSWER_S = 30.0

DeviceKind = Literal["cpu", "cuda"]
Device = Annotated[
    DeviceKind | None, typer.Option(help="What workers compute on.", show_default="cuda where there is one")
]
NoCuda = Annotated[bool, typer.Option("--no-cuda", help="The same as --device cpu.")]
StrategyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Of the strategies that have it; may be given often."),
]
WorkersPerMachine = Annotated[
    int | None, typer.Option(min=1, help="Split this machine into several, for 'hierarchical'.")
]
NumServers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes beside the workers, for 'parameter-server' and 'staleness-aware'.",
        show_default="1",
    ),
]


def device_of(asked: DeviceKind | None, *, no_cuda: bool = False, is_here: bool = True) -> DeviceKind:
    """The one that was asked for, or GPUs where there are any.

    UsageError for GPUs that this machine does not have, where workers run on it.
    """
    from shoal.bench.experts_config import default_device

    if no_cuda and asked == "cuda":
        raise UsageError("--no-cuda and --device cuda contradict.", next_step="leave one of them out.")
    if no_cuda or asked == "cpu":
        return "cpu"
    has_gpu = default_device() == "cuda"
    if asked == "cuda" and is_here and not has_gpu:
        raise UsageError(
            "There is no GPU for --device cuda.",
            cause="torch is a build without CUDA, or the driver tells of no GPU.",
            next_step="use --device cpu, or see what `shoal doctor` says.",
        )
    return "cuda" if has_gpu or asked == "cuda" else "cpu"


def servers_of(asked: int | None, strategies: Iterable[str]) -> int:
    """As many as was asked for, or one; UsageError where no strategy has any."""
    from shoal.bench.contenders import needs_servers

    if asked is not None and not any(map(needs_servers, strategies)):
        raise UsageError(
            "--num-servers is of parameter-server and staleness-aware, which are not measured here.",
            next_step="leave it out, or name one of them among --strategies.",
        )
    return asked or 1


def num_gpus() -> int:
    """On this machine."""
    from shoal.bench.machine import gpus

    return len(gpus(_DRIVER_ANSWER_S).found)


def entry_of(
    model: str, image_size: int | None, device: DeviceKind, num_classes: int | None = None
) -> ModelEntry:
    """The model for images of its own side, on a CPU at most CPU_SIDE, unless another one was asked for."""
    from shoal.models import model_named

    entry = model_named(model)
    usual = entry.image_side if device == "cuda" else min(entry.image_side, CPU_SIDE)
    return entry.at(image_size or usual, num_classes)
