"""`shoal bench scaling`: images a second under each strategy, from one worker to many.

As BlueFog's throughput page: synthetic batches, a warm-up, then iterations of several batches each. Every
iteration has one of `none` as neighbour in time, where as many workers share nothing: the ceiling. One worker
alone under `none` is what efficiency is measured by. What the figures say is `tables.scaling`', and what they
let expect of more workers `forecast.predict`'s.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import (
    NONE,
    Device,
    DeviceKind,
    NoCuda,
    Recipe,
    SequenceLength,
    StrategyOption,
    Trainee,
    all_options,
    beside_none,
    check_profile,
    iteration_text,
    make_contender,
    needs_servers,
    sends_by_itself,
    shares_of,
    tell_inputs,
    workers_device,
)
from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell, defaults_of, measured
from shoal.bench.ranks import HostFlags
from shoal.bench.workers import BenchPlace, LocalWorkers, OpenWorkers, Workers, WorkerSettings, one_line
from shoal.core import BenchmarkError, ShoalError, UsageError
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.report import DEFAULT_FOLDER, Curve, Report, Row
from shoal.report.tables import show, tell_result
from shoal.report.units import counted
from shoal.strategies.registry import canonical, find

if TYPE_CHECKING:
    from shoal.group.base import Group
    from shoal.strategies import Strategy

SPEED, WORKER_SPEED = "images_per_s", "images_per_s_per_worker"
EFFICIENCY, FRACTION = "scaling_efficiency", "fraction_of_ceiling"
PROCESSORS = {"cpu": "cores_per_worker", "cuda": "gpus_per_worker"}
"""What workers of a machine divide among them, by device."""
MIXING = "mixing"
AS_TOKENS = {SPEED: "tokens_per_s", WORKER_SPEED: "tokens_per_s_per_worker"}
"""What the speed of a model of text is called."""
_ANSWER_S = 3600.0  # ten batches of a large model take one core many minutes
_NUM_MIXINGS = 5
_SMALLEST_INNER_OUTER = 3
"""Workers on a machine: one goes outside, and two exchange inside."""
DEFAULT_STRATEGIES = ("neighbor", "hierarchical", "all-reduce")
MODELS = {"cpu": "resnet18", "cuda": "resnet50"}
"""On a CPU one step of the document's model takes minutes."""


class ScalingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom, and for how long."""

    model: str = "resnet50"
    image_size: int | None = 224
    """The side of the square images; None for other inputs."""
    sequence_length: int | None = None
    """Tokens of an example, where the model reads text."""
    num_classes: int = 1000
    batch_sizes: tuple[int, ...] = (32,)
    """Of each worker; one sweep for each."""
    num_workers: tuple[int, ...] = (1, 2)
    crew_size: int = 0
    """Workers that there are, of whom the first take part; by default as many as ever take part."""
    workers_per_machine: int | None = None
    """To split one machine into several."""
    workers_on_machine: int | None = None
    """Of each of several real machines."""
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    options: dict[str, dict[str, Any]] = {}
    """Of each strategy, where others than the document's and its own were asked for."""
    is_dynamic: bool = True
    """Whether neighbours change from round to round, one at a time."""
    is_adapt_then_combine: bool = False
    num_warmup_batches: int = 10
    num_batches_per_iter: int = 10
    num_iters: int = 10
    learning_rate: float = 0.01
    device: DeviceKind = "cpu"
    profile: str | None = None
    """A network that the group is made as slow as: a preset's name or a TOML file."""
    between: Literal["workers", "machines"] = "workers"
    """Whether the profile describes links of workers or of machines."""
    trace_folder: str | None = None
    """Where to write what torch's profiler saw of rank 0 in one iteration more."""
    should_predict: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.num_workers, *self.batch_sizes, self.num_batches_per_iter, self.num_iters)
        if not self.num_workers or not self.batch_sizes or min(counts) < 1 or self.num_warmup_batches < 0:
            raise UsageError(
                "Without workers, batches or examples nothing is measured.", next_step="give 1 or more."
            )
        if self.crew_size and self.crew_size < max(self.num_workers):
            raise UsageError(
                f"{max(self.num_workers)} workers are to be measured, and there are {self.crew_size}.",
                next_step=f"give --np numbers up to {self.crew_size}.",
            )
        if self.profile is not None and self.between == "machines" and not self.has_machines:
            raise UsageError(
                f"All of up to {max(self.num_workers)} workers are on one machine: no links between machines "
                f"can be made as slow as '{self.profile}'.",
                next_step="split it: --workers-per-machine K, or --between workers.",
            )
        served = next(filter(needs_servers, self.strategies), None)
        if served is not None:
            raise UsageError(
                f"{served} needs servers beside its workers, and here are workers alone.",
                next_step=f"measure it by `shoal bench training --strategies {served}`.",
            )

    @property
    def has_machines(self) -> bool:
        """Whether the most workers that are measured are on several machines."""
        sizes = [size for size in (self.workers_per_machine, self.workers_on_machine) if size is not None]
        return bool(sizes) and min(sizes) < max(self.num_workers)


