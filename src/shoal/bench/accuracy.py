"""`shoal bench accuracy`: to which accuracy workers come under each strategy, over steps, seconds and bytes.

One set of workers trains one contender after another on equal data, from equal parameters and with equal
learning rates. At each evaluation the workers stop, so that it counts neither as time nor as bytes. Accuracy
is on examples that nobody trains on: of the mean of all workers' models, and of the worst worker's own. Who
takes part is `accuracy_contenders`', what a worker does `accuracy_worker`'s, what the samples say
`accuracy_summary`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from shoal.bench.accuracy_contenders import Contender
from shoal.bench.contenders import needs_servers, sends_by_itself
from shoal.bench.frame import Direction, Measured, MeasuredCurve, Metrics, RowKey, Tell, measured
from shoal.bench.workers import Crew, CrewSettings, Helper, OpenCrew, Workers, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.data.splits import IID, check_split

Task = Literal["digits", "mnist"]
Model = Literal["small-mlp", "small-cnn"]
ACCURACY, WORST, DISTANCE, LOSS = "accuracy", "worst_accuracy", "consensus_distance", "loss"
FINAL, WORST_FINAL, TO_TARGET = "final_accuracy", "worst_final_accuracy", "seconds_to_target"
BYTES, SPEED = "bytes_sent", "examples_per_s"
CURVES: dict[str, Direction] = {ACCURACY: "higher", WORST: "higher", DISTANCE: "lower", LOSS: "lower"}
METRICS: Metrics = {
    FINAL: ("", "higher"),
    WORST_FINAL: ("", "higher"),
    TO_TARGET: ("s", "lower"),
    BYTES: ("B", "lower"),
    SPEED: ("1/s", "higher"),
    DISTANCE: ("", "lower"),
}
"""At the end of a run; of all workers together. `seconds_to_target` is left out where it was not reached."""
_measured = partial(measured, METRICS)
NUM_TESTS = {"digits": 360, "mnist": 10_000}
"""Examples that accuracy is taken on."""
_ANSWER_S = 3600.0  # many steps of many workers on few cores, and an evaluation by each


class AccuracyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom and for how long."""

    task: Task = "digits"
    model: Model = "small-mlp"
    contenders: tuple[Contender, ...] = ()
    splits: tuple[str, ...] = (IID,)
    num_workers: int = 8
    device: Literal["cpu", "cuda"] = "cpu"
    workers_per_machine: int | None = None
    num_servers: int = 1
    """Processes beside the workers, for `parameter-server` and `staleness-aware`."""
    steps: int = 300
    """Of each worker."""
    eval_every: int = 30
    batch_size: int = 16
    """Of each worker."""
    learning_rate: float = 0.1
    """BlueFog's 0.0125 for each of 8 workers."""
    momentum: float = 0.9
    target_accuracy: float = 0.95
    data_dir: str | None = None
    tricks: list[str] = []
    """What the names of tricks mean."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_workers, self.num_servers, self.steps, self.eval_every, self.batch_size) < 1:
            raise UsageError(
                "Without workers, servers, steps or examples nothing is trained.", next_step="give 1 or more."
            )
        if not self.splits or not self.contenders:
            raise UsageError(
                "Without a split and a strategy nothing is trained.", next_step="say --splits iid."
            )
        if not 0 < self.target_accuracy <= 1:
            raise UsageError(
                f"--target-accuracy {self.target_accuracy} is no share of the examples.",
                next_step="give a number up to 1, for example 0.95.",
            )
        for split in self.splits:
            check_split(split)


class Run(msgspec.Struct, frozen=True):
    """One contender on one split; `number` tells it from all others of the crew."""

    number: int
    contender: Contender
    split: str

    @property
    def key(self) -> RowKey:
        """Of its rows and curves."""
        return {"contender": self.contender.name, "split": self.split}

    @property
    def needs_servers(self) -> bool:
        """Whether there are processes beside the workers."""
        return needs_servers(self.contender.strategy)

    @property
    def has_counted_bytes(self) -> bool:
        """Whether all that it sends goes through the group."""
        return not sends_by_itself(self.contender.strategy)


class ServerRole(msgspec.Struct, frozen=True):
    """Which server of which run a process is."""

    run: Run
    server: int
    config: AccuracyConfig


class Look(msgspec.Struct, frozen=True):
    """What one worker tells of the steps since the last evaluation, and of that which follows them."""

    seconds: float
    moved: dict[str, tuple[int, int]]
    """By operation: bytes sent and received."""
    accuracy: float
    """Of its own model."""
    consensus_distance: float | None
    """None where it is not finite."""
    mean_accuracy: float = 0.0
    """Of the mean of all models; the first worker alone tells it."""
    mean_loss: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the first worker's figures are numbers."""
        figures = (self.consensus_distance, self.mean_loss)
        return all(figure is not None and math.isfinite(figure) for figure in figures)


