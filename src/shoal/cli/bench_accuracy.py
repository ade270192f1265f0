"""`shoal bench accuracy`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.bench_common import (
    Against,
    JsonFile,
    Outputs,
    Quickly,
    ReportFile,
    Seed,
    run_and_tell,
    run_settings,
)
from shoal.cli.bench_hosts import launched_size, where_of, with_hosts, workers_of
from shoal.cli.bench_trained import Device, NumServers, WorkersPerMachine, servers_of, workers_device
from shoal.cli.flags import assignments, listed
from shoal.core import UsageError

Task = Literal["digits", "mnist"]
Model = Literal["small-mlp", "small-cnn"]
Order = Literal["both", "adapt-then-combine", "adapt-while-combine"]
NUM_WORKERS, NUM_SEEDS = 8, 3
STEPS, SHORT_STEPS = {"digits": 300, "mnist": 600}, 120
NUM_EVALUATIONS = 10
SPLITS = "iid,dirichlet:0.1"


@with_hosts(before="seed")
def accuracy(
    context: typer.Context,
    task: Annotated[Task, typer.Option(help="What is learned.")] = "digits",
    model: Annotated[Model, typer.Option(help="By which network.")] = "small-mlp",
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="These instead of the tricks; options may follow a name: 'neighbor topology=ring'.",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the --strategies that have it; may be given often."),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option("--np", "-np", min=1, help="Workers, one thread each.", show_default=str(NUM_WORKERS)),
    ] = None,
    device: Device = "auto",
    splits: Annotated[
        str, typer.Option(metavar="SPLIT,...", help="How examples are divided: iid, dirichlet:CONCENTRATION.")
    ] = SPLITS,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", "--starts", min=1, help="Independent process starts.", show_default=str(NUM_SEEDS)
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of each worker.", show_default="300; 600 on mnist")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.", show_default="a tenth of --steps")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 16,
    learning_rate: Annotated[
        float, typer.Option("--lr", "--learning-rate", min=0, help="Of SGD, the same for all.")
    ] = 0.1,
    momentum: Annotated[float, typer.Option(min=0, max=1, help="Of SGD, the same for all.")] = 0.9,
    topology: Annotated[
        str | None,
        typer.Option(help="Who averages with whom, of neighbor.", show_default="one-peer-exponential"),
    ] = None,
    order: Annotated[
        Order, typer.Option(help="Average after the step, or while gradients are computed.")
    ] = "both",
    global_average_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps from one average of all to the next: of the trick 'average', or of the --strategies "
            "that have it.",
            show_default="16 for the trick",
        ),
    ] = None,
    target_accuracy: Annotated[float, typer.Option(help="Seconds and bytes are counted to it.")] = 0.95,
    workers_per_machine: WorkersPerMachine = None,
    num_servers: NumServers = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Has the files of MNIST.", show_default=False)
    ] = None,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """To which accuracy workers come under each strategy: over steps, seconds and bytes.

    Without --strategies: BlueFog's tricks. Neighbour averaging in both orders, each plain, with a smaller
    warm-up, a periodic global average, a faster decay, and all three; all-reduce as the reference.
    """
    from shoal.bench.accuracy import AccuracyConfig
    from shoal.bench.accuracy_contenders import (
        AVERAGE_EVERY,
        ORDERS,
        TrickSettings,
        strategy_contenders,
        trick_contenders,
    )
    from shoal.bench.accuracy_summary import accuracy_items, summarize_accuracy
    from shoal.data import mnist

    if data_dir is not None and task != "mnist":
        raise UsageError(
            f"--data-dir has the files of MNIST, and {task} needs none.",
            next_step="leave it out, or say --task mnist.",
        )
    size = workers_of(num_workers, context.params, default=NUM_WORKERS)
    steps = steps or (SHORT_STEPS if short else STEPS[task])
    orders = tuple(ORDERS.values()) if order == "both" else (order,)
    tricks = None
    if strategies is None:
        if option:
            raise UsageError("--option is for --strategies.", next_step="name some, or leave it out.")
        tricks = TrickSettings(
            steps,
            size,
            topology or "one-peer-exponential",
            orders,
            global_average_every or AVERAGE_EVERY,
            workers_per_machine,
        )
        contenders = trick_contenders(tricks)
    else:
        common = assignments(option)
        common |= {} if topology is None else {"topology": topology}
        common |= {} if order == "both" else {"order": order}
        if global_average_every is not None:
            common["global_average_every"] = str(global_average_every)
        contenders = strategy_contenders(listed(strategies), common)
    config = AccuracyConfig(
        task=task,
        model=model,
        contenders=contenders,
        splits=tuple(dict.fromkeys(listed(splits))),
        num_workers=size,
        device=workers_device(context.params, size),
        workers_per_machine=workers_per_machine,
        num_servers=servers_of(num_servers, (contender.strategy for contender in contenders)),
        steps=steps,
        eval_every=eval_every or max(1, steps // NUM_EVALUATIONS),
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=momentum,
        target_accuracy=target_accuracy,
        data_dir=None if data_dir is None else str(data_dir.absolute()),
        tricks=[] if tricks is None else tricks.legend(),
        seed=seed,
    )
    settings = run_settings(
        context, seeds or (1 if short or launched_size() is not None else NUM_SEEDS), seed
    )
    outputs = Outputs(report, json_file, accuracy_items)
    where = where_of(context.params, size)
    if task == "mnist" and where is None:
        # found or fetched once, before every worker looks for it
        for is_training in (True, False):
            mnist(train=is_training, folder=data_dir)
    run_and_tell("accuracy", config, settings, summarize_accuracy, outputs, against, where)
