"""`shoal bench accuracy`: to which accuracy workers come under each strategy, over steps, seconds and bytes.

One set of workers trains one contender after another on equal data, from equal parameters and with equal
learning rates. At each evaluation the workers stop, so that it counts neither as time nor as bytes. Accuracy
is on examples that nobody trains on: of the mean of all workers' models, and of the worst worker's own.

Contenders are neighbour averaging with BlueFog's tricks, or any strategies. The tricks: a smaller learning
rate where warm-up begins, an average of all workers now and then, and a decay of the learning rate after 25
instead of 30 parts in 90 of the run. What the samples say is `tables.accuracy`'.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import (
    Contender,
    Device,
    DeviceKind,
    NumServers,
    Trainee,
    WorkersPerMachine,
    check_data_dir,
    contender_of,
    make_contender,
    needs_servers,
    sends_by_itself,
    servers_of,
    strategy_contenders,
    workers_device,
)
from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell, curve, defaults_of, measured, same_fields
from shoal.bench.ranks import HostFlags
from shoal.bench.workers import (
    BenchPlace,
    LocalWorkers,
    OpenWorkers,
    Parent,
    Workers,
    WorkerSettings,
    one_line,
    server_place,
    start_servers,
)
from shoal.core import BenchmarkError, UsageError
from shoal.core.errors import did_you_mean
from shoal.core.run_options import flag
from shoal.report import Curve, Row

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import SGD

    from shoal.bench.contenders import Batch
    from shoal.group.wrappers import Metered
    from shoal.simulate.exact import LastRound
    from shoal.strategies.strategy import Strategy

Task = Literal["digits", "mnist"]
MODELS = ("small-mlp", "small-cnn")
ACCURACY, WORST, DISTANCE, LOSS = "accuracy", "worst_accuracy", "consensus_distance", "loss"
FINAL, WORST_FINAL, TO_TARGET = "final_accuracy", "worst_final_accuracy", "seconds_to_target"
BYTES, SPEED = "bytes_sent", "examples_per_s"
BYTES_TO_TARGET, STEPS_TO_TARGET = "bytes_to_target", "steps_to_target"
CURVES = (ACCURACY, WORST, DISTANCE, LOSS)
FIGURES = (FINAL, WORST_FINAL, TO_TARGET, BYTES_TO_TARGET, STEPS_TO_TARGET, BYTES, SPEED, DISTANCE)
"""At the end of a run, or at the target (left out where it was not reached); of all workers together."""
NUM_TESTS = {"digits": 360, "mnist": 10_000}
"""Examples that accuracy is taken on."""
SIDES, NUM_CLASSES = {"digits": 8, "mnist": 28}, 10
"""Of the images of both tasks, which have one channel."""
_ANSWER_S = 3600.0  # many steps of many workers on few cores, and an evaluation by each
_WARM_STEPS = 5
NUM_SEEDS = 3
STEPS, SHORT_STEPS = {"digits": 300, "mnist": 600}, 120
NUM_EVALUATIONS = 10
ORDERS = {"atc": "adapt-then-combine", "awc": "adapt-while-combine"}
REFERENCE = "all-reduce"
WARMUP, AVERAGE, DECAY, ALL = "warm-up", "average", "decay", "all"
TRICKS = {
    WARMUP: "smaller warm-up: the learning rate begins at a tenth of where it begins otherwise",
    AVERAGE: "periodic global average: all workers' parameters are averaged every {every} steps",
    DECAY: "faster decay: the learning rate falls to a tenth every {fast} steps instead of every {slow}",
    ALL: "the three together",
}
_PARTS, _WARM_PARTS, _SLOW_PARTS, _FAST_PARTS = 90, 5, 30, 25
"""BlueFog's 90 epochs: warm-up in the first 5, decay every 30, or every 25."""

AVERAGE_EVERY = 16
"""Steps. No divisor of the usual numbers of them: a run does not end with an average by chance."""


class AccuracyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom and for how long."""

    task: Task = "digits"
    model: str = "small-mlp"
    contenders: tuple[Contender, ...] = ()
    splits: tuple[str, ...] = ("iid",)
    num_workers: int = 8
    device: DeviceKind = "cpu"
    workers_per_machine: int | None = None
    num_servers: int = 1
    """Processes beside the workers, for `parameter-server` and `staleness-aware`."""
    steps: int = 300
    eval_every: int = 30
    batch_size: int = 16
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
        from shoal.data.splits import check_split

        for split in self.splits:
            check_split(split)


_USUAL = defaults_of(AccuracyConfig)


class AccuracyFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench accuracy`."""

    task: Annotated[Task, flag("What is learned.")] = _USUAL.task
    model: Annotated[
        str, flag("By which network: small-mlp, small-cnn, or your own as file.py:factory.", metavar="NAME")
    ] = _USUAL.model
    strategies: Annotated[
        tuple[str, ...] | None,
        flag(
            "These instead of the tricks; options may follow a name: 'neighbor topology=ring'.",
            metavar="NAME,...",
            shown=False,
        ),
    ] = None
    option: Annotated[
        dict[str, str], flag("Of the --strategies that have it; may be given often.", metavar="NAME=VALUE")
    ] = {}
    num_workers: Annotated[
        int | None, flag("Workers, one thread each.", "--np", "-np", ge=1, shown=str(_USUAL.num_workers))
    ] = None
    device: Device = "auto"
    splits: Annotated[
        tuple[str, ...], flag("How examples are divided: iid, dirichlet:CONCENTRATION.", metavar="SPLIT,...")
    ] = ("iid", "dirichlet:0.1")
    seeds: Annotated[
        int | None, flag("Independent process starts.", "--seeds", "--starts", ge=1, shown=str(NUM_SEEDS))
    ] = None
    steps: Annotated[int | None, flag("Of each worker.", ge=1, shown="300; 600 on mnist")] = None
    eval_every: Annotated[
        int | None, flag("Steps between evaluations.", ge=1, shown="a tenth of --steps")
    ] = None
    batch_size: Annotated[int, flag("Of each worker.", ge=1)] = _USUAL.batch_size
    learning_rate: Annotated[float, flag("Of SGD, the same for all.", "--lr", "--learning-rate", ge=0)] = (
        _USUAL.learning_rate
    )
    momentum: Annotated[float, flag("Of SGD, the same for all.", ge=0, le=1)] = _USUAL.momentum
    topology: Annotated[
        str | None, flag("Who averages with whom, of neighbor.", shown="one-peer-exponential")
    ] = None
    order: Annotated[
        Literal["both", "adapt-then-combine", "adapt-while-combine"],
        flag("Average after the step, or while gradients are computed."),
    ] = "both"
    global_average_every: Annotated[
        int | None,
        flag(
            "Steps from one average of all to the next: of the trick 'average', or of the --strategies "
            "that have it.",
            ge=1,
            shown=f"{AVERAGE_EVERY} for the trick",
        ),
    ] = None
    target_accuracy: Annotated[float, flag("Seconds and bytes are counted to it.")] = _USUAL.target_accuracy
    workers_per_machine: WorkersPerMachine = None
    num_servers: NumServers = None
    data_dir: Annotated[Path | None, flag("Has the files of MNIST.", metavar="DIR", shown=False)] = None

    def num_starts(self, hosts: HostFlags, *, is_short: bool) -> int:
        """Return as many as was asked for; by default a first look, or a launcher's ranks, have one."""
        is_one = is_short or hosts.launched_size is not None
        return self.seeds or (1 if is_one else NUM_SEEDS)


