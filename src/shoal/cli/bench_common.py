"""What all commands of `shoal bench` share: how a benchmark is run, saved and printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from shoal.bench.frame import (
    RunFlags,
    RunSettings,
    Starter,
    Version,
    in_child,
    run_benchmark,
    show_progress,
    source_of,
)
from shoal.bench.ranks import HostFlags
from shoal.core import UsageError
from shoal.report import DEFAULT_FOLDER, Report, compare, default_path, save
from shoal.report.storage import write_atomically
from shoal.report.tables import emit, show, tell_result
from shoal.report.views import Items, diff_items, report_items

if TYPE_CHECKING:
    from shoal.bench.ranks import Ranks


RANKED = ("accuracy", "ddp", "scaling", "training")
"""Benchmarks whose workers a launcher may have started."""


def run_and_tell(
    context: typer.Context,
    benchmark: str,
    config: Any,
    run: RunFlags,
    summarize: Callable[[Report], dict[str, Any]],
    items: Callable[[Report], Items] = report_items,
    *,
    where: Starter | None = None,
    encode: Callable[[Report], bytes] | None = None,
) -> None:
    """What all benchmarks do: measure, save, print; exit code 1 when a scenario failed.

    `items` are what is printed of a report, and `encode` what --json holds where it is not the report.
    `where` runs a start elsewhere than in a child of this process. A benchmark of RANKED that a launcher has
    started in several processes takes part as one of them, and the first alone saves and prints.
    """
    settings = RunSettings(run.starts, run.seed, ("shoal", *(context.obj or ())))
    against = run.against
    to_stdout = str(run.json_file) == "-"
    out = sys.stderr if to_stdout else sys.stdout
    with contextlib.ExitStack() as stack:
        starter = in_child if where is None else where
        if benchmark in RANKED and HostFlags().launched_size is not None:
            ranks = _join(stack, run)
            if not ranks.is_first:
                ranks.follow()
                return
            starter = ranks.start
        versions = [Version()]
        if against is not None:
            versions.insert(0, Version(against, stack.enter_context(source_of(against))))
        tell = stack.enter_context(show_progress(f"bench {benchmark}"))
        reports = run_benchmark(
            benchmark,
            msgspec.to_builtins(config),
            settings,
            tell=tell,
            versions=versions,
            starter=starter,
        )
    reports = [msgspec.structs.replace(report, result=summarize(report)) for report in reports]
    latest = reports[-1]
    # saved before anything is printed or compared: whatever fails there, the samples stay
    path = save(latest, run.report or default_path(DEFAULT_FOLDER, benchmark, latest.created))
    if against is not None:
        base_path = save(reports[0], default_path(DEFAULT_FOLDER, f"{benchmark}-base", latest.created))
    show(items(latest), out)
    if against is not None:
        emit(f"Report of {against}: {base_path}", out)
        show(diff_items(compare(*reports)), out)
    emit(f"Report: {path}", out)
    if run.json_file is not None:
        encoded = path.read_bytes() if encode is None else encode(latest)
        if to_stdout:
            emit(encoded.decode().rstrip(), sys.stdout)
        else:
            emit(f"JSON: {write_atomically(run.json_file, encoded)}", out)
    # what a simulation took: all else in its report is equal from run to run
    took = {name: value for name, value in latest.environment.items() if name == "wall_s"}
    tell_result({**latest.result, **took, "report": str(path)}, out)
    if latest.failed:
        raise typer.Exit(1)


def _join(stack: contextlib.ExitStack, run: RunFlags) -> Ranks:
    """Take part as one of the processes that a launcher has started."""
    from shoal.bench.ranks import joined

    if run.starts > 1 or run.against is not None:
        raise UsageError(
            "Processes that a launcher has started are one start, of one version.",
            next_step="leave --starts and --against out, or let `shoal bench` start the workers: -np, -H.",
        )
    return stack.enter_context(joined())
