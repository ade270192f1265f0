"""`shoal bench` and `shoal compare`: run a benchmark, save its report, print its figures.

What a benchmark measures, and its flags, stand in its own file: a command is made of it when it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from shoal.bench.frame import (
    BENCHMARKS,
    BenchmarkPlan,
    RunFlags,
    RunSettings,
    Version,
    in_child,
    part_named,
    run_benchmark,
    show_progress,
    source_of,
)
from shoal.bench.ranks import HostFlags
from shoal.cli.flags import typed_flags, with_flags, with_parameters
from shoal.cli.program import LazyVerbs, command_of
from shoal.core import UsageError
from shoal.report import DEFAULT_FOLDER, compare, default_path, save
from shoal.report.storage import write_atomically
from shoal.report.tables import emit, show, tell_result
from shoal.report.views import diff_items

if TYPE_CHECKING:
    from shoal.bench.ranks import Ranks

_LATEST = {"true": "--latest", "false": "--no-latest"}
More = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="N|HOST:PORT")]
"""Values that follow the first one of a flag."""


def with_bare_latest(arguments: Sequence[str]) -> list[str]:
    """The same, with `--latest True` and `--latest=False` as the flags that they mean."""
    bare: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if bare and bare[-1] == "--latest" and argument.lower() in _LATEST:
            bare[-1] = _LATEST[argument.lower()]
        elif name == "--latest" and value.lower() in _LATEST:
            bare.append(_LATEST[value.lower()])
        else:
            bare.append(argument)
    return bare


class DhtCommand(TyperCommand):
    """A command whose `--latest` may be followed by true or false."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as any command does, once `--latest` is alone."""
        return super().parse_args(ctx, with_bare_latest(args))


_SETTINGS: dict[str, dict[str, Any]] = {
    "dht": {"cls": DhtCommand},
    "ddp": {"short_help": "The sweep of PyTorch's DDP benchmark, from one worker to whole machines."},
}
"""What typer is told of a command beside what its function says."""


def function_of(benchmark: str) -> Callable[..., None]:
    """Make the function of a command: it has the flags of the benchmark's structs, measures and tells."""
    planned = part_named(BENCHMARKS[benchmark].command)
    parameters = dict(inspect.signature(planned, eval_str=True).parameters)
    wants_typed = parameters.pop("typed", None) is not None
    if "more" in parameters:
        parameters["more"] = parameters["more"].replace(annotation=More, default=None)

    @functools.wraps(planned)
    def command(context: typer.Context, **given: Any) -> None:
        typed = {"typed": typed_flags(context)} if wants_typed else {}
        plan: BenchmarkPlan | None = planned(**given, **typed)
        if plan is not None:
            run_and_tell(context.obj or (), benchmark, plan)

    by_name = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", by_name, annotation=typer.Context)
    return with_flags(with_parameters(command, [context, *parameters.values()]))


class Benchmarks(LazyVerbs):
    """The commands of `shoal bench`; the file of a benchmark is imported when its command is asked for."""

    names = tuple(name for name in BENCHMARKS if name != "compare")

    @staticmethod
    @functools.cache
    def make(name: str) -> Any:
        """Make the command of a benchmark."""
        return command_of(name, function_of(name), **_SETTINGS.get(name, {}))


app = typer.Typer(
    cls=Benchmarks,
    help="Measure; every benchmark saves a report.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def run_and_tell(typed: Sequence[str], benchmark: str, plan: BenchmarkPlan) -> None:
    """What all benchmarks do: measure, save, print; exit code 1 when a scenario failed.

    A ranked benchmark that a launcher has started in several processes takes part as one of them, and the
    first alone saves and prints.
    """
    run, out = plan.run, plan.run.out
    settings = RunSettings(run.starts, run.seed, ("shoal", *typed))
    against = run.against
    with contextlib.ExitStack() as stack:
        starter = plan.where or in_child
        if BENCHMARKS[benchmark].is_ranked and HostFlags().launched_size is not None:
            ranks = _join(stack, run)
            if not ranks.is_first:
                ranks.follow()
                return
            starter = ranks.start
        versions = [Version()]
        if against is not None:
            versions.insert(0, Version(against, stack.enter_context(source_of(against))))
        tell = stack.enter_context(show_progress(f"bench {benchmark}"))
        config = msgspec.to_builtins(plan.config)
        reports = run_benchmark(benchmark, config, settings, tell=tell, versions=versions, starter=starter)
    reports = [msgspec.structs.replace(report, result=plan.summarize(report)) for report in reports]
    latest = reports[-1]
    # saved before anything is printed or compared: whatever fails there, the samples stay
    path = save(latest, run.report or default_path(DEFAULT_FOLDER, benchmark, latest.created))
    if against is not None:
        base_path = save(reports[0], default_path(DEFAULT_FOLDER, f"{benchmark}-base", latest.created))
    show(plan.items(latest), out)
    if against is not None:
        emit(f"Report of {against}: {base_path}", out)
        show(diff_items(compare(*reports)), out)
    emit(f"Report: {path}", out)
    if run.json_file is not None:
        encoded = path.read_bytes() if plan.encode is None else plan.encode(latest)
        if out is sys.stderr:
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
