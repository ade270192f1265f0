"""`shoal bench`: run a benchmark, save its report, print its figures.

Long because every benchmark has its command here; what they do is the room `bench`'s.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from shoal.bench.against import source_of
from shoal.bench.frame import RunSettings, Version, run_benchmark
from shoal.bench.progress import show_progress
from shoal.cli import dht_flags as flags
from shoal.cli import experts_flags
from shoal.core import UsageError
from shoal.report import DEFAULT_FOLDER, Report, compare, default_path, save
from shoal.report.storage import write_atomically
from shoal.report.tables import emit, result_line, show
from shoal.report.views import Items, diff_items, report_items
from shoal.strategies.names import resolve

app = typer.Typer(
    help="Measure; every benchmark saves a report.", no_args_is_help=True, rich_markup_mode=None
)

NUM_STARTS = 5
Starts = Annotated[
    int | None,
    typer.Option(help="Independent process starts; 5 or more to compare.", show_default=str(NUM_STARTS)),
]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Measured blocks of each kind in a start.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Of the first start; each further one adds 1.")]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help=f"Where to save; by default under {DEFAULT_FOLDER}/."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the report's JSON there too; - is stdout."),
]
Against = Annotated[
    str | None,
    typer.Option(metavar="REF", help="A git revision or checkout to take turns with and compare to."),
]


Short = Annotated[bool, typer.Option("--short", help="Quickly, and one start unless told otherwise.")]
OneStart = Annotated[int, typer.Option(help="Independent process starts; 5 or more to compare.")]
Quickly = Annotated[bool, typer.Option("--short", help="Quickly: a first look, not figures to keep.")]
CallKind = Literal["datagram", "stream"]
Model = Literal["mlp", "resnet18", "small-mlp", "small-cnn"]
SIZES = "4KB,64KB,1MB,25MB,100MB"
STRATEGIES = "all-reduce,neighbor,pair,sma,ddp"


@app.command()
def transport(
    context: typer.Context,
    starts: Starts = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    short: Short = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Echoes between two processes, by streams, TLS and sealed datagrams, beside bare sockets."""
    from shoal.bench.transport import SHORT, TransportConfig, summarize_transport

    config = SHORT if short else TransportConfig()
    if repeats is not None:
        config = msgspec.structs.replace(config, repeats=repeats)
    if starts is None:
        starts = 1 if short else NUM_STARTS
    settings = run_settings(context, starts, seed)
    run_and_tell("transport", config, settings, summarize_transport, Outputs(report, json_file), against)


