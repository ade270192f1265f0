"""`shoal bench`: run a benchmark, save its report, print its figures."""

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
from shoal.report import DEFAULT_FOLDER, Report, compare, default_path, save
from shoal.report.storage import write_atomically
from shoal.report.tables import emit, result_line, show
from shoal.report.views import diff_items, report_items

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


CallKind = Literal["datagram", "stream"]


@app.command()
def transport(
    context: typer.Context,
    starts: Starts = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Quickly, and one start unless told otherwise.")
    ] = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Echoes between two processes, by streams, TLS and sealed datagrams, beside bare sockets."""
    from shoal.bench.transport import SHORT, TransportConfig, summarize_transport

    config = SHORT if short else TransportConfig()
    if repeats is not None:
        config = msgspec.structs.replace(config, repeats=repeats)
    settings = RunSettings(
        starts if starts is not None else 1 if short else NUM_STARTS, seed, ("shoal", *(context.obj or ()))
    )
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
    settings = RunSettings(starts, seed, ("shoal", *(context.obj or ())))
    run_and_tell("virtual", config, settings, summarize_virtual, Outputs(report, json_file))


class Outputs(msgspec.Struct, frozen=True):
    """Where the results of a benchmark go beside the terminal."""

    report: Path | None
    json_file: Path | None


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
    show(report_items(latest), out)
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
