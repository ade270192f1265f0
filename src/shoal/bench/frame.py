"""The frame that all benchmarks share: independent process starts, progress, and the report at the end.

A scenario measures; it runs in a fresh process for every start, because what differs from start to start
(memory layout, where the scheduler put things) is most of the noise, and iterations inside one start do not
show it. `run_benchmark` measures this version of the code, or another one beside it (`source_of`);
`show_progress` is for the person who waits.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, Protocol, TextIO, TypeVar

import msgspec
from msgspec.structs import replace

import shoal
from shoal.bench.contenders import without_defaults
from shoal.bench.workers import Parent, child, end_with_parent
from shoal.core import BenchmarkError, UsageError
from shoal.core.run_options import flag
from shoal.core.untrusted import visible
from shoal.doctor.machine import Watch, describe_code, describe_machine
from shoal.report import DEFAULT_FOLDER, Curve, Report, Row
from shoal.report.schema import Identity
from shoal.report.tables import emit
from shoal.report.views import Items, report_items
from shoal.report.words import METRICS

T = TypeVar("T", Row, Curve)
Tell = Callable[[str], None]
RowKey = dict[str, str | int | float | bool]
Receive = Callable[[dict[str, Any]], None]
"""Takes what a start tells: `progress`, `row`, `curve`, or what the `machine` was that it ran on."""


def measured(
    metric: str, key: Mapping[str, Any], samples: Sequence[float] = (), error: str | None = None
) -> Row:
    """The row of one start: samples of a figure that `report.words` has, or why there are none."""
    _, unit, direction, _ = METRICS[metric]
    starts = [list(samples)] if error is None else []
    return Row(key=dict(key), metric=metric, unit=unit, direction=direction, starts=starts, error=error)


def curve(metric: str, key: RowKey, points: dict[str, list[float]]) -> Curve:
    """The curve of one start: `value`, and where it was taken along each axis, as 'step'."""
    _, unit, direction, _ = METRICS[metric]
    return Curve(key=key, metric=metric, unit=unit, direction=direction, starts=[points])


class Noted(msgspec.Struct, kw_only=True):
    """What belongs to where and when it ran, as the seconds that a simulation took: kept apart from figures.

    A simulated benchmark's report is equal for equal seeds but for that.
    """

    facts: dict[str, Any]
    """What the report's environment gets."""


class Scenario(Protocol):
    """One thing that a benchmark measures.

    One whose workers a launcher may have started opens them by its attribute `open_workers`, an
    `OpenWorkers`, which is `LocalWorkers` unless one has.
    """

    def run(self, tell: Tell) -> Iterator[Row | Curve | Noted]:
        """Measure once, in this process and its children; `tell` says what is being done.

        Each row and curve has this one start.
        """


class RunSettings(msgspec.Struct, frozen=True):
    """How often a benchmark is started, and what with."""

    num_starts: int = 5
    """Independent processes; five are needed before a difference can be judged."""
    seed: int = 0
    """The first start's; each further one adds 1."""
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_starts < 1:
            raise UsageError(
                f"--starts {self.num_starts} measures nothing.", next_step="give 1 or more; 5 to compare."
            )


class RunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of every benchmark: how often it is started, beside what, and where its results go."""

    starts: Annotated[int, flag("Independent process starts; 5 or more to compare.")] = 1
    seed: Annotated[int, flag("Of the first start; each further one adds 1.")] = 0
    short: Annotated[bool, flag("Quickly: a first look, not figures to keep.")] = False
    against: Annotated[
        str | None, flag("A git revision or checkout to take turns with and compare to.", metavar="REF")
    ] = None
    report: Annotated[
        Path | None, flag(f"Where to save; by default under {DEFAULT_FOLDER}/.", "--report", metavar="FILE")
    ] = None
    json_file: Annotated[
        Path | None, flag("Write the report's JSON there too; - is stdout.", "--json", metavar="FILE")
    ] = None

    @property
    def out(self) -> TextIO:
        """Where text for people goes: not to stdout where JSON stands there alone."""
        return sys.stderr if str(self.json_file) == "-" else sys.stdout


def defaults_of(config: type[msgspec.Struct]) -> Any:
    """The defaults of a config's fields, by name: where a flag has the same one, it is taken from there."""
    fields = msgspec.structs.fields(config)
    return SimpleNamespace(**{field.name: field.default for field in fields if not field.required})


