"""A contest of strategies as it is asked for: from flags, or from Python by `shoal.compare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import NumServers, check_data_dir, servers_of
from shoal.bench.frame import BenchmarkPlan, ContestRunFlags, RunSettings, announce, run_benchmark
from shoal.core import UsageError
from shoal.core.run_options import flag
from shoal.report import Report
from shoal.report.storage import write_atomically
from shoal.report.views import Items

if TYPE_CHECKING:
    from shoal.bench.compare import CompareConfig

NUM_WORKERS, NUM_SEEDS = 8, 3
SHORT_WORKERS, SHORT_STEPS = 4, 60
IDEAL = "ideal"


class CompareFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal compare`."""

    task: Annotated[
        str,
        flag(
            "What is learned: quadratic, digits, mnist, text, or a function of your own that gives a model "
            "and examples, as file.py:NAME.",
            metavar="NAME",
        ),
    ] = "digits"
    num_workers: Annotated[
        int | None, flag("Workers.", "--workers", "--np", "-np", ge=1, shown=str(NUM_WORKERS))
    ] = None
    strategies: Annotated[
        tuple[str, ...],
        flag(
            "Who takes part; options may follow a name: 'neighbor topology=ring'. 'all' is every one but ddp "
            "and horovod; your own is package.module:Class.",
            metavar="NAME,...",
        ),
    ] = ("all",)
    option: Annotated[
        dict[str, str], flag("Of the --strategies that have it; may be given often.", metavar="NAME=VALUE")
    ] = {}
    profile: Annotated[
        str,
        flag(
            "Of the network: lan, wan, home, three-continents, a file, or 'ideal': links cost nothing.",
            metavar="NAME|FILE",
        ),
    ] = "lan"
    between: Annotated[
        Literal["workers", "machines"],
        flag("Whose links the profile describes; with 'machines' those inside one cost nothing."),
    ] = "workers"
    workers_per_machine: Annotated[
        int | None, flag("For 'hierarchical', and --between.", ge=1, shown="4 of 8 workers or more")
    ] = None
    compute_ms: Annotated[
        str, flag("What a step costs a worker; also exponential:10.", metavar="MS|KIND:…")
    ] = "10"
    stragglers: Annotated[
        tuple[str, ...], flag("Whose steps take so many times as long.", metavar="RANK:FACTOR,...")
    ] = ()
    faults: Annotated[Path | None, flag("What goes wrong, and when.", metavar="FILE", shown=False)] = None
    elastic: Annotated[
        bool,
        flag(
            "After a loss the others go on in a smaller group, under every strategy. So it is in any case "
            "where --faults has workers join or leave."
        ),
    ] = False
    split: Annotated[str, flag("How examples are divided: iid, dirichlet:CONCENTRATION.")] = "iid"
    target: Annotated[
        float | None,
        flag(
            "Seconds, bytes and steps are counted to it; of quadratic, a distance.",
            "--target-accuracy",
            "--target",
            shown="by task",
        ),
    ] = None
    seeds: Annotated[int | None, flag("Runs of each.", ge=1, shown=str(NUM_SEEDS))] = None
    steps: Annotated[int | None, flag("Of each worker.", ge=1, shown="by task")] = None
    eval_every: Annotated[int | None, flag("Steps between evaluations.", ge=1, shown="by task")] = None
    batch_size: Annotated[int | None, flag("Of each worker.", ge=1, shown="by task")] = None
    lr_grid: Annotated[
        str | None,
        flag(
            "Each strategy tries them once, with a seed that is none of the contest's, and competes with its "
            "best.",
            metavar="RATE,...",
            shown="4 rates by task",
        ),
    ] = None
    learning_rate: Annotated[
        float | None, flag("The same for all, not tuned.", "--lr", "--learning-rate", shown=False)
    ] = None
    momentum: Annotated[float | None, flag("Of SGD.", ge=0, le=1, shown="by task")] = None
    num_servers: NumServers = None
    executor: Annotated[
        Literal["auto", "exact", "stacked"],
        flag("Each worker by itself, or all in one tensor, which some strategies cannot."),
    ] = "auto"
    real: Annotated[bool, flag("The contest with real processes on this machine; tuning is not.")] = False
    data_dir: Annotated[Path | None, flag("Has the files of MNIST.", metavar="DIR", shown=False)] = None
    latex: Annotated[
        Path | None, flag("Write the results as a LaTeX table too.", metavar="FILE", shown=False)
    ] = None


