"""`shoal bench latency`: its flags, by the names of the document's scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.bench_common import (
    Against,
    JsonFile,
    OneStart,
    Outputs,
    ReportFile,
    Seed,
    run_and_tell,
    run_settings,
)
from shoal.cli.flags import listed
from shoal.cli.members import SecretFile
from shoal.core import UsageError
from shoal.report.tables import emit
from shoal.report.units import scale_for

_LONG_S = 600.0


def latency(
    context: typer.Context,
    block_type: Annotated[
        Literal["ffn", "transformer"], typer.Option(help="What each layer of the model is.")
    ] = "ffn",
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N ...",
            help="Devices, with --layers-per-gpu each; one GPU may be named twice. On a CPU: stages that "
            "share its cores.",
            show_default="all GPUs; 0 1 on a CPU",
        ),
    ] = None,
    hid_dim: Annotated[int, typer.Option(min=1, help="Width of a layer.")] = 1024,
    layers_per_gpu: Annotated[int, typer.Option(min=1, help="Layers of each device, or host.")] = 56,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 4,
    batches_for_latency: Annotated[int, typer.Option(min=1, help="After one that does not count.")] = 5,
    batches_for_throughput: Annotated[int, typer.Option(min=1, help="In a run, of each client.")] = 10,
    throughput_runs: Annotated[int, typer.Option(min=1, help="Measured after another.")] = 5,
    linspace_points: Annotated[int, typer.Option(min=1, help="Pings from 0 to --max-ping.")] = 10,
    max_ping: Annotated[float, typer.Option(min=0, help="The longest mean delay of a layer, seconds.")] = 0.2,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Clients of ours at once.")] = 64,
    client_processes: Annotated[
        int | None,
        typer.Option(min=1, help="That clients are spread over.", show_default="one for 4 cores"),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT ...",
            help="Servers of ours, by `shoal serve`; without any, one for each device is started.",
        ),
    ] = None,
    secret_file: SecretFile = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples that a server computes at once.",
            show_default="half of a device's share of all clients",
        ),
    ] = None,
    passes: Annotated[
        Literal["forward", "both"],
        typer.Option(help="Forward as the document, or also forward and backward together."),
    ] = "forward",
    methods: Annotated[
        str, typer.Option(metavar="NAME,...", help="What is measured, some of these.")
    ] = "fast,slow,ours",
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where layers are computed.", show_default="cuda where there is one"),
    ] = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Simulate it: delays take no time, and computing what is said.")
    ] = False,
    compute_ms: Annotated[
        float,
        typer.Option(min=0.001, help="--virtual: of one batch in one layer, forward."),
    ] = 10.0,
    increase_file_limit: Annotated[
        bool, typer.Option("--increase-file-limit", help="Allow as many open sockets as clients need.")
    ] = False,
    starts: OneStart = 1,
    seed: Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="N|HOST:PORT")] = None,
) -> None:
    """Throughput under latency: model parallelism without delays, with them, and expert servers.

    A model is a row of layers. 'fast' holds neighbouring layers on one device and waits for nothing; 'slow'
    waits after every layer, ping × Exp(1); 'ours' are expert servers, which many clients ask at once, each
    waiting as long after every layer. After Learning@home's throughput scripts; forward only, as they are.
    """
    from shoal.bench.latency import check_machine, config_of, latency_items, parsed_methods, summarize_latency

    given_gpus, given_hosts = _listed_values(gpus, hosts, more)
    config = config_of(
        {
            "block_type": block_type,
            "device": device,
            "gpus": given_gpus,
            "hid_dim": hid_dim,
            "layers_per_gpu": layers_per_gpu,
            "batch_size": batch_size,
            "batches_for_latency": batches_for_latency,
            "batches_for_throughput": batches_for_throughput,
            "throughput_runs": throughput_runs,
            "linspace_points": linspace_points,
            "max_ping_s": max_ping,
            "jobs": jobs,
            "client_processes": client_processes,
            "hosts": given_hosts,
            "secret_file": None if secret_file is None else str(Path(secret_file).absolute()),
            "max_batch_size": max_batch_size,
            "passes": ("forward",) if passes == "forward" else ("forward", "forward+backward"),
            "methods": parsed_methods(listed(methods)),
            "is_virtual": virtual,
            "compute_ms": compute_ms,
        }
    )
    if not virtual:
        if changed := check_machine(config, should_raise_limit=increase_file_limit):
            emit(changed, sys.stderr)
        _tell_waiting(config.waiting_s, [name for name in config.methods if name != "fast"])
    settings = run_settings(context, starts, seed)
    run_and_tell(
        "latency", config, settings, summarize_latency, Outputs(report, json_file, latency_items), against
    )


def _listed_values(
    gpus: list[str] | None, hosts: list[str] | None, more: list[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Devices and hosts: after one flag, after several, or between commas; `more` follows the first value."""
    numbers = [part for text in gpus or () for part in listed(text)]
    addresses = [part for text in hosts or () for part in listed(text)]
    for text in more or ():
        if gpus and text.isdecimal():
            numbers.append(text)
        elif hosts and ":" in text:
            addresses.append(text)
        else:
            raise UsageError(
                f"{text!r} belongs to no flag.",
                next_step="say --gpus 0 1 2 3, and --hosts HOST:PORT HOST:PORT.",
            )
    wrong = [number for number in numbers if not number.isdecimal()]
    if wrong:
        raise UsageError(f"--gpus {wrong[0]} is no device.", next_step="give numbers: --gpus 0 1 2 3.")
    return tuple(map(int, numbers)), tuple(addresses)


def _tell_waiting(waiting_s: float, methods: list[str]) -> None:
    """What the delays alone take; who would wait for hours is told how not to."""
    if not methods or not waiting_s:
        return
    took = scale_for("s", waiting_s)
    minutes = took.format(waiting_s) if waiting_s < _LONG_S else f"{waiting_s / 60:,.0f} minutes"
    line = f"The delays of {' and of '.join(methods)} take about {minutes}{' each' * (len(methods) > 1)}."
    if waiting_s >= _LONG_S:
        line += " --virtual takes none of it; fewer --linspace-points or --throughput-runs take less."
    emit(line, sys.stderr)
