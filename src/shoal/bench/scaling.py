"""`shoal bench scaling`: images a second under each strategy, from one worker to many.

As BlueFog's throughput page: synthetic batches, a warm-up, then iterations of several batches each. Every
iteration has one of `none` as neighbour in time, where as many workers share nothing: the ceiling. One worker
alone under `none` is what efficiency is measured by. What a worker does is `scaling_worker`'s, what the
figures say `scaling_summary`'s, and what they let expect of more workers `predict`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import NONE, needs_servers, sends_by_itself
from shoal.bench.document_figures import iteration_text, workers_text
from shoal.bench.frame import Measured, MeasuredCurve, Metrics, RowKey, Tell, measured
from shoal.bench.workers import Crew, CrewSettings, OpenCrew, Workers, one_line
from shoal.core import BenchmarkError, UsageError

SPEED, WORKER_SPEED = "images_per_s", "images_per_s_per_worker"
EFFICIENCY, FRACTION = "scaling_efficiency", "fraction_of_ceiling"
PROCESSORS = {"cpu": "cores_per_worker", "cuda": "gpus_per_worker"}
"""What workers of a machine divide among them, by device."""
MIXING = "mixing"
METRICS: Metrics = {
    SPEED: ("images/s", "higher"),
    WORKER_SPEED: ("images/s", "higher"),
    EFFICIENCY: ("", "higher"),
    FRACTION: ("", "higher"),
    PROCESSORS["cpu"]: ("", "higher"),
    PROCESSORS["cuda"]: ("", "higher"),
    MIXING: ("s", "lower"),
}
_measured = partial(measured, METRICS)
_ANSWER_S = 3600.0  # ten batches of a large model take one core many minutes


class ScalingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom, and for how long."""

    model: str = "resnet50"
    image_size: int = 224
    """The side of the square images."""
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
    strategies: tuple[str, ...] = ("neighbor", "hierarchical", "all-reduce")
    options: dict[str, dict[str, Any]] = {}
    """Of each strategy, where others than the document's and its own were asked for."""
    is_dynamic: bool = True
    """Whether neighbours change from round to round, one at a time."""
    is_adapt_then_combine: bool = False
    num_warmup_batches: int = 10
    num_batches_per_iter: int = 10
    num_iters: int = 10
    learning_rate: float = 0.01
    device: Literal["cpu", "cuda"] = "cpu"
    profile: str | None = None
    """A network that the group is made as slow as: a preset's name or a TOML file."""
    between: Literal["workers", "machines"] = "workers"
    """Whose links the profile describes."""
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


class Point(msgspec.Struct, frozen=True):
    """One measured combination."""

    strategy: str
    batch_size: int
    num_workers: int

    @property
    def key(self) -> RowKey:
        """Of its rows."""
        return {
            "strategy": self.strategy,
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
        }

    def under(self, strategy: str) -> Point:
        """The same with another strategy."""
        return msgspec.structs.replace(self, strategy=strategy)

    def __str__(self) -> str:
        return f"{self.strategy}, {workers_text(self.num_workers)}, batch {self.batch_size}"


Speeds = list[float]
"""Images a second of each worker, by rank, in one iteration."""


class Lane(msgspec.Struct):
    """All that was measured at one point, or why it could not be."""

    speeds: list[Speeds] = []
    ceilings: list[Speeds] = []
    """The neighbours in time of `speeds`, under `none`."""
    error: str | None = None


