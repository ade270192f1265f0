"""What the benchmarks that train share: flags, and what is trained on which device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import typer

from shoal.cli.bench_hosts import is_on_hosts, launched_size
from shoal.cli.flags import listed
from shoal.core import UsageError
from shoal.core.placement import Placement
from shoal.report.tables import emit

_QUICK_SIDE = 32
"""Larger images than this take a CPU many times as long."""
_DRIVER_ANSWER_S = 30.0

DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
Device = Annotated[DeviceChoice, typer.Option(help="Where workers compute; auto: on a GPU, if there is one.")]
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


def device_of(asked: DeviceChoice, *, no_cuda: bool = False, is_here: bool = True) -> DeviceKind:
    """The one that was asked for; `auto` takes GPUs where this machine has any.

    UsageError for GPUs that this machine does not have, where workers run on it.
    """
    from shoal.doctor.machine import default_device

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


def workers_device(flags: Mapping[str, Any], num_workers: int) -> DeviceKind:
    """Where the workers of a command compute, by its flags for devices and hosts.

    That they share GPUs is told. UsageError as `device_of`.
    """
    no_cuda = flags.get("no_cuda", False)
    device = device_of(flags["device"], no_cuda=no_cuda, is_here=not is_on_hosts(flags))
    if device == "cuda" and has_shared_gpus(flags, num_workers):
        tell_sharing(num_workers)
    return device


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
    """That this process and its children may use on this machine."""
    from shoal.doctor.machine import gpus

    num_found = len(gpus(_DRIVER_ANSWER_S).found)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return num_found if visible is None else min(num_found, len(listed(visible)))


def has_shared_gpus(flags: Mapping[str, Any], num_workers: int) -> bool:
    """Whether there are more workers than GPUs on this machine; other machines' are not known."""
    if is_on_hosts(flags):
        return False
    workers_here = num_workers if launched_size() is None else Placement.from_environment().local_size
    return workers_here > num_gpus()


def tell_sharing(num_workers: int) -> None:
    """That workers share the GPUs of this machine; the user of a launcher knows."""
    if launched_size() is None:
        num_here = num_gpus()
        emit(f"{num_workers} workers share {num_here} GPU{'s' * (num_here != 1)}.", sys.stderr)


def tell_slow_images(side: int, device: DeviceKind) -> None:
    """That large images take a CPU long: their size is changed by a flag alone."""
    if device == "cpu" and side > _QUICK_SIDE:
        emit(f"Images of {side}×{side} take a CPU long; --image-size {_QUICK_SIDE} is quicker.", sys.stderr)