_USUAL = defaults_of(ScalingConfig)
_SHORT = ScalingConfig(num_warmup_batches=1, num_batches_per_iter=1, num_iters=3)


class ScalingFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench scaling`, many of them by BlueFog's names."""

    strategies: Annotated[
        tuple[str, ...] | None,
        flag(
            "Beside 'none', where nothing is shared.", metavar="NAME,...", shown=",".join(DEFAULT_STRATEGIES)
        ),
    ] = None
    dist_optimizer: Annotated[
        str | None,
        flag("One strategy, by BlueFog's name for it, with one number of workers.", metavar="NAME"),
    ] = None
    num_workers: Annotated[
        tuple[int, ...] | None,
        flag("Numbers of workers.", "--np", "-np", metavar="N,...", shown="1,2,4,... cores"),
    ] = None
    workers_per_machine: Annotated[int | None, flag("Split this machine into several.", ge=1)] = None
    model: Annotated[
        str | None,
        flag(
            "What is trained, on synthetic images or tokens; your own is file.py:factory.",
            shown="resnet50; resnet18 on a CPU",
        ),
    ] = None
    image_size: Annotated[int | None, flag("The images' side.", ge=1, shown="the model's own")] = None
    sequence_length: SequenceLength = None
    num_classes: Annotated[int | None, flag("That the model tells apart.", ge=1, shown="the model's own")] = (
        None
    )
    batch_size: Annotated[tuple[int, ...], flag("Of each worker.", metavar="N,...")] = _USUAL.batch_sizes
    num_warmup_batches: Annotated[
        int | None, flag("That do not count.", ge=0, shown=str(_USUAL.num_warmup_batches))
    ] = None
    num_batches_per_iter: Annotated[
        int | None, flag("Measured together.", ge=1, shown=str(_USUAL.num_batches_per_iter))
    ] = None
    num_iters: Annotated[int | None, flag("Measurements.", ge=1, shown=str(_USUAL.num_iters))] = None
    atc_style: Annotated[bool, flag("Neighbours combine after the step, not while it is computed.")] = False
    disable_dynamic_topology: Annotated[bool, flag("All neighbours in every round, not one in turn.")] = False
    option: StrategyOption = {}
    device: Device = "auto"
    no_cuda: NoCuda = False
    profile: Annotated[
        str | None, flag("Make links as slow as those of a network: a preset's name or a TOML file.")
    ] = None
    between: Annotated[
        Literal["workers", "machines"] | None,
        flag("Whose links the profile is of.", shown="machines where there are several"),
    ] = None
    profiler: Annotated[bool, flag(f"Trace one more iteration of rank 0 into {DEFAULT_FOLDER}/.")] = False
    predict: Annotated[bool, flag("Extend what was measured to 1,024 workers by a cost model.")] = False
    predict_published: Annotated[
        bool, flag("Check the cost model by BlueFog's published figures, and no more.")
    ] = False


def scaling_command(flags: ScalingFlags, hosts: HostFlags, run: RunFlags) -> BenchmarkPlan | None:
    """Images a second from one worker to many, under each strategy: how near to linear it stays."""
    if flags.predict_published:
        from shoal.bench.forecast.published import published_items, published_result

        show(published_items(), sys.stdout)
        tell_result(published_result(), sys.stdout)
        return None
    from shoal.bench.tables.scaling import scaling_items, summarize_scaling

    config = scaling_config(flags, hosts, run)
    return BenchmarkPlan(config, run, summarize_scaling, scaling_items, where=hosts.starter(config.crew_size))


def scaling_config(flags: ScalingFlags, hosts: HostFlags, run: RunFlags) -> ScalingConfig:
    """Make of the flags what is measured; UsageError where they contradict each other."""
    from shoal.models import model_named

    chosen = _chosen(flags)
    counts, size = worker_counts(flags, hosts)
    if flags.between is not None and flags.profile is None:
        raise UsageError(
            "--between says whose links a --profile is of, and there is none.", next_step="give both."
        )
    check_profile(flags.profile)
    device = workers_device(flags.device, hosts, size, no_cuda=flags.no_cuda)
    mates = hosts.workers_per_machine
    has_machines = flags.workers_per_machine is not None or (mates is not None and mates < counts[-1])
    entry = model_named(flags.model or MODELS[device]).at(
        flags.image_size, flags.num_classes, flags.sequence_length
    )
    if flags.image_size is None:
        tell_inputs(entry, device)
    if flags.predict and entry.num_tokens is not None:
        raise UsageError(
            f"--predict has no cost model of text, which {entry.name} reads.",
            next_step="leave --predict out, or take a model of images.",
        )
    usual = _SHORT if run.short else _USUAL
    return ScalingConfig(
        model=entry.name,
        image_size=entry.image_side,
        sequence_length=entry.num_tokens,
        num_classes=entry.num_classes,
        batch_sizes=tuple(dict.fromkeys(flags.batch_size)),
        num_workers=counts,
        crew_size=size,
        workers_per_machine=flags.workers_per_machine,
        workers_on_machine=mates,
        strategies=chosen,
        options=given_options(chosen, flags.option),
        is_dynamic=not flags.disable_dynamic_topology,
        is_adapt_then_combine=flags.atc_style,
        num_warmup_batches=usual.num_warmup_batches
        if flags.num_warmup_batches is None
        else flags.num_warmup_batches,
        num_batches_per_iter=flags.num_batches_per_iter or usual.num_batches_per_iter,
        num_iters=flags.num_iters or usual.num_iters,
        device=device,
        profile=flags.profile,
        between=flags.between or ("machines" if has_machines else "workers"),
        trace_folder=str(Path(DEFAULT_FOLDER).absolute()) if flags.profiler else None,
        should_predict=flags.predict,
        seed=run.seed,
    )


def _chosen(flags: ScalingFlags) -> tuple[str, ...]:
    """Name what is measured beside 'none'; UsageError where that is nothing, or nothing that there is."""
    if flags.strategies is not None and flags.dist_optimizer is not None:
        raise UsageError(
            "--dist-optimizer names one strategy, and --strategies several.", next_step="give one of both."
        )
    if flags.dist_optimizer is not None:
        return beside_none((flags.dist_optimizer,))
    return beside_none(DEFAULT_STRATEGIES if flags.strategies is None else flags.strategies)


def worker_counts(flags: ScalingFlags, hosts: HostFlags) -> tuple[tuple[int, ...], int]:
    """Return the numbers of workers that are measured, and how many workers there are."""
    given = None if flags.num_workers is None else sorted(dict.fromkeys(flags.num_workers))
    if given is not None and (not given or given[0] < 1):
        asked = ",".join(map(str, flags.num_workers or ()))
        raise UsageError(f"--np {asked} has no workers.", next_step="say --np 1,2,4.")
    is_single = flags.dist_optimizer is not None
    launched = hosts.launched_size
    if launched is not None:
        size = launched
    elif given:
        size = given[-1]
    else:
        size = hosts.num_workers(None, 1 if is_single else max(2, num_cores()))
    if given:
        return tuple(given), size
    return ((size,) if is_single else doubling(size)), size


def doubling(last: int) -> tuple[int, ...]:
    """Count 1, 2, 4, ... and the last."""
    counts = [1]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys((*counts, last)))


def given_options(strategies: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Give each strategy those options that it has; UsageError for an option that none of them has."""
    options = {}
    for strategy, own in shares_of(strategies, given).items():
        read = all_options(strategy, own)
        if own:
            options[strategy] = {name: read[name] for name in own}
    return options


def options_for(strategy: str, config: ScalingConfig, local_sizes: Sequence[int]) -> dict[str, Any]:
    """What the strategy is made with, among machines that have so many workers each."""
    name, implied = canonical(strategy), find(strategy)[1]
    options: dict[str, Any] = {}
    if name in ("neighbor", "hierarchical"):
        is_after = config.is_adapt_then_combine
        options["order"] = "adapt-then-combine" if is_after else "adapt-while-combine"
    if name in ("neighbor", "hierarchical", "window"):
        options["topology"] = _topology(name, local_sizes) if config.is_dynamic else "exponential-2"
    return {**options, **implied, **config.options.get(strategy, {})}


def _topology(strategy: str, local_sizes: Sequence[int]) -> str:
    """One peer in a round, by powers of two."""
    is_even = len(local_sizes) > 1 and min(local_sizes) == max(local_sizes)
    if strategy == "neighbor" and is_even and local_sizes[0] >= _SMALLEST_INNER_OUTER:
        return "inner-outer-exponential"
    return "one-peer-exponential"


# --- the scenario ---


class ScalingPoint(msgspec.Struct, frozen=True):
    """One combination of strategy, batch size and number of workers that is measured."""

    strategy: str
    batch_size: int
    num_workers: int

    @property
    def key(self) -> RowKey:
        """Returns the key of its rows in a report."""
        return msgspec.structs.asdict(self)

    def under(self, strategy: str) -> ScalingPoint:
        """The same with another strategy."""
        return msgspec.structs.replace(self, strategy=strategy)

    def __str__(self) -> str:
        return f"{self.strategy}, {counted(self.num_workers, 'worker')}, batch {self.batch_size}"


Speeds = list[float]
"""Images, or tokens, a second of each worker, by rank, in one iteration."""


class PointSpeeds(msgspec.Struct):
    """All that was measured at one point, or why it could not be."""

    speeds: list[Speeds] = []
    ceilings: list[Speeds] = []
    """The neighbours in time of `speeds`, under `none`."""
    error: str | None = None


class ScalingScenario:
    """One start: workers that train at each point in turn."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), ScalingConfig), seed=seed)
        self._num_opened = 0
        self._what = "img" if self._config.sequence_length is None else "tok"
        self.open_workers: OpenWorkers = LocalWorkers

    def run(self, tell: Tell) -> Iterator[Row | Curve]:
        """Every point in turn; one that fails is a row, and the rest go on."""
        config = self._config
        settings = WorkerSettings(
            "shoal.bench.scaling:ScalingWorker",
            config.crew_size or max(config.num_workers),
            msgspec.to_builtins(config),
            _ANSWER_S,
        )
        rows: list[Row] = []
        with self.open_workers(settings) as workers:
            for batch_size in config.batch_sizes:
                alone = self._measure_alone(workers, batch_size, tell)
                for num_workers in dict.fromkeys((1, *sorted(config.num_workers))):
                    place = ScalingPoint(NONE, batch_size, num_workers)
                    by_strategy = {}
                    if num_workers in config.num_workers:
                        by_strategy = {
                            name: self._measure(workers, place.under(name), tell)
                            for name in config.strategies
                        }
                    if num_workers == 1:
                        alone += [speeds for kept in by_strategy.values() for speeds in kept.ceilings]
                    found = list(map(self._in_its_unit, rows_of(place, by_strategy, alone)))
                    yield from found
                    rows += found
            metric = PROCESSORS[config.device]
            yield from processor_rows(metric, workers.ask("machine"), config.num_workers)
            if config.device == "cpu" and config.should_predict:
                found = self._mixings(workers)
                yield from found
                rows += found
        if config.should_predict:
            yield from predicted_curves(config, rows, tell)

    def _in_its_unit(self, row: Row) -> Row:
        """The same row, which for a model of text counts tokens a second."""
        if self._config.sequence_length is None or row.metric not in AS_TOKENS:
            return row
        return msgspec.structs.replace(row, metric=AS_TOKENS[row.metric], unit="tokens/s")

    def _mixings(self, workers: Workers) -> list[Row]:
        """How long workers take to add one model to another, all at once."""
        return [
            measured(MIXING, {"num_workers": count}, [max(seconds) for seconds in zip(*answers, strict=True)])
            for count in self._config.num_workers
            if (answers := workers.ask("mix", among=count))
        ]

    def _measure_alone(self, workers: Workers, batch_size: int, tell: Tell) -> list[Speeds]:
        point = ScalingPoint(NONE, batch_size, 1)
        if (error := self._open(workers, point)) is not None:
            raise BenchmarkError(error)
        tell(f"{point}: Running warmup...")
        workers.ask("warm_up", among=1, strategy=NONE)
        tell(f"{point}: Running benchmark...")
        speeds = []
        for number in range(self._config.num_iters):
            speeds.append(self._iterate(workers, point))
            tell(f"{point}: {iteration_text(number, speeds[-1][0], self._what)}")
        return speeds

    def _measure(self, workers: Workers, point: ScalingPoint, tell: Tell) -> PointSpeeds:
        kept = PointSpeeds()
        beside = point.under(NONE)
        try:
            if self._config.profile is not None and sends_by_itself(point.strategy):
                kept.error = f"{point.strategy} sends by itself, so that no profile can slow it down."
            kept.error = kept.error or self._open(workers, beside) or self._open(workers, point)
            if kept.error is None:
                workers.ask("attach", among=point.num_workers, strategy=point.strategy)
                tell(f"{point}: Running warmup...")
                for which in (beside, point):
                    workers.ask("warm_up", among=which.num_workers, strategy=which.strategy)
                tell(f"{point}: Running benchmark...")
                for number in range(self._config.num_iters):
                    order = (point, beside) if number % 2 == 0 else (beside, point)
                    found = {which: self._iterate(workers, which) for which in order}
                    kept.speeds.append(found[point])
                    kept.ceilings.append(found[beside])
                    tell(f"{point}: {iteration_text(number, found[point][0], self._what)}")
                if self._config.trace_folder is not None:
                    name = f"{point.strategy}-batch{point.batch_size}-np{point.num_workers}"
                    file = Path(self._config.trace_folder) / f"scaling-{name}.trace.json"
                    workers.ask("trace", among=point.num_workers, strategy=point.strategy, file=str(file))
                    tell(f"{point}: traced in {file}")
                workers.ask("close", among=point.num_workers, strategy=point.strategy)
        except BenchmarkError as error:
            kept = PointSpeeds(error=one_line(error))
        if kept.error is not None:
            tell(f"{point} failed: {kept.error}")
        return kept

    def _open(self, workers: Workers, point: ScalingPoint) -> str | None:
        """Why it cannot be, where all or some of the workers say so at once."""
        self._num_opened += 1
        errors = workers.ask(
            "open", among=point.num_workers, number=self._num_opened, point=msgspec.to_builtins(point)
        )
        said = [error for error in errors if error is not None]
        if said:
            workers.ask("close", among=point.num_workers, strategy=point.strategy)
        return said[0] if said else None

    def _iterate(self, workers: Workers, point: ScalingPoint) -> Speeds:
        answers = workers.ask("iterate", among=point.num_workers, strategy=point.strategy)
        config = self._config
        count = point.batch_size * config.num_batches_per_iter * (config.sequence_length or 1)
        return [count / seconds for seconds in answers]


def rows_of(
    place: ScalingPoint, by_strategy: Mapping[str, PointSpeeds], alone: Sequence[Speeds]
) -> Iterator[Row]:
    """The figures of all strategies at one number of workers and batch size, and of the ceiling there.

    `alone` are all iterations of one worker under `none`.
    """
    own_speed = statistics.fmean(speed for (speed,) in alone)
    ceilings = [speeds for kept in by_strategy.values() for speeds in kept.ceilings]
    if place.num_workers == 1:
        ceilings = list(alone)
    if ceilings:
        yield from _speed_rows(place.under(NONE), ceilings, own_speed)
    for name, kept in by_strategy.items():
        point = place.under(name)
        if kept.error is not None:
            yield measured(SPEED, point.key, error=kept.error)
            continue
        yield from _speed_rows(point, kept.speeds, own_speed)
        pairs = zip(kept.speeds, kept.ceilings, strict=True)
        yield measured(FRACTION, point.key, [sum(ours) / sum(theirs) for ours, theirs in pairs])
        for rank in range(point.num_workers):
            yield measured(WORKER_SPEED, {**point.key, "rank": rank}, [each[rank] for each in kept.speeds])


def processor_rows(
    metric: str, machines: Sequence[Sequence[Any]], num_workers: Sequence[int]
) -> Iterator[Row]:
    """How many cores or GPUs a worker has, where each rank has told its machine's name and their number."""
    for count in num_workers:
        processors = {str(name): int(number) for name, number in machines[:count]}
        yield measured(metric, {"num_workers": count}, [sum(processors.values()) / count])


def _speed_rows(point: ScalingPoint, speeds: Sequence[Speeds], own_speed: float) -> Iterator[Row]:
    totals = [sum(each) for each in speeds]
    yield measured(SPEED, point.key, totals)
    yield measured(EFFICIENCY, point.key, [total / (point.num_workers * own_speed) for total in totals])


def predicted_curves(config: ScalingConfig, rows: list[Row], tell: Tell) -> list[Curve]:
    """Return the curves to more workers than one start has measured; a benchmark never fails for them."""
    from shoal.bench.forecast.predict import forecast_curves, forecast_of

    report = Report(benchmark="scaling", created="", config=msgspec.to_builtins(config), rows=rows)
    try:
        return forecast_curves(forecast_of(report))
    except ShoalError as error:
        tell(f"no prediction: {error.what}")
        return []


# --- a worker ---


@dataclass
class OpenedModel:
    """A trainee, and what it was opened with."""

    trainee: Trainee
    batch_size: int
    strategy: Strategy | None = None
    is_warm: bool = False


class ScalingWorker:
    """The trainees of one worker; its methods are the orders."""

    def __init__(self, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> None:
        from shoal.models import model_named

        place.set_up_process()
        self._place = place
        self._config = config = msgspec.convert(arguments, ScalingConfig)
        self._stack = stack

        self._entry = model_named(config.model).at(
            config.image_size, config.num_classes, config.sequence_length
        )
        self._opened: dict[str, OpenedModel] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def open(self, number: int, point: dict[str, Any]) -> str | None:
        """Make a model, and a strategy for it; `none` has none. Why that cannot be, where it can't."""
        where = msgspec.convert(point, ScalingPoint)
        there = self._opened.get(where.strategy)
        if where.strategy == NONE and there is not None and there.batch_size == where.batch_size:
            return None
        stack = self._stacks[where.strategy] = self._stack.enter_context(contextlib.ExitStack())
        try:
            opened = OpenedModel(self._trainee(where.batch_size), where.batch_size)
            if where.strategy != NONE:
                group = stack.enter_context(self._open_group(number, where))
                workers = Counter(group.machines)
                local_sizes = [workers[machine] for machine in sorted(workers)]
                options = options_for(where.strategy, self._config, local_sizes)
                opened.strategy = make_contender(group, where.strategy, options)
        except UsageError as error:
            return " ".join(error.what.split())
        self._opened[where.strategy] = opened
        return None

    def attach(self, strategy: str) -> None:
        """Attaches the strategy to the model; all workers call it together."""
        opened = self._opened[strategy]
        assert opened.strategy is not None, "nothing attaches to none"
        attachment = opened.strategy.attach(opened.trainee.model, opened.trainee.optimizer)
        self._stacks[strategy].enter_context(attachment)

    def warm_up(self, strategy: str) -> None:
        """Batches that do not count, once for each model."""
        opened = self._opened[strategy]
        if not opened.is_warm:
            opened.trainee.seconds_of(opened.trainee.step, self._config.num_warmup_batches)
            opened.is_warm = True

    def iterate(self, strategy: str) -> float:
        """The seconds of one iteration of several batches."""
        trainee = self._opened[strategy].trainee
        return trainee.seconds_of(trainee.step, self._config.num_batches_per_iter)

    def trace(self, strategy: str, file: str) -> None:
        """One iteration more, of which the first worker writes what torch's profiler saw."""
        if self._place.rank != 0:
            self.iterate(strategy)
            return
        import torch

        with torch.profiler.profile() as profiler:
            self.iterate(strategy)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(file)

    def mix(self) -> list[float]:
        """The seconds of adding half of one model to half of another, several times."""
        import torch

        own, other = torch.zeros(2, self._entry.num_parameters())
        times_s = []
        for _ in range(_NUM_MIXINGS + 1):
            began_s = time.perf_counter()
            own.lerp_(other, 0.5)
            times_s.append(time.perf_counter() - began_s)
        return times_s[1:]

    def machine(self) -> list[Any]:
        """The name of this machine, and the cores or GPUs that it has for its workers."""
        import torch

        number = num_cores() if self._config.device == "cpu" else torch.cuda.device_count()
        return [socket.gethostname(), number]

    def close(self, strategy: str) -> None:
        """Detach it, leave its group, and let its memory go."""
        self._opened.pop(strategy, None)
        self._stacks.pop(strategy, contextlib.ExitStack()).close()

    def _trainee(self, batch_size: int) -> Trainee:
        config = self._config
        recipe = Recipe(
            entry=self._entry, batch_size=batch_size, learning_rate=config.learning_rate, seed=config.seed
        )
        return recipe.trainee(self._place.rank, self._place.device(config.device))

    def _open_group(self, number: int, point: ScalingPoint) -> Group:
        config = self._config
        group = self._place.open_group(
            f"{number}-{point.num_workers}",
            among=point.num_workers,
            workers_per_machine=config.workers_per_machine,
        )
        if config.profile is None:
            return group
        from shoal.group.wrappers import Shaped

        return Shaped(group, config.profile, between=config.between, seed=config.seed)
