"""`shoal bench training`: its flags."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from shoal.cli.bench_common import (
    Against,
    JsonFile,
    OneStart,
    Outputs,
    Quickly,
    ReportFile,
    Seed,
    assignments,
    listed,
    run_and_tell,
    run_settings,
)
from shoal.core import UsageError
from shoal.strategies.names import resolve

Model = Literal["mlp", "resnet18", "small-mlp", "small-cnn"]
STRATEGIES = "all-reduce,neighbor,pair,sma,ddp"


def training(
    context: typer.Context,
    model: Annotated[Model, typer.Option(help="What is trained, on synthetic data.")] = "mlp",
    strategies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Beside 'none' and 'ddp'.", show_default=STRATEGIES),
    ] = None,
    no_ddp: Annotated[bool, typer.Option("--no-ddp", help="Leave torch's own DDP out.")] = False,
    num_workers: Annotated[int, typer.Option("--np", "-np", min=1, help="Workers, one thread each.")] = 2,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the strategies that have it; may be given often."),
    ] = None,
    workers_per_machine: Annotated[
        int | None, typer.Option(min=1, help="Split this machine into several, for 'hierarchical'.")
    ] = None,
    num_servers: Annotated[
        int, typer.Option(min=1, help="Processes beside the workers, for 'parameter-server'.")
    ] = 1,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of each worker.", show_default="64 or 32, by model")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Blocks of each strategy beside 'none'.", show_default="10")
    ] = None,
    block_seconds: Annotated[
        float | None, typer.Option(min=0.01, help="Length of a block.", show_default="1")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="In a block, where workers wait for each other.", show_default="by length"),
    ] = None,
    slow_rank: Annotated[
        int | None, typer.Option(min=0, help="This worker sleeps in every iteration.")
    ] = None,
    slow_factor: Annotated[
        float, typer.Option(min=1, help="How many times as long its iterations take.")
    ] = 10.0,
    starts: OneStart = 1,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Training under each strategy, beside workers that share nothing: what sharing costs."""
    from shoal.bench.training import DEFAULT_STRATEGIES, TrainingConfig, options_of
    from shoal.bench.training_summary import summarize_training, training_items
    from shoal.models import MODELS

    named = tuple(listed(strategies)) if strategies is not None else DEFAULT_STRATEGIES
    if strategies is None and workers_per_machine is not None:
        named = (*named, "hierarchical")
    chosen = contenders(named, with_ddp=not no_ddp)
    config = TrainingConfig(
        model=model,
        batch_size=batch_size or MODELS[model].batch_size,
        strategies=chosen,
        options=options_of(chosen, assignments(option or [])),
        num_workers=num_workers,
        workers_per_machine=workers_per_machine,
        num_servers=num_servers,
        num_pairs=pairs or (3 if short else 10),
        block_s=block_seconds or (0.3 if short else 1.0),
        iterations=iterations,
        slow_rank=slow_rank,
        slow_factor=slow_factor,
        seed=seed,
    )
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, training_items)
    run_and_tell("training", config, settings, summarize_training, outputs, against)


def contenders(named: tuple[str, ...], *, with_ddp: bool) -> tuple[str, ...]:
    """What is measured beside 'none': each that was named once, and the baseline in the same run."""
    chosen = [name for name in dict.fromkeys(named) if name != "none"]
    is_ddp = [resolve(name)[0] == "ddp" for name in chosen]
    if not with_ddp:
        chosen = [name for name, is_one in zip(chosen, is_ddp, strict=True) if not is_one]
    if not chosen:
        raise UsageError(
            "There is no strategy to measure beside 'none'.",
            next_step="name one, for example --strategies all-reduce.",
        )
    return tuple(chosen) if any(is_ddp) or not with_ddp else (*chosen, "ddp")