class AccuracyRunFlags(RunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark; how often it is started is what --seeds says."""

    starts: int = 1


def accuracy_command(flags: AccuracyFlags, hosts: HostFlags, run: AccuracyRunFlags) -> BenchmarkPlan:
    """To which accuracy workers come under each strategy: over steps, seconds and bytes.

    Without --strategies: BlueFog's tricks. Neighbour averaging in both orders, each plain, with a smaller
    warm-up, a periodic global average, a faster decay, and all three; all-reduce as the reference.
    """
    from shoal.bench.tables.accuracy import accuracy_items, summarize_accuracy

    config = accuracy_config(flags, hosts, run)
    run = msgspec.structs.replace(run, starts=flags.num_starts(hosts, is_short=run.short))
    where = hosts.starter(config.num_workers)
    if where is None:
        fetch_data(flags)
    return BenchmarkPlan(config, run, summarize_accuracy, accuracy_items, where=where)


def accuracy_config(flags: AccuracyFlags, hosts: HostFlags, run: RunFlags) -> AccuracyConfig:
    """Make of the flags what is trained; UsageError where they contradict each other."""
    check_data_dir(flags.data_dir, flags.task)
    check_model(flags.model, flags.task)
    size = hosts.num_workers(flags.num_workers, default=_USUAL.num_workers)
    steps = flags.steps or (SHORT_STEPS if run.short else STEPS[flags.task])
    tricks: list[str] = []
    if flags.strategies is None:
        if flags.option:
            raise UsageError("--option is for --strategies.", next_step="name some, or leave it out.")
        settings = TrickSettings(
            steps,
            size,
            flags.topology or "one-peer-exponential",
            tuple(ORDERS.values()) if flags.order == "both" else (flags.order,),
            flags.global_average_every or AVERAGE_EVERY,
            flags.workers_per_machine,
        )
        contenders, tricks = trick_contenders(settings), settings.legend()
    else:
        contenders = strategy_contenders(flags.strategies, _common_options(flags))
    resolved = {
        "splits": tuple(dict.fromkeys(flags.splits)),
        "num_workers": size,
        "device": workers_device(flags.device, hosts, size),
        "num_servers": servers_of(flags.num_servers, (contender.strategy for contender in contenders)),
        "steps": steps,
        "eval_every": flags.eval_every or max(1, steps // NUM_EVALUATIONS),
        "data_dir": None if flags.data_dir is None else str(flags.data_dir.absolute()),
    }
    fields = {**same_fields(flags, AccuracyConfig), **resolved}
    return AccuracyConfig(**fields, contenders=contenders, tricks=tricks, seed=run.seed)


def check_model(name: str, task: Task) -> None:
    """UsageError for a network that there is not, or that cannot tell the classes of the task apart."""
    if name in MODELS:
        return
    if ":" not in name:
        raise UsageError(
            f"There is no model {name!r} for {task}.{did_you_mean(name, MODELS)}",
            next_step=f"take one of {', '.join(MODELS)}, or your own as package.module:factory or "
            "file.py:factory.",
        )
    import torch

    from shoal.models import model_named

    shape = (1, SIDES[task], SIDES[task])
    model = model_named(name).build()
    try:
        with torch.no_grad():
            told = model(torch.zeros(2, *shape)).shape
    except Exception as error:
        raise UsageError(
            f"{name} fails on the images of {task}, of shape {shape}: {type(error).__name__}: {error}",
            next_step="let the factory return a model that takes them.",
        ) from error
    if len(told) != 2 or told[1] < NUM_CLASSES:
        raise UsageError(
            f"{name} returns logits of shape {tuple(told[1:])} for an image of {task}.",
            next_step=f"let its last layer have {NUM_CLASSES} outputs, one for each class.",
        )


def _common_options(flags: AccuracyFlags) -> dict[str, Any]:
    """Collect the options for all strategies that have them."""
    given = {
        "topology": flags.topology,
        "order": None if flags.order == "both" else flags.order,
        "global_average_every": flags.global_average_every,
    }
    return {**flags.option, **{name: str(value) for name, value in given.items() if value is not None}}


def fetch_data(flags: AccuracyFlags) -> None:
    """Find or fetch what is learned from once, before every worker looks for it."""
    if flags.task == "mnist":
        from shoal.data import mnist

        for is_training in (True, False):
            mnist(train=is_training, folder=flags.data_dir)


# --- tricks ---


class TrickSettings(msgspec.Struct, frozen=True):
    """What the contenders of the experiment with tricks share; UsageError for a topology that is none."""

    steps: int
    num_workers: int
    topology: str = "one-peer-exponential"
    orders: tuple[str, ...] = tuple(ORDERS.values())
    global_average_every: int = AVERAGE_EVERY
    workers_per_machine: int | None = None

    def __post_init__(self) -> None:
        from shoal.topology import make_topology

        make_topology(self.topology, self.num_workers, self.workers_per_machine or self.num_workers)

    @property
    def plain(self) -> dict[str, Any]:
        """The schedule of those that use no trick."""
        return {
            "warmup_steps": math.ceil(self.steps * _WARM_PARTS / _PARTS),
            "warmup_factor": 1 / self.num_workers,
            "decay_every": math.ceil(self.steps * _SLOW_PARTS / _PARTS),
            "decay_factor": 0.1,
        }

    @property
    def tricks(self) -> dict[str, dict[str, Any]]:
        """Says what each trick changes of it, by name."""
        each: dict[str, dict[str, Any]] = {
            WARMUP: {"warmup_factor": 0.1 / self.num_workers},
            AVERAGE: {"global_average_every": self.global_average_every},
            DECAY: {"decay_every": math.ceil(self.steps * _FAST_PARTS / _PARTS)},
        }
        return {**each, ALL: {name: value for changes in each.values() for name, value in changes.items()}}

    def legend(self) -> list[str]:
        """A line for each trick."""
        numbers = {
            "every": self.global_average_every,
            "fast": self.tricks[DECAY]["decay_every"],
            "slow": self.plain["decay_every"],
        }
        return [f"{name}: {text.format(**numbers)}" for name, text in TRICKS.items()]


def trick_contenders(settings: TrickSettings) -> tuple[Contender, ...]:
    """The reference, and for each order one without tricks, one with each, and one with all of them."""
    contenders = [contender_of(REFERENCE, REFERENCE, settings.plain)]
    for base, order in ORDERS.items():
        if order not in settings.orders:
            continue
        options = {**settings.plain, "order": order, "topology": settings.topology}
        contenders.append(contender_of(base, "neighbor", options))
        for trick, changes in settings.tricks.items():
            contenders.append(
                contender_of(f"{base}+{trick}", "neighbor", {**options, **changes}, base=base, trick=trick)
            )
    return tuple(contenders)


# --- the scenario ---


class AccuracyRun(msgspec.Struct, frozen=True):
    """One contender on one split; `number` tells it from all others."""

    number: int
    contender: Contender
    split: str

    @property
    def key(self) -> RowKey:
        """The key of its rows and curves."""
        return {"contender": self.contender.name, "split": self.split}

    @property
    def group_name(self) -> str:
        """The name of the group that its workers open."""
        return f"accuracy-{self.number}"

    def num_servers(self, config: AccuracyConfig) -> int:
        """How many processes there are beside the workers."""
        return config.num_servers if needs_servers(self.contender.strategy) else 0


class Evaluation(msgspec.Struct, frozen=True):
    """What one worker tells of the steps since the last evaluation, and of that which follows them."""

    seconds: float
    moved: dict[str, tuple[int, int]]
    """By operation: bytes sent and received."""
    accuracy: float
    """The accuracy of its own model."""
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


class AccuracyCourse:
    """How one run went, evaluation by evaluation."""

    def __init__(self, run: AccuracyRun) -> None:
        self.run = run
        self.axes: dict[str, list[float]] = {"step": [], "s": [], "bytes": []}
        self.values: dict[str, list[float]] = {metric: [] for metric in CURVES}

    def add(self, step: int, evaluations: list[Evaluation]) -> None:
        """Take all workers' evaluations after `step` steps of each; BenchmarkError when it has diverged."""
        first = evaluations[0]
        if not first.is_finite:
            raise BenchmarkError(
                f"the loss was no finite number after {step} steps: it diverged.",
                next_step="give a smaller --lr.",
            )
        moved = float(bytes_moved([evaluation.moved for evaluation in evaluations]))
        # they stop for an evaluation together: the slowest one's time is that of all
        seconds = max(evaluation.seconds for evaluation in evaluations)
        so_far = {name: values[-1] if values else 0.0 for name, values in self.axes.items()}
        self.axes["step"].append(float(step))
        self.axes["s"].append(so_far["s"] + seconds)
        self.axes["bytes"].append(so_far["bytes"] + moved)
        self.values[ACCURACY].append(first.mean_accuracy)
        self.values[WORST].append(min(evaluation.accuracy for evaluation in evaluations))
        self.values[DISTANCE].append(first.consensus_distance or 0.0)
        self.values[LOSS].append(first.mean_loss or 0.0)

    def told(self, config: AccuracyConfig) -> Iterator[Row | Curve]:
        """Its rows and curves."""
        axes = dict(self.axes)
        finals = {
            FINAL: self.values[ACCURACY][-1],
            WORST_FINAL: self.values[WORST][-1],
            DISTANCE: self.values[DISTANCE][-1],
            SPEED: config.num_workers * config.batch_size * config.steps / axes["s"][-1],
        }
        if sends_by_itself(self.run.contender.strategy):
            del axes["bytes"]
        else:
            finals[BYTES] = axes["bytes"][-1]
        reached = where_reached(self.values[ACCURACY], config.target_accuracy)
        if reached is not None:
            finals |= {TO_TARGET: axes["s"][reached], STEPS_TO_TARGET: axes["step"][reached]}
            if "bytes" in axes:
                finals[BYTES_TO_TARGET] = axes["bytes"][reached]
        for metric in FIGURES:
            if metric in finals:
                yield measured(metric, self.run.key, [finals[metric]])
        for metric in CURVES:
            yield curve(metric, self.run.key, {**axes, "value": self.values[metric]})


class AccuracyScenario:
    """One start: every contender on every split, with one seed."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), AccuracyConfig), seed=seed)
        self.open_workers: OpenWorkers = LocalWorkers

    def run(self, tell: Tell) -> Iterator[Row | Curve]:
        """One run after another; one that fails is a row, and the rest go on."""
        config = self._config
        settings = WorkerSettings(
            "shoal.bench.accuracy:AccuracyWorker", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        pairs = [(split, contender) for split in config.splits for contender in config.contenders]
        with self.open_workers(settings) as workers:
            tell(f"{config.num_workers} workers load {config.task}")
            workers.ask("ready")
            for number, (split, contender) in enumerate(pairs, 1):
                run = AccuracyRun(number, contender, split)
                tell(f"{number} of {len(pairs)}: {contender.name}, {split}")
                try:
                    yield from self._train(workers, run).told(config)
                except BenchmarkError as error:
                    tell(f"{contender.name}, {split} failed: {one_line(error)}")
                    yield measured(FINAL, run.key, error=one_line(error))

    def _train(self, workers: Workers, run: AccuracyRun) -> AccuracyCourse:
        config, course = self._config, AccuracyCourse(run)
        role = {"run": msgspec.to_builtins(run), "config": msgspec.to_builtins(config)}
        start_servers(workers, "shoal.bench.accuracy:serve_parameters", run.num_servers(config), **role)
        step = 0
        evaluations = workers.ask("begin", run=msgspec.to_builtins(run))
        try:
            course.add(step, msgspec.convert(evaluations, list[Evaluation]))
            while step < config.steps:
                num_steps = min(config.eval_every, config.steps - step)
                step += num_steps
                course.add(step, msgspec.convert(workers.ask("train", num_steps=num_steps), list[Evaluation]))
        finally:
            if workers.is_running:
                workers.ask("finish")
        return course


def bytes_moved(moved: list[dict[str, tuple[int, int]]]) -> int:
    """Count all bytes that went from one process to another, each once.

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


# --- a worker ---


def serve_parameters(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one run until the workers are done with it."""
    place, role = server_place(arguments)
    run, config = msgspec.convert(role["run"], AccuracyRun), msgspec.convert(role["config"], AccuracyConfig)
    with place.open_with_servers(run.group_name, config.num_servers, role["server"]) as group:
        strategy = make_contender(group, run.contender.strategy, run.contender.options)
        with contextlib.suppress(SystemExit):
            strategy.attach(*beginner(config, place.device(config.device)))


def trainee_of(config: AccuracyConfig, part: Batch, rank: int) -> Trainee:
    """Make what one worker trains, where its examples are."""
    from shoal.data.seeds import mix
    from shoal.simulate.tasks import batches_of

    device = part[0].device
    batches = batches_of(part, config.batch_size, mix(config.seed, rank))
    return Trainee(*beginner(config, device), batches, device)


class AccuracyWorker:
    """What one worker has of the data, and the trainee under way; its methods are the orders."""

    def __init__(self, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> None:
        place.set_up_process()
        self._place = place
        self._config = config = msgspec.convert(arguments, AccuracyConfig)
        device = place.device(config.device)

        def moved(batch: Batch) -> Batch:
            return batch[0].to(device), batch[1].to(device)

        self._parts = {split: moved(part) for split, part in parts_of(config, place.rank).items()}
        self._test = moved(examples_of(config, train=False))
        self._probe, _ = beginner(config, device)
        self._attached: tuple[Trainee, Strategy, Metered, LastRound] | None = None
        self._stack = contextlib.ExitStack()
        stack.push(self._stack)

    def ready(self) -> None:
        """Do what takes longer when a process does it for the first time."""
        from shoal.simulate.tasks import accuracy_of

        trainee = trainee_of(self._config, next(iter(self._parts.values())), self._place.rank)
        for _ in range(_WARM_STEPS):
            trainee.step()
        accuracy_of(self._probe, self._test)

    def begin(self, run: dict[str, Any]) -> Evaluation:
        """Attach the contender to a model that has learned nothing; collective, as all that follows."""
        from shoal.group.wrappers import Metered
        from shoal.simulate.exact import LastRound

        chosen = msgspec.convert(run, AccuracyRun)
        group = self._place.open_group(
            chosen.group_name,
            workers_per_machine=self._config.workers_per_machine,
            num_servers=chosen.num_servers(self._config),
        )
        metered = Metered(self._stack.enter_context(group))
        trainee = trainee_of(self._config, self._parts[chosen.split], self._place.rank)
        contender = chosen.contender
        strategy = make_contender(metered, contender.strategy, contender.options)
        self._stack.enter_context(strategy.attach(trainee.model, trainee.optimizer))
        self._attached = trainee, strategy, metered, LastRound(strategy, trainee.model)
        metered.reset()
        return self._evaluate(seconds=0.0)

    def train(self, num_steps: int) -> Evaluation:
        """So many steps, and an evaluation."""
        assert self._attached is not None, "trained before it has begun"
        trainee, _, _, last_round = self._attached

        def step() -> None:
            trainee.step()
            last_round.stepped()

        return self._evaluate(trainee.seconds_of(step, num_steps))

    def finish(self) -> None:
        """Detach, and leave the group."""
        self._attached = None
        self._stack.close()

    def _evaluate(self, seconds: float) -> Evaluation:
        from shoal.simulate.tasks import accuracy_of
        from shoal.strategies.averaging import common_model, consensus_distance

        assert self._attached is not None
        trainee, strategy, metered, last_round = self._attached
        traffics = metered.totals()
        moved = {name: (traffic.sent_bytes, traffic.received_bytes) for name, traffic in traffics.items()}
        strategy.settle()
        distance = consensus_distance(strategy.group, last_round.parameters or strategy.session.trainable)
        mean = common_model(metered, trainee.model, are_equal=False)
        accuracy = accuracy_of(trainee.model, self._test).value
        metered.reset()
        if self._place.rank != 0:
            return Evaluation(seconds, moved, accuracy, distance)
        self._probe.load_state_dict(mean)
        score = accuracy_of(self._probe, self._test)
        return Evaluation(seconds, moved, accuracy, distance, score.value, score.loss)


def beginner(config: AccuracyConfig, device: torch.device | None = None) -> tuple[nn.Module, SGD]:
    """Make a model that has learned nothing, equal for equal seeds, and its optimizer."""
    import torch
    from torch.optim import SGD

    from shoal.models import mlp, model_named, small_cnn, small_mlp
    from shoal.simulate.tasks import MNIST_WIDTHS

    torch.manual_seed(config.seed)
    model: nn.Module
    if ":" in config.model:
        model = model_named(config.model).build()
    elif config.model == "small-cnn":
        model = small_cnn()
    else:
        model = small_mlp() if config.task == "digits" else mlp(MNIST_WIDTHS)
    model.to(device or "cpu")
    return model, SGD(model.parameters(), lr=config.learning_rate, momentum=config.momentum)


def examples_of(config: AccuracyConfig, *, train: bool) -> Batch:
    """Load the examples of the task."""
    from shoal.data import digits, mnist

    return digits(train=train) if config.task == "digits" else mnist(train=train, folder=config.data_dir)


def parts_of(config: AccuracyConfig, rank: int) -> dict[str, Batch]:
    """What one worker trains on, by split; the rest of the examples is not kept."""
    import torch

    from shoal.data.splits import divide

    x, y = examples_of(config, train=True)
    parts = {}
    for split in config.splits:
        own = torch.from_numpy(divide(y.numpy(), config.num_workers, split, config.seed)[rank])
        parts[split] = x[own], y[own]
    return parts
