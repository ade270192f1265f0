"""`shoal compare`: its flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from shoal.bench.contenders import NumServers, servers_of
from shoal.cli.bench_common import JsonFile, Outputs, Quickly, ReportFile, run_and_tell, run_settings
from shoal.cli.flags import assignments, listed, with_flags
from shoal.core import UsageError
from shoal.report import Report
from shoal.report.storage import write_atomically
from shoal.report.tables import emit
from shoal.report.views import Items

Task = Literal["quadratic", "digits", "mnist", "text"]
NUM_WORKERS, NUM_SEEDS = 8, 3
SHORT_WORKERS, SHORT_STEPS = 4, 60
IDEAL = "ideal"


@with_flags()
def compare(
    context: typer.Context,
    task: Annotated[Task, typer.Option(help="What is learned.")] = "digits",
    num_workers: Annotated[
        int | None,
        typer.Option("--workers", "--np", "-np", min=1, help="Workers.", show_default=str(NUM_WORKERS)),
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Who takes part; options may follow a name: 'neighbor topology=ring'. 'all' is every one "
            "but ddp and horovod; your own is package.module:Class.",
        ),
    ] = "all",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the --strategies that have it; may be given often."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Of the network: lan, wan, home, three-continents, a file, or 'ideal': links cost nothing.",
        ),
    ] = "lan",
    between: Annotated[
        Literal["workers", "machines"],
        typer.Option(
            help="Whose links the profile describes; with 'machines' those inside one cost nothing."
        ),
    ] = "workers",
    workers_per_machine: Annotated[
        int | None,
        typer.Option(min=1, help="For 'hierarchical', and --between.", show_default="4 of 8 workers or more"),
    ] = None,
    compute_ms: Annotated[
        str, typer.Option(metavar="MS|KIND:…", help="What a step costs a worker; also exponential:10.")
    ] = "10",
    stragglers: Annotated[
        str, typer.Option(metavar="RANK:FACTOR,...", help="Whose steps take so many times as long.")
    ] = "",
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What goes wrong, and when.", show_default=False)
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="After a loss the others go on in a smaller group, under every strategy. So it is in any "
            "case where --faults has workers join or leave.",
        ),
    ] = False,
    split: Annotated[
        str, typer.Option(help="How examples are divided: iid, dirichlet:CONCENTRATION.")
    ] = "iid",
    target: Annotated[
        float | None,
        typer.Option(
            "--target-accuracy",
            "--target",
            help="Seconds, bytes and steps are counted to it; of quadratic, a distance.",
            show_default="by task",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each.", show_default=str(NUM_SEEDS))
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of each worker.", show_default="by task")] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.", show_default="by task")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of each worker.", show_default="by task")
    ] = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,...",
            help="Each strategy tries them once, with a seed that is none of the contest's, and competes "
            "with its best.",
            show_default="4 rates by task",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--lr", "--learning-rate", help="The same for all, not tuned.", show_default=False),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of SGD.", show_default="by task")
    ] = None,
    num_servers: NumServers = None,
    executor: Annotated[
        Literal["auto", "exact", "stacked"],
        typer.Option(help="Each worker by itself, or all in one tensor, which some strategies cannot."),
    ] = "auto",
    real: Annotated[
        bool, typer.Option("--real", help="The contest with real processes on this machine; tuning is not.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Has the files of MNIST.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="The first; each further one adds 1.")] = 0,
    short: Quickly = False,
    latex: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the results as a LaTeX table too.", show_default=False),
    ] = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Every strategy at the same task, in the same world: by steps, by seconds, by bytes.

    In virtual time: worlds larger than this machine, and equal figures for equal seeds. The model, its
    initial weights, the division of the data, the batches and the number of steps are the same for all, and
    each has the same budget to choose its learning rate.
    """
    from shoal.bench.compare import (
        WORKERS_PER_MACHINE,
        CompareConfig,
        check_contest,
        compared,
        compute_of,
        notes_of,
        stragglers_of,
        without_servers,
    )
    from shoal.bench.compare_tables import compare_items, latex_of, summarize_compare
    from shoal.simulate.task_facts import facts_of
    from shoal.simulate.world import Compute, World
    from shoal.strategies.registry import find
    from shoal.transport import FaultScript, Profile

    if data_dir is not None and task != "mnist":
        raise UsageError(
            f"--data-dir has the files of MNIST, and {task} needs none.",
            next_step="leave it out, or say --task mnist.",
        )
    facts = facts_of(task)
    size = num_workers or (SHORT_WORKERS if short else NUM_WORKERS)
    named, common = listed(strategies), assignments(option)
    contenders = compared(named, common)
    notes = notes_of(named, common)
    has_machines = between == "machines" or any(
        find(contender.strategy)[0].needs_machines for contender in contenders
    )
    if workers_per_machine is None and size >= 2 * WORKERS_PER_MACHINE and has_machines:
        workers_per_machine = WORKERS_PER_MACHINE
        links = "as any others" if between == "workers" else "for nothing"
        notes.append(f"{workers_per_machine} workers make a machine; they reach each other {links}.")
    script = None if faults is None else FaultScript.load(faults)
    if elastic or (script is not None and script.changes_workers):
        contenders, left_out = without_servers(contenders, named)
        notes += left_out
    network = Profile() if profile == IDEAL else Profile.load(profile)
    if script is not None:
        script.check_names(network.places)
    world = World(
        num_workers=size,
        workers_per_machine=workers_per_machine,
        profile=network,
        between=between,
        compute=Compute(step_ms=compute_of(compute_ms), factors=stragglers_of(listed(stragglers))),
        faults=script,
        elastic=elastic,
        seed=seed,
    )
    steps = steps or (min(SHORT_STEPS, facts.steps) if short else facts.steps)
    num_seeds = seeds or (1 if short else NUM_SEEDS)
    config = CompareConfig(
        task=task,
        contenders=contenders,
        world=world,
        num_servers=servers_of(num_servers, (contender.strategy for contender in contenders)),
        split=split,
        seeds=tuple(range(seed, seed + num_seeds)),
        steps=steps,
        eval_every=eval_every or min(facts.eval_every, steps),
        batch_size=batch_size or facts.batch_size,
        momentum=facts.momentum if momentum is None else momentum,
        learning_rates=_rates(lr_grid, learning_rate, facts.learning_rates, is_short=short),
        target=_target(target, facts.target, is_share=facts.score == "accuracy"),
        executor=executor,
        is_real=real,
        data_dir=None if data_dir is None else str(data_dir.absolute()),
        notes=tuple(notes),
    )
    slow = check_contest(config)
    for note in slow:
        emit(note, sys.stderr)
    config = msgspec.structs.replace(config, notes=(*config.notes, *slow))

    def told(latest: Report) -> Items:
        items = compare_items(latest)
        if latex is not None:
            items.append(f"LaTeX: {write_atomically(latex, latex_of(latest).encode())}")
        return items

    outputs = Outputs(report, json_file, told)
    run_and_tell("compare", config, run_settings(context, 1, seed), summarize_compare, outputs)


def _rates(
    grid: str | None, single: float | None, usual: tuple[float, ...], *, is_short: bool
) -> tuple[float, ...]:
    if grid is not None and single is not None:
        raise UsageError("--lr is for all, --lr-grid to choose from.", next_step="leave one of them out.")
    if single is not None:
        return (single,)
    if grid is None:
        return usual[1:3] if is_short else usual
    try:
        return tuple(dict.fromkeys(float(text) for text in listed(grid)))
    except ValueError:
        raise UsageError(
            f"--lr-grid {grid} is no list of numbers.", next_step="say --lr-grid 0.05,0.1,0.2."
        ) from None


def _target(asked: float | None, usual: float, *, is_share: bool) -> float:
    target = usual if asked is None else asked
    if not 0 < target <= (1 if is_share else sys.float_info.max):
        raise UsageError(
            f"--target-accuracy {target:g} is no share of the examples."
            if is_share
            else f"--target {target:g} is no distance.",
            next_step="give a number up to 1, for example 0.95." if is_share else "give a number above 0.",
        )
    return target