class CompareRunFlags(ContestRunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark; a contest is one start with several seeds."""

    seed: Annotated[int, flag("The first; each further one adds 1.")] = 0


def compare_command(flags: CompareFlags, run: CompareRunFlags) -> BenchmarkPlan:
    """Every strategy at the same task, in the same world: by steps, by seconds, by bytes.

    In virtual time: worlds larger than this machine, and equal figures for equal seeds. The model, its
    initial weights, the division of the data, the batches and the number of steps are the same for all, and
    each has the same budget to choose its learning rate.
    """
    from shoal.bench.compare import check_contest
    from shoal.bench.tables.compare import compare_items, latex_of, summarize_compare

    config = contest_of(flags, run.seed, is_short=run.short)
    slow = check_contest(config)
    for note in slow:
        announce(note)

    def told(latest: Report) -> Items:
        items = compare_items(latest)
        if flags.latex is not None:
            items.append(f"LaTeX: {write_atomically(flags.latex, latex_of(latest).encode())}")
        return items

    config = msgspec.structs.replace(config, notes=(*config.notes, *slow))
    return BenchmarkPlan(config, run, summarize_compare, told)


def compare(
    strategies: Sequence[str] = ("all",),
    *,
    task: str = "digits",
    num_workers: int = NUM_WORKERS,
    profile: str = "lan",
    split: str = "iid",
    seeds: int = NUM_SEEDS,
    seed: int = 0,
    more: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Has strategies learn the same task in the same simulated network, as `shoal compare` does.

    `task` is quadratic, digits, mnist, text, or a function of your own, as `file.py:function`
    (docs/compare.md).
    `seeds` counts the runs of each strategy, `seed` is the first of them. `more` has any other flag of `shoal
    compare` by the name of its field in `CompareFlags`; `tell` hears how far it is. Returns the report:
    `to_pandas()` and `figure()` show its figures, `result["headline"]` what they say. Takes seconds to
    minutes, in processes of its own. UsageError for what cannot be compared.
    """
    from shoal.bench.compare import check_contest
    from shoal.bench.tables.compare import summarize_compare

    common = {"task": task, "num_workers": num_workers, "profile": profile, "split": split, "seeds": seeds}
    flags = CompareFlags(strategies=tuple(strategies), **{**common, **(more or {})})
    config = contest_of(flags, seed)
    check_contest(config)
    settings = RunSettings(1, seed, ("shoal.compare",))
    (report,) = run_benchmark("compare", msgspec.to_builtins(config), settings, tell=tell)
    return msgspec.structs.replace(report, result=summarize_compare(report))


def contest_of(flags: CompareFlags, seed: int, *, is_short: bool = False) -> CompareConfig:
    """The whole configuration, with what was left open filled in. UsageError for flags that contradict."""
    from shoal.bench.compare import (
        WORKERS_PER_MACHINE,
        CompareConfig,
        compared,
        compute_of,
        notes_of,
        stragglers_of,
    )
    from shoal.simulate.task_facts import facts_of
    from shoal.simulate.world import Compute, World
    from shoal.strategies.registry import find
    from shoal.transport import FaultScript, Profile

    check_data_dir(flags.data_dir, flags.task)
    facts = facts_of(flags.task)
    size = flags.num_workers or (SHORT_WORKERS if is_short else NUM_WORKERS)
    named, common = flags.strategies, flags.option
    contenders = compared(named, common)
    notes = notes_of(named, common)
    has_machines = flags.between == "machines" or any(
        find(contender.strategy)[0].needs_machines for contender in contenders
    )
    workers_per_machine = flags.workers_per_machine
    if workers_per_machine is None and size >= 2 * WORKERS_PER_MACHINE and has_machines:
        workers_per_machine = WORKERS_PER_MACHINE
        links = "as any others" if flags.between == "workers" else "for nothing"
        notes.append(f"{workers_per_machine} workers make a machine; they reach each other {links}.")
    if is_short:
        notes.append("A short look: few steps, rates and seeds. Leave --short out for figures to keep.")
    script = None if flags.faults is None else FaultScript.load(flags.faults)
    network = Profile() if flags.profile == IDEAL else Profile.load(flags.profile)
    if script is not None:
        script.check_names(network.places)
    world = World(
        num_workers=size,
        workers_per_machine=workers_per_machine,
        profile=network,
        between=flags.between,
        compute=Compute(step_ms=compute_of(flags.compute_ms), factors=stragglers_of(flags.stragglers)),
        faults=script,
        elastic=flags.elastic,
        seed=seed,
    )
    steps = flags.steps or (min(SHORT_STEPS, facts.steps) if is_short else facts.steps)
    num_seeds = flags.seeds or (1 if is_short else NUM_SEEDS)
    return CompareConfig(
        task=flags.task,
        contenders=contenders,
        world=world,
        num_servers=servers_of(flags.num_servers, (contender.strategy for contender in contenders)),
        split=flags.split,
        seeds=tuple(range(seed, seed + num_seeds)),
        steps=steps,
        eval_every=flags.eval_every or min(facts.eval_every, steps),
        batch_size=flags.batch_size or facts.batch_size,
        momentum=facts.momentum if flags.momentum is None else flags.momentum,
        learning_rates=_rates(flags, facts.learning_rates, is_short=is_short),
        target=_target(flags.target, facts.target, is_share=facts.score == "accuracy"),
        executor=flags.executor,
        is_real=flags.real,
        data_dir=None if flags.data_dir is None else str(flags.data_dir.absolute()),
        notes=tuple(notes),
    )


def _rates(flags: CompareFlags, usual: tuple[float, ...], *, is_short: bool) -> tuple[float, ...]:
    grid, single = flags.lr_grid, flags.learning_rate
    if grid is not None and single is not None:
        raise UsageError("--lr is for all, --lr-grid to choose from.", next_step="leave one of them out.")
    if single is not None:
        return (single,)
    if grid is None:
        return usual[1:3] if is_short else usual
    try:
        return tuple(dict.fromkeys(float(text) for text in grid.split(",") if text.strip()))
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