@app.command()
def virtual(
    context: typer.Context,
    peers: Annotated[int, typer.Option(min=2, help="Peers in the world.")] = 200,
    calls_per_s: Annotated[int, typer.Option(min=1, help="Calls of each peer in a simulated second.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="Simulated seconds.")] = 600,
    profile: Annotated[str, typer.Option(help="The network: a preset's name or a TOML file.")] = "wan",
    kind: Annotated[CallKind, typer.Option(help="How they call.")] = "datagram",
    starts: Annotated[int, typer.Option(help="Worlds, each in a process of its own.")] = 1,
    seed: Seed = 0,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """A world of peers in virtual time; the same seed gives the same digest of all that happened."""
    from shoal.bench.virtual import VirtualConfig, summarize_virtual
    from shoal.transport import Profile

    Profile.load(profile)  # complains before anything is started
    config = VirtualConfig(peers, calls_per_s, seconds, profile, kind)
    settings = run_settings(context, starts, seed)
    run_and_tell("virtual", config, settings, summarize_virtual, Outputs(report, json_file))


@app.command(cls=flags.DhtCommand)
def dht(
    context: typer.Context,
    mode: flags.Mode = None,
    num_peers: flags.NumPeers = None,
    initial_peers: flags.InitialPeers = None,
    num_processes: flags.NumProcesses = None,
    expiration: flags.Expiration = None,
    wait_timeout: flags.WaitTimeout = None,
    increase_file_limit: flags.IncreaseFileLimit = False,
    num_experts: flags.NumExperts = None,
    expert_batch_size: flags.ExpertBatchSize = None,
    wait_after_request: flags.WaitAfterRequest = None,
    wait_before_read: flags.WaitBeforeRead = None,
    num_keys: flags.NumKeys = None,
    total_num_rounds: flags.TotalNumRounds = None,
    num_store_peers: flags.NumStorePeers = None,
    num_get_peers: flags.NumGetPeers = None,
    num_threads: flags.NumThreads = None,
    failure_rate: flags.FailureRate = None,
    delay: flags.Delay = None,
    wait_after_iteration: flags.WaitAfterIteration = None,
    latest: flags.Latest = None,
    virtual: flags.IsVirtual = False,
    profile: flags.NetworkProfile = None,
    starts: OneStart = 1,
    seed: flags.Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Peers of a DHT, each with an identity and a sealed socket of its own, that store and look up."""
    from shoal.bench.dht_config import config_of
    from shoal.bench.dht_summary import dht_items, summarize_dht
    from shoal.bench.open_files import ensure_open_files

    config = config_of(mode, context.params, is_virtual=virtual)
    if not virtual and (changed := ensure_open_files(config.num_files, should_raise=increase_file_limit)):
        emit(changed, sys.stderr)
    settings = run_settings(context, starts, seed)
    run_and_tell("dht", config, settings, summarize_dht, Outputs(report, json_file, dht_items), against)


@app.command()
def experts(
    context: typer.Context,
    preset: experts_flags.Preset = "default",
    num_experts: experts_flags.NumExperts = None,
    num_clients: experts_flags.NumClients = None,
    client_processes: experts_flags.ClientProcesses = None,
    num_batches_per_client: experts_flags.NumBatches = None,
    batch_size: experts_flags.BatchSize = None,
    max_batch_size: experts_flags.MaxBatchSize = None,
    hidden_dim: experts_flags.HiddenDim = None,
    expert_class: experts_flags.ExpertClass = None,
    backward: experts_flags.Backward = None,
    num_handlers: experts_flags.NumHandlers = None,
    device: experts_flags.Device = None,
    precision: experts_flags.Precision = None,
    increase_file_limit: experts_flags.IncreaseFileLimit = False,
    starts: OneStart = 1,
    seed: Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Clients that send batches to the experts of one server, beside a bare echo and the module alone."""
    from shoal.bench.experts_config import config_of, ensure_files, preset_named
    from shoal.bench.experts_summary import experts_items, summarize_experts

    should_raise = increase_file_limit or preset_named(preset).should_raise_file_limit
    config = config_of(preset, context.params)
    if changed := ensure_files(config, should_raise=should_raise):
        emit(changed, sys.stderr)
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, experts_items)
    run_and_tell("experts", config, settings, summarize_experts, outputs, against)


@app.command()
def collectives(
    context: typer.Context,
    workers: Annotated[str, typer.Option(metavar="N,...", help="Numbers of workers.")] = "2,4",
    sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Of each worker's tensor.", show_default=SIZES),
    ] = None,
    ops: Annotated[
        str | None, typer.Option(metavar="OP,...", help="Operations.", show_default="all of them")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed calls of each kind in a start.", show_default="12 to 180, by size"),
    ] = None,
    starts: OneStart = 1,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Operations of a group in shared memory, beside torch.distributed over gloo in the same workers."""
    from shoal.bench.collectives import SHORT, CollectivesConfig, parse_size, summarize_collectives
    from shoal.bench.collectives import collectives_items as items

    given: dict[str, Any] = {"workers": tuple(numbers("--workers", workers)), "repeats": repeats}
    given["sizes"] = None if sizes is None else tuple(parse_size(size) for size in listed(sizes))
    given["ops"] = None if ops is None else tuple(op.replace("-", "_") for op in listed(ops))
    config = msgspec.structs.replace(
        SHORT if short else CollectivesConfig(),
        **{name: value for name, value in given.items() if value is not None},
    )
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, items)
    run_and_tell("collectives", config, settings, summarize_collectives, outputs, against)


@app.command()
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


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


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


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [int(part) for part in listed(text)]
    except ValueError:
        raise UsageError(f"{option} {text} is no list of numbers.", next_step=f"say {option} 2,4.") from None


def assignments(texts: list[str]) -> dict[str, str]:
    """`name=value` each; hyphens in names are underscores."""
    given = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not is_there or not name:
            raise UsageError(f"--option {text} sets nothing.", next_step="say --option NAME=VALUE.")
        given[name.strip().replace("-", "_")] = value
    return given


def run_settings(context: typer.Context, starts: int, seed: int) -> RunSettings:
    """With the command line as it was typed, for the report."""
    return RunSettings(starts, seed, ("shoal", *(context.obj or ())))


class Outputs(msgspec.Struct, frozen=True):
    """Where the results of a benchmark go beside the terminal."""

    report: Path | None
    json_file: Path | None
    items: Callable[[Report], Items] = report_items
    """What is printed of a report."""


def run_and_tell(
    benchmark: str,
    config: Any,
    settings: RunSettings,
    summarize: Callable[[Report], dict[str, Any]],
    outputs: Outputs,
    against: str | None = None,
) -> None:
    """What all benchmarks do: measure, save, print; exit code 1 when a scenario failed."""
    to_stdout = str(outputs.json_file) == "-"
    out = sys.stderr if to_stdout else sys.stdout
    with contextlib.ExitStack() as stack:
        versions = [Version()]
        if against is not None:
            versions.insert(0, Version(against, stack.enter_context(source_of(against))))
        tell = stack.enter_context(show_progress(f"bench {benchmark}"))
        reports = run_benchmark(
            benchmark, msgspec.to_builtins(config), settings, tell=tell, versions=versions
        )
    reports = [msgspec.structs.replace(report, result=summarize(report)) for report in reports]
    latest = reports[-1]
    # saved before anything is printed or compared: whatever fails there, the samples stay
    path = save(latest, outputs.report or default_path(DEFAULT_FOLDER, benchmark, latest.created))
    if against is not None:
        base_path = save(reports[0], default_path(DEFAULT_FOLDER, f"{benchmark}-base", latest.created))
    show(outputs.items(latest), out)
    if against is not None:
        emit(f"Report of {against}: {base_path}", out)
        show(diff_items(compare(*reports)), out)
    emit(f"Report: {path}", out)
    if to_stdout:
        emit(path.read_text(encoding="utf-8").rstrip(), sys.stdout)
    elif outputs.json_file is not None:
        emit(f"JSON: {write_atomically(outputs.json_file, path.read_bytes())}", out)
    emit(result_line({**latest.result, "report": str(path)}), out)
    if latest.failed:
        raise typer.Exit(1)
