"""`shoal bench ddp`: its flags, which are those of PyTorch's DDP benchmark and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.bench_common import Against, OneStart, Outputs, ReportFile, Seed, run_and_tell, run_settings
from shoal.cli.bench_hosts import is_on_hosts, where_of, with_hosts, workers_of
from shoal.cli.bench_trained import (
    Device,
    device_of,
    has_shared_gpus,
    num_gpus,
    tell_sharing,
    tell_slow_images,
)
from shoal.cli.flags import assignments, listed
from shoal.core import UsageError

if TYPE_CHECKING:
    from shoal.bench.ddp import DdpConfig

DEFAULT_WORKERS = 2
_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


@with_hosts(before="starts")
def ddp(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="What is trained.",
            show_default="the document's four on GPUs, resnet18 else",
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="In the place of torch's DDP: any of `shoal run --help`.")
    ] = "ddp",
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the strategy; may be given often.")
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option("--np", "-np", min=1, help="Workers at most.", show_default="the GPUs, or 2 on the CPU"),
    ] = None,
    workers_per_machine: Annotated[
        int | None, typer.Option(min=1, help="Count one machine as several of so many workers.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 32,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="The side of the images.", show_default="the models' own")
    ] = None,
    num_warmup: Annotated[int, typer.Option(min=0, help="Iterations before those that count.")] = 5,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured iterations of each rank.")] = 10,
    bucket_size: Annotated[
        int | None, typer.Option(min=1, help="Of gradients, in MB.", show_default="25")
    ] = None,
    distributed_backend: Annotated[
        Literal["nccl", "gloo"] | None,
        typer.Option(
            help="Of the measured groups.", show_default="for ddp: nccl with a GPU for each worker, else gloo"
        ),
    ] = None,
    device: Device = "auto",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Processes, of which this is one: started by hand, one a rank.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of this process.", show_default="RANK")] = None,
    master_addr: Annotated[str | None, typer.Option(metavar="HOST", help="Where rank 0 runs.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="PORT", help="Where they meet there.")
    ] = None,
    starts: OneStart = 1,
    seed: Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write PyTorch's own JSON of the run; - is stdout."),
    ] = None,
) -> None:
    """The sweep of PyTorch's DDP benchmark: no wrapper, then 1, 2, 4, ... workers, then whole machines."""
    from shoal.bench.ddp_summary import ddp_items, encode_ddp, summarize_ddp

    take_part(context.params)
    config = config_of(context.params)
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, ddp_items, encode_ddp)
    where = where_of(context.params, config.num_workers)
    run_and_tell("ddp", config, settings, summarize_ddp, outputs, against, where)


def take_part(flags: Mapping[str, Any]) -> None:
    """Place this process as the flags say, in the variables that a launcher would have set."""
    if flags["world_size"] is None:
        alone = [name for name in ("rank", "master_addr", "master_port") if flags[name] is not None]
        if alone:
            raise UsageError(
                f"--{alone[0].replace('_', '-')} says nothing without --world-size.",
                next_step="give both, or neither: workers are started by themselves then.",
            )
        return
    told = {name: str(flags[flag]) for flag, name in _VARIABLES.items() if flags[flag] is not None}
    missing = [flag for flag, name in _VARIABLES.items() if name not in told and name not in os.environ]
    if missing and flags["world_size"] > 1:
        names = " and ".join(f"--{flag.replace('_', '-')}" for flag in missing)
        raise UsageError(
            f"One process of {flags['world_size']} cannot find the others without {names}.",
            next_step="start one for each rank: shoal bench ddp --world-size 2 --rank 0 --master-addr HOST "
            "--master-port 29500.",
        )
    os.environ.update({"RANK": "0", **told} if flags["world_size"] == 1 else told)


def config_of(flags: Mapping[str, Any]) -> DdpConfig:
    """What the flags say, and the document's defaults on this device."""
    from shoal.bench.contenders import is_ddp
    from shoal.bench.ddp import DOCUMENT_MODELS, Backend, DdpConfig, bucket_size_of, options_of
    from shoal.models import model_named

    device = device_of(flags["device"], is_here=not is_on_hosts(flags))
    is_gpu = device == "cuda"
    num_here = num_gpus() if is_gpu else 0
    size = workers_of(flags["num_workers"], flags, flags["world_size"] or num_here or DEFAULT_WORKERS)
    is_shared = is_gpu and has_shared_gpus(flags, size)
    if is_shared:
        tell_sharing(size)
    if is_shared and flags["distributed_backend"] == "nccl":
        raise UsageError(
            "NCCL refuses workers that share a GPU.",
            next_step=f"take --np {num_here} or fewer, or --distributed-backend gloo.",
        )
    models = listed(flags["model"]) if flags["model"] else DOCUMENT_MODELS if is_gpu else ("resnet18",)
    image_size = flags["image_size"] or max(model_named(name).image_side for name in models)
    if flags["image_size"] is None:
        tell_slow_images(image_size, device)
    named = tuple(dict.fromkeys(model_named(name).at(image_side=image_size).name for name in models))
    strategy = "ddp" if is_ddp(flags["strategy"]) else flags["strategy"]
    bucket_size = bucket_size_of(strategy, flags["bucket_size"])
    usual: Backend = "shoal"
    if strategy == "ddp":
        usual = "nccl" if is_gpu and not is_shared else "gloo"
    return DdpConfig(
        models=named,
        batch_size=flags["batch_size"],
        image_size=image_size,
        num_warmup=flags["num_warmup"],
        num_iters=flags["num_iters"],
        bucket_size=bucket_size,
        distributed_backend=flags["distributed_backend"] or usual,
        strategy=strategy,
        options=options_of(strategy, assignments(flags["option"]), bucket_size),
        num_workers=size,
        workers_per_machine=flags["workers_per_machine"],
        device=device,
        seed=flags["seed"],
    )