class Course:
    """How one run went, evaluation by evaluation."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.axes: dict[str, list[float]] = {"step": [], "s": [], "bytes": []}
        self.values: dict[str, list[float]] = {metric: [] for metric in CURVES}

    def add(self, step: int, looks: list[Look]) -> None:
        """All workers' looks after `step` steps of each; BenchmarkError when it has diverged."""
        first = looks[0]
        if not first.is_finite:
            raise BenchmarkError(
                f"the loss was no finite number after {step} steps: it diverged.",
                next_step="give a smaller --lr.",
            )
        moved = float(bytes_moved([look.moved for look in looks]))
        # they stop for an evaluation together: the slowest one's time is that of all
        seconds = max(look.seconds for look in looks)
        so_far = {name: values[-1] if values else 0.0 for name, values in self.axes.items()}
        self.axes["step"].append(float(step))
        self.axes["s"].append(so_far["s"] + seconds)
        self.axes["bytes"].append(so_far["bytes"] + moved)
        self.values[ACCURACY].append(first.mean_accuracy)
        self.values[WORST].append(min(look.accuracy for look in looks))
        self.values[DISTANCE].append(first.consensus_distance or 0.0)
        self.values[LOSS].append(first.mean_loss or 0.0)

    def told(self, config: AccuracyConfig) -> Iterator[Measured | MeasuredCurve]:
        """Its rows and curves."""
        axes = dict(self.axes)
        finals = {
            FINAL: self.values[ACCURACY][-1],
            WORST_FINAL: self.values[WORST][-1],
            DISTANCE: self.values[DISTANCE][-1],
            SPEED: config.num_workers * config.batch_size * config.steps / axes["s"][-1],
        }
        if self.run.has_counted_bytes:
            finals[BYTES] = axes["bytes"][-1]
        else:
            del axes["bytes"]
        reached = where_reached(self.values[ACCURACY], config.target_accuracy)
        if reached is not None:
            finals[TO_TARGET] = axes["s"][reached]
        for metric in METRICS:
            if metric in finals:
                yield _measured(metric, self.run.key, [finals[metric]])
        for metric, direction in CURVES.items():
            points = {**axes, "value": self.values[metric]}
            yield MeasuredCurve(key=self.run.key, metric=metric, unit="", direction=direction, points=points)


class AccuracyScenario:
    """One start: every contender on every split, with one seed."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), AccuracyConfig), seed=seed)
        self.open_crew: OpenCrew = Crew

    def run(self, tell: Tell) -> Iterator[Measured | MeasuredCurve]:
        """One run after another; one that fails is a row, and the rest go on."""
        config = self._config
        settings = CrewSettings(
            "shoal.bench.accuracy_worker:work", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        pairs = [(split, contender) for split in config.splits for contender in config.contenders]
        with self.open_crew(settings) as crew:
            tell(f"{config.num_workers} workers load {config.task}")
            crew.ask("ready")
            for number, (split, contender) in enumerate(pairs, 1):
                run = Run(number, contender, split)
                tell(f"{number} of {len(pairs)}: {contender.name}, {split}")
                try:
                    yield from self._train(crew, run).told(config)
                except BenchmarkError as error:
                    tell(f"{contender.name}, {split} failed: {one_line(error)}")
                    yield _measured(FINAL, run.key, error=one_line(error))

    def _train(self, crew: Workers, run: Run) -> Course:
        config, course = self._config, Course(run)
        for server in range(config.num_servers if run.needs_servers else 0):
            role = msgspec.to_builtins(ServerRole(run, server, config))
            crew.hire(Helper("shoal.bench.accuracy_worker:serve_parameters", f"server {server}", role))
        step = 0
        looks = crew.ask("begin", run=msgspec.to_builtins(run))
        try:
            course.add(step, msgspec.convert(looks, list[Look]))
            while step < config.steps:
                num_steps = min(config.eval_every, config.steps - step)
                step += num_steps
                course.add(step, msgspec.convert(crew.ask("train", num_steps=num_steps), list[Look]))
        finally:
            if crew.is_running:
                crew.ask("finish")
        return course


def bytes_moved(moved: list[dict[str, tuple[int, int]]]) -> int:
    """All bytes that went from one process to another, each counted once.

    What one side alone asks for, as a fetch or a put, only that side has counted; all else both have.
    """
    total: dict[str, tuple[int, int]] = {}
    for worker in moved:
        for operation, (sent, received) in worker.items():
            before = total.get(operation, (0, 0))
            total[operation] = before[0] + sent, before[1] + received
    return sum(max(sides) for sides in total.values())


def where_reached(values: list[float], target: float) -> int | None:
    """The first evaluation at which the target was reached; None for never."""
    return next((index for index, value in enumerate(values) if value >= target), None)