class ScalingScenario:
    """One start: a crew that trains at each point in turn."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), ScalingConfig), seed=seed)
        self._num_opened = 0
        self.open_crew: OpenCrew = Crew

    def run(self, tell: Tell) -> Iterator[Measured | MeasuredCurve]:
        """Every point in turn; one that fails is a row, and the rest go on."""
        config = self._config
        settings = CrewSettings(
            "shoal.bench.scaling_worker:work",
            config.crew_size or max(config.num_workers),
            msgspec.to_builtins(config),
            _ANSWER_S,
        )
        rows: list[Measured] = []
        with self.open_crew(settings) as crew:
            for batch_size in config.batch_sizes:
                alone = self._measure_alone(crew, batch_size, tell)
                for num_workers in dict.fromkeys((1, *sorted(config.num_workers))):
                    place = Point(NONE, batch_size, num_workers)
                    lanes = {}
                    if num_workers in config.num_workers:
                        lanes = {
                            name: self._measure(crew, place.under(name), tell) for name in config.strategies
                        }
                    if num_workers == 1:
                        alone += [speeds for lane in lanes.values() for speeds in lane.ceilings]
                    found = list(rows_of(place, lanes, alone))
                    yield from found
                    rows += found
            metric = PROCESSORS[config.device]
            yield from processor_rows(metric, crew.ask("machine"), config.num_workers)
            if config.device == "cpu" and config.should_predict:
                found = self._mixings(crew)
                yield from found
                rows += found
        if config.should_predict:
            from shoal.bench.scaling_forecast import predicted_curves

            yield from predicted_curves(config, rows, tell)

    def _mixings(self, crew: Workers) -> list[Measured]:
        """How long workers take to add one model to another, all at once."""
        return [
            _measured(
                MIXING, {"num_workers": count}, [max(seconds) for seconds in zip(*answers, strict=True)]
            )
            for count in self._config.num_workers
            if (answers := crew.ask("mix", among=count))
        ]

    def _measure_alone(self, crew: Workers, batch_size: int, tell: Tell) -> list[Speeds]:
        point = Point(NONE, batch_size, 1)
        if (error := self._open(crew, point)) is not None:
            raise BenchmarkError(error)
        tell(f"{point}: Running warmup...")
        self._warm_up(crew, point)
        tell(f"{point}: Running benchmark...")
        speeds = []
        for number in range(self._config.num_iters):
            speeds.append(self._iterate(crew, point))
            tell(f"{point}: {iteration_text(number, speeds[-1][0])}")
        return speeds

    def _measure(self, crew: Workers, point: Point, tell: Tell) -> Lane:
        lane = Lane()
        beside = point.under(NONE)
        try:
            lane.error = self._refusal(point) or self._open(crew, beside) or self._open(crew, point)
            if lane.error is None:
                crew.ask("attach", among=point.num_workers, strategy=point.strategy)
                tell(f"{point}: Running warmup...")
                self._warm_up(crew, beside)
                self._warm_up(crew, point)
                tell(f"{point}: Running benchmark...")
                for number in range(self._config.num_iters):
                    order = (point, beside) if number % 2 == 0 else (beside, point)
                    found = {which: self._iterate(crew, which) for which in order}
                    lane.speeds.append(found[point])
                    lane.ceilings.append(found[beside])
                    tell(f"{point}: {iteration_text(number, found[point][0])}")
                self._trace(crew, point, tell)
                crew.ask("close", among=point.num_workers, strategy=point.strategy)
        except BenchmarkError as error:
            lane = Lane(error=one_line(error))
        if lane.error is not None:
            tell(f"{point} failed: {lane.error}")
        return lane

    def _refusal(self, point: Point) -> str | None:
        if self._config.profile is not None and sends_by_itself(point.strategy):
            return f"{point.strategy} sends by itself, so that no profile can slow it down."
        return None

    def _open(self, crew: Workers, point: Point) -> str | None:
        """Why it cannot be, where all or some of the workers say so at once."""
        self._num_opened += 1
        errors = crew.ask(
            "open", among=point.num_workers, number=self._num_opened, point=msgspec.to_builtins(point)
        )
        said = [error for error in errors if error is not None]
        if said:
            crew.ask("close", among=point.num_workers, strategy=point.strategy)
        return said[0] if said else None

    def _warm_up(self, crew: Workers, point: Point) -> None:
        crew.ask("warm_up", among=point.num_workers, strategy=point.strategy)

    def _iterate(self, crew: Workers, point: Point) -> Speeds:
        answers = crew.ask("iterate", among=point.num_workers, strategy=point.strategy)
        num_images = point.batch_size * self._config.num_batches_per_iter
        return [num_images / seconds for seconds in answers]

    def _trace(self, crew: Workers, point: Point, tell: Tell) -> None:
        if self._config.trace_folder is None:
            return
        name = f"{point.strategy}-batch{point.batch_size}-np{point.num_workers}"
        file = Path(self._config.trace_folder) / f"scaling-{name}.trace.json"
        crew.ask("trace", among=point.num_workers, strategy=point.strategy, file=str(file))
        tell(f"{point}: traced in {file}")


def rows_of(place: Point, lanes: Mapping[str, Lane], alone: Sequence[Speeds]) -> Iterator[Measured]:
    """The figures of all strategies at one number of workers and batch size, and of the ceiling there.

    `alone` are all iterations of one worker under `none`.
    """
    own_speed = statistics.fmean(speed for (speed,) in alone)
    ceilings = [speeds for lane in lanes.values() for speeds in lane.ceilings]
    if place.num_workers == 1:
        ceilings = list(alone)
    if ceilings:
        yield from _speed_rows(place.under(NONE), ceilings, own_speed)
    for name, lane in lanes.items():
        point = place.under(name)
        if lane.error is not None:
            yield _measured(SPEED, point.key, error=lane.error)
            continue
        yield from _speed_rows(point, lane.speeds, own_speed)
        pairs = zip(lane.speeds, lane.ceilings, strict=True)
        yield _measured(FRACTION, point.key, [sum(ours) / sum(theirs) for ours, theirs in pairs])
        for rank in range(point.num_workers):
            yield _measured(WORKER_SPEED, {**point.key, "rank": rank}, [each[rank] for each in lane.speeds])


def processor_rows(
    metric: str, machines: Sequence[Sequence[Any]], num_workers: Sequence[int]
) -> Iterator[Measured]:
    """How many cores or GPUs a worker has, where each rank has told its machine's name and their number."""
    for count in num_workers:
        processors = {str(name): int(number) for name, number in machines[:count]}
        yield _measured(metric, {"num_workers": count}, [sum(processors.values()) / count])


def _speed_rows(point: Point, speeds: Sequence[Speeds], own_speed: float) -> Iterator[Measured]:
    totals = [sum(each) for each in speeds]
    yield _measured(SPEED, point.key, totals)
    yield _measured(EFFICIENCY, point.key, [total / (point.num_workers * own_speed) for total in totals])
