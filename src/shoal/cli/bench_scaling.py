"""`shoal bench scaling`: its flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shoal.cli.bench_common import (
    Against,
    JsonFile,
    OneStart,
    Outputs,
    Quickly,
    ReportFile,
    Seed,
    run_and_tell,
    run_settings,
)
from shoal.cli.bench_hosts import launched_size, mates_of, where_of, with_hosts, workers_of
from shoal.cli.bench_trained import Device, NoCuda, StrategyOption, tell_slow_images, workers_device
from shoal.cli.flags import assignments, listed, numbers
from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.report import DEFAULT_FOLDER
from shoal.report.tables import emit, result_line, show

STRATEGIES = "neighbor,hierarchical,all-reduce"
MODELS = {"cpu": "resnet18", "cuda": "resnet50"}
"""On a CPU one step of the document's model takes minutes."""


@with_hosts(before="starts")
def scaling(
    context: typer.Context,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Beside 'none', where nothing is shared.", show_default=STRATEGIES
        ),
    ] = None,
    dist_optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="One strategy, by BlueFog's name for it, with one number of workers."
        ),
    ] = None,
    num_workers: Annotated[
        str | None,
        typer.Option(
            "--np", "-np", metavar="N,...", help="Numbers of workers.", show_default="1,2,4,... cores"
        ),
    ] = None,
    workers_per_machine: Annotated[
        int | None, typer.Option(min=1, help="Split this machine into several.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="What is trained, on synthetic images.", show_default="resnet50; resnet18 on a CPU"
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="The images' side.", show_default="the model's own"),
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=1, help="That the model tells apart.", show_default="the model's own")
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="N,...", help="Of each worker.")] = "32",
    num_warmup_batches: Annotated[
        int | None, typer.Option(min=0, help="That do not count.", show_default="10")
    ] = None,
    num_batches_per_iter: Annotated[
        int | None, typer.Option(min=1, help="Measured together.", show_default="10")
    ] = None,
    num_iters: Annotated[int | None, typer.Option(min=1, help="Measurements.", show_default="10")] = None,
    atc_style: Annotated[
        bool, typer.Option("--atc-style", help="Neighbours combine after the step, not while it is computed.")
    ] = False,
    disable_dynamic_topology: Annotated[
        bool,
        typer.Option("--disable-dynamic-topology", help="All neighbours in every round, not one in turn."),
    ] = False,
    option: StrategyOption = None,
    device: Device = "auto",
    no_cuda: NoCuda = False,
    profile: Annotated[
        str | None,
        typer.Option(help="Make links as slow as those of a network: a preset's name or a TOML file."),
    ] = None,
    between: Annotated[
        Literal["workers", "machines"] | None,
        typer.Option(help="Whose links the profile is of.", show_default="machines where there are several"),
    ] = None,
    profiler: Annotated[
        bool,
        typer.Option("--profiler", help=f"Trace one more iteration of rank 0 into {DEFAULT_FOLDER}/."),
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Extend what was measured to 1,024 workers by a cost model.")
    ] = False,
    predict_published: Annotated[
        bool,
        typer.Option(
            "--predict-published", help="Check the cost model by BlueFog's published figures, and no more."
        ),
    ] = False,
    starts: OneStart = 1,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Images a second from one worker to many, under each strategy: how near to linear it stays."""
    if predict_published:
        _tell_published()
        return
    from shoal.bench.scaling import ScalingConfig
    from shoal.bench.scaling_options import given_options
    from shoal.bench.scaling_summary import scaling_items, summarize_scaling
    from shoal.models import model_named

    chosen = contenders(strategies, dist_optimizer)
    counts, size = worker_counts(num_workers, context.params, is_single=dist_optimizer is not None)
    if between is not None and profile is None:
        raise UsageError(
            "--between says whose links a --profile is of, and there is none.", next_step="give both."
        )
    if profile is not None:
        from shoal.transport import Profile

        Profile.load(profile)  # complains before anything is started
    place = workers_device(context.params, size)
    mates = mates_of(context.params)
    has_machines = workers_per_machine is not None or (mates is not None and mates < counts[-1])
    entry = model_named(model or MODELS[place]).at(image_size, num_classes)
    if image_size is None:
        tell_slow_images(entry.image_side, place)
    config = ScalingConfig(
        model=entry.name,
        image_size=entry.image_side,
        num_classes=entry.num_classes,
        batch_sizes=tuple(dict.fromkeys(numbers("--batch-size", batch_size))),
        num_workers=counts,
        crew_size=size,
        workers_per_machine=workers_per_machine,
        workers_on_machine=mates,
        strategies=chosen,
        options=given_options(chosen, assignments(option)),
        is_dynamic=not disable_dynamic_topology,
        is_adapt_then_combine=atc_style,
        num_warmup_batches=(1 if short else 10) if num_warmup_batches is None else num_warmup_batches,
        num_batches_per_iter=num_batches_per_iter or (1 if short else 10),
        num_iters=num_iters or (3 if short else 10),
        device=place,
        profile=profile,
        between=between or ("machines" if has_machines else "workers"),
        trace_folder=str(Path(DEFAULT_FOLDER).absolute()) if profiler else None,
        should_predict=predict,
        seed=seed,
    )
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, scaling_items)
    where = where_of(context.params, size)
    run_and_tell("scaling", config, settings, summarize_scaling, outputs, against, where)


def contenders(strategies: str | None, dist_optimizer: str | None) -> tuple[str, ...]:
    """What is measured beside 'none'; UsageError where that is nothing, or nothing that there is."""
    from shoal.bench.contenders import beside_none

    if strategies is not None and dist_optimizer is not None:
        raise UsageError(
            "--dist-optimizer names one strategy, and --strategies several.", next_step="give one of both."
        )
    return beside_none(listed(dist_optimizer or strategies or STRATEGIES))


def worker_counts(
    text: str | None, flags: Mapping[str, Any], *, is_single: bool
) -> tuple[tuple[int, ...], int]:
    """The numbers of workers that are measured, and how many workers there are."""
    given = sorted(dict.fromkeys(numbers("--np", text))) if text is not None else []
    if text is not None and (not given or given[0] < 1):
        raise UsageError(f"--np {text} has no workers.", next_step="say --np 1,2,4.")
    launched = launched_size()
    if launched is not None:
        size = launched
    elif given:
        size = given[-1]
    else:
        size = workers_of(None, flags, 1 if is_single else max(2, num_cores()))
    if given:
        return tuple(given), size
    return ((size,) if is_single else doubling(size)), size


def doubling(last: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the last."""
    counts = [1]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys((*counts, last)))


def _tell_published() -> None:
    from shoal.bench.published import published_items, published_result

    show(published_items(), sys.stdout)
    emit(result_line(published_result()), sys.stdout)