def same_fields(flags: msgspec.Struct, config: type[msgspec.Struct]) -> dict[str, Any]:
    """What flags say of the fields that a config has by the same name."""
    shared = (name for name in flags.__struct_fields__ if name in config.__struct_fields__)
    return {name: getattr(flags, name) for name in shared}


class ContestRunFlags(RunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark whose start has several seeds; it is compared with nothing."""

    starts: int = 1
    against: str | None = None


class WholeRunFlags(RunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark that has no short form."""

    short: bool = False


@dataclass(frozen=True)
class BenchmarkPlan:
    """What a command line asks to be measured, and what is said of it."""

    config: Any
    run: RunFlags
    summarize: Callable[[Report], dict[str, Any]]
    """Makes the RESULT line."""
    items: Callable[[Report], Items] = report_items
    """Makes what is printed of a report."""
    where: Starter | None = None
    """Runs a start elsewhere than in a child of this process."""
    encode: Callable[[Report], bytes] | None = None
    """Makes what --json holds, where that is not the report."""


class Benchmark(NamedTuple):
    """Where the parts of a benchmark stand, as `module:name` in this room."""

    scenario: str
    """Made as `class(config, seed)` in the process that measures."""
    command: str
    """Takes structs of flags and returns a `BenchmarkPlan`, or None where it has done all by itself."""
    is_ranked: bool = False
    """Whether a launcher may have started its workers."""


BENCHMARKS = {
    "transport": Benchmark("transport:TransportScenario", "transport:transport_command"),
    "virtual": Benchmark("virtual:VirtualScenario", "virtual:virtual_command"),
    "swarm": Benchmark("swarm:SwarmScenario", "swarm:swarm_command"),
    "dht": Benchmark("dht:DhtScenario", "dht:dht_command"),
    "experts": Benchmark("experts:ExpertsScenario", "experts:experts_command"),
    "collectives": Benchmark("collectives:CollectivesScenario", "collectives:collectives_command"),
    "training": Benchmark("training:TrainingScenario", "training:training_command", is_ranked=True),
    "ddp": Benchmark("ddp:DdpScenario", "ddp:ddp_command", is_ranked=True),
    "scaling": Benchmark("scaling:ScalingScenario", "scaling:scaling_command", is_ranked=True),
    "accuracy": Benchmark("accuracy:AccuracyScenario", "accuracy:accuracy_command", is_ranked=True),
    "convergence": Benchmark("convergence:ConvergenceScenario", "convergence:convergence_command"),
    "latency": Benchmark("latency:LatencyScenario", "latency:latency_command"),
    "compare": Benchmark("compare:CompareScenario", "comparison:compare_command"),
}
"""All benchmarks, in the order of `shoal bench --help`; `compare` is a verb of its own."""


def part_named(place: str) -> Any:
    """What `module:name` of a `Benchmark` means; imports that module alone."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def announce(line: str | None) -> None:
    """Tell the person at the terminal what is no result; nothing where there is nothing to tell."""
    if line:
        emit(line, sys.stderr)


class Version(msgspec.Struct, frozen=True):
    """Code that is measured: the package in use, or the one in the folder `source`."""

    name: str = "this"
    source: Path | None = None


class Starter(Protocol):
    """How one start of a scenario is run; BenchmarkError when it broke off."""

    def __call__(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """Run it to its end, and pass on all that it tells."""


def in_child(arguments: dict[str, Any], version: Version, receive: Receive) -> None:
    """A start in a process of its own, on this machine."""
    with child("shoal.bench.frame:run_start", arguments, source=version.source) as process:
        while (message := process.receive()) is not None:
            receive(message)


def run_benchmark(
    benchmark: str,
    config: Mapping[str, Any],
    settings: RunSettings,
    *,
    tell: Tell,
    versions: Sequence[Version] = (Version(),),
    starter: Starter = in_child,
) -> list[Report]:
    """Start the scenario as often as asked, for each version, and return a report for each.

    Two versions take turns A B B A, so that a machine that slows down meets both alike.
    """
    watch = Watch()
    machine = describe_machine()  # takes a moment, in which stolen time shows
    before = watch.look()
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    collected = {version.name: _Collected() for version in versions}
    turns = secrets.token_hex(8) if len(versions) > 1 else ""
    total = settings.num_starts * len(versions)
    number = 0
    for start in range(settings.num_starts):
        for version in versions if start % 2 == 0 else reversed(versions):
            number += 1
            label = f"start {number} of {total}" + (f" ({version.name})" if len(versions) > 1 else "")
            asked = config if version.source is None else _for_another_version(config)
            arguments = {"benchmark": benchmark, "config": dict(asked), "seed": settings.seed + start}
            run = functools.partial(starter, arguments, version)

            def tell_at(text: str, label: str = label) -> None:
                tell(f"{label}: {text}")

            collected[version.name].measure(start, run, tell_at)
    environment = {**machine, "before": before, "after": watch.look()}
    return [
        Report(
            benchmark=benchmark,
            created=created,
            command=list(settings.command),
            config=dict(config),
            seeds=[settings.seed + start for start in range(settings.num_starts)],
            code=describe_code(version.source),
            environment={**environment, **collected[version.name].machine},
            rows=collected[version.name].rows(),
            curves=collected[version.name].curves(),
            turns=turns,
        )
        for version in versions
    ]


def _for_another_version(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same settings, without what this version alone may know.

    What is empty, None or on the CPU is what every version does by itself.
    """
    asked = {
        name: value
        for name, value in config.items()
        if value is not None and value not in ((), []) and (name, value) != ("device", "cpu")
    }
    options = asked.get("options")
    if isinstance(options, Mapping):
        asked["options"] = without_defaults(options)
    return asked


def run_start(arguments: dict[str, Any], parent: Parent) -> None:
    """What the process of one start does: measure, and tell the parent every row."""
    end_with_parent()
    scenario = make_scenario(arguments["benchmark"], arguments["config"], arguments["seed"])
    tell_rows(scenario, lambda message: parent.tell(**message))
    parent.leave()


def tell_rows(scenario: Scenario, tell: Receive) -> None:
    """Run a scenario, and tell all that it says as messages."""
    for found in scenario.run(lambda text: tell({"progress": text})):
        if isinstance(found, Noted):
            tell({"machine": found.facts})
            continue
        tell({"row" if isinstance(found, Row) else "curve": msgspec.to_builtins(found)})


def make_scenario(benchmark: str, config: Mapping[str, Any], seed: int) -> Scenario:
    """The scenario of a benchmark by its name, or by `module:class`."""
    if benchmark in BENCHMARKS:
        made = part_named(BENCHMARKS[benchmark].scenario)
    else:
        module, _, name = benchmark.partition(":")
        made = getattr(importlib.import_module(module), name)
    scenario: Scenario = made(config, seed)
    return scenario


class _Collected:
    """Rows of one version as they come in, in the order of their first appearance."""

    def __init__(self) -> None:
        self._told: dict[Identity, list[tuple[int, Row]]] = {}
        """The number of each start, and what it found."""
        self._curves: dict[str, Curve] = {}
        self.machine: dict[str, Any] = {}
        """What is told of another machine than this one, where it measured."""

    def measure(self, start: int, run: Callable[[Receive], None], tell: Tell) -> None:
        """Take what a start tells; one that breaks off is a row too."""

        def receive(message: dict[str, Any]) -> None:
            if "progress" in message:
                tell(message["progress"])
            elif "machine" in message:
                self.machine |= message["machine"]
            elif "curve" in message:
                self.add_curve(_read(message["curve"], Curve, "points"))
            else:
                self.add(start, _read(message["row"], Row, "samples"))

        try:
            run(receive)
        except BenchmarkError as error:
            tell(f"failed: {error.what}")
            text = error.what if not error.cause else f"{error.what} {error.cause.strip().splitlines()[-1]}"
            self.add(start, measured("completed", {"scenario": "start"}, error=text))

    def add_curve(self, found: Curve) -> None:
        """Take how something went in one start."""
        known = self._curves.setdefault(f"{sorted(found.key.items())} {found.metric}", found)
        if known is not found:
            known.starts.extend(found.starts)

    def curves(self) -> list[Curve]:
        """Each with all its starts."""
        return list(self._curves.values())

    def add(self, start: int, found: Row) -> None:
        """Take what one start found out about a row."""
        self._told.setdefault(found.identity, []).append((start, found))

    def rows(self) -> list[Row]:
        """One row for what was measured, and one more for every start in which it failed."""
        rows = []
        for told in self._told.values():
            if starts := [samples for _, found in told for samples in found.starts]:
                rows.append(replace(told[0][1], starts=starts, error=None))
            rows += [
                replace(found, key={**found.key, "start": start + 1})
                for start, found in told
                if found.error is not None
            ]
        return rows


def _read(told: dict[str, Any], kind: type[T], start: str) -> T:
    """A row or a curve as a process tells it; older versions have its one start under a name of its own."""
    if start in told:
        only = told.pop(start)
        told["starts"] = [only] if only else []
    return msgspec.convert(told, kind)


# --- another version of the code ---


@contextlib.contextmanager
def source_of(reference: str) -> Iterator[Path]:
    """The folder that holds the package of `reference`, which is a checkout's folder or a git revision."""
    folder = Path(reference)
    if folder.is_dir():
        for source in (folder / "src", folder):
            if (source / "shoal" / "__init__.py").is_file():
                yield source.resolve()
                return
        raise UsageError(
            f"{folder} holds no Shoal.", next_step="give the folder of a checkout, or a git revision."
        )
    repository = Path(shoal.__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="shoal-against-") as temporary:
        checkout = Path(temporary) / "checkout"
        worktree = ["git", "-C", str(repository), "worktree"]
        _run_git([*worktree, "add", "--detach", "--quiet", str(checkout), reference], reference)
        try:
            yield checkout / "src"
        finally:
            _run_git([*worktree, "remove", "--force", str(checkout)], reference)


def _run_git(command: list[str], reference: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            "git is not installed.", next_step="install it, or give --against the folder of another checkout."
        ) from None
    if done.returncode:
        raise UsageError(
            f"The revision {reference!r} cannot be checked out: {done.stderr.strip()}.",
            cause="Shoal does not run from a git checkout, or the revision is not in it.",
            next_step="give a commit, tag or branch of this repository, or the folder of another checkout.",
        )


# --- progress ---

_COUNTED = re.compile(r"^(.*): (\d+) of ([1-9]\d*)$")
"""A text that ends in a count, `peers created: 40 of 1024`: a bar on a terminal; elsewhere every tenth part
of it is a line."""
_WIDTH = 30


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line on stderr; stdout is for data."""
    if not sys.stderr.isatty():
        is_news = _News()
        yield lambda text: emit(f"{title}: {text}", sys.stderr) if is_news(text) else None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(title) as status:
        yield lambda text: status.update(Text(visible(f"{title}: {with_bar(text)}")))


def with_bar(text: str) -> str:
    """The text with a count at its end drawn as a bar; any other as it is."""
    counted = _COUNTED.match(text)
    if counted is None:
        return text
    what, done, total = counted[1], int(counted[2]), int(counted[3])
    filled = _WIDTH * min(done, total) // total
    return f"{what} {'━' * filled}{'╌' * (_WIDTH - filled)} {done}/{total}"


class _News:
    """Whether a text says something new: of a count, when another tenth of it is done."""

    def __init__(self) -> None:
        self._tenths: dict[str, int] = {}

    def __call__(self, text: str) -> bool:
        counted = _COUNTED.match(text)
        if counted is None:
            return True
        tenth = 10 * int(counted[2]) // int(counted[3])
        if self._tenths.get(counted[1]) == tenth:
            return False
        self._tenths[counted[1]] = tenth
        return tenth > 0
