"""`shoal bench training`: how much of the speed of workers that share nothing is left under each strategy.

One set of workers holds a model for every strategy and one for `none`, to which nothing is attached: the
ceiling. A block of a strategy and one of `none` are neighbours in time, and their ratio is what counts. What
the samples say is `tables.training`'; servers and workers that are started by hand are `processes.by_hand`'s.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import (
    NONE,
    Device,
    DeviceKind,
    Laps,
    NoCuda,
    NumServers,
    Recipe,
    SequenceLength,
    StrategyOption,
    Trainee,
    WorkersPerMachine,
    beside_none,
    is_ddp,
    is_free_running,
    make_contender,
    needs_servers,
    options_of,
    servers_of,
    tell_inputs,
    workers_device,
)
from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell, defaults_of, measured
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
from shoal.report import Row
from shoal.report.tables import emit

if TYPE_CHECKING:
    import torch

    from shoal.group.base import Group

DEFAULT_STRATEGIES = ("all-reduce", "neighbor", "pair", "sma", "ddp")
_ANSWER_S = 900.0  # a block of a slow worker with a large model on a CPU
OPTIMIZERS = {
    "sync-sgd": "all-reduce",
    "sync-sgd-nccl": "all-reduce",
    "sync-sgd-hierarchical-nccl": "all-reduce",
    "async-sgd": "pair",
    "sma": "sma",
}
"""Our strategy of each. The last word of the NCCL ones is what carries it: here that is the group itself, in
which several machines always reduce inside each of them first."""
_OPTIMIZER_NAMES = "sync-sgd, async-sgd, sma, sync-sgd-nccl, sync-sgd-hierarchical-nccl"
FRACTION, SPEED, OWN_SPEED = "fraction_of_ceiling", "examples_per_s", "examples_per_s_per_worker"
ITERATION, OWN_FRACTION, WAITED = "seconds_per_iteration", "fraction_of_own_speed", "waited"
FIGURES = (FRACTION, SPEED, OWN_SPEED, ITERATION, OWN_FRACTION, WAITED)
"""In the order in which a reader asks for them: ratios of neighbouring blocks; the speed of all workers
together in a block, and of each; a worker's iterations; ratios of a worker's own speed; how long a worker
waited for another in a block."""


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, and for how long."""

    model: str = "mlp"
    image_size: int | None = None
    """The side of the images; None is the model's own, or that it takes none."""
    sequence_length: int | None = None
    """Tokens of an example, where the model reads text."""
    device: DeviceKind = "cpu"
    batch_size: int = 64
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    options: dict[str, dict[str, Any]] = {}
    """Of each strategy, where it has others than its defaults."""
    num_workers: int = 2
    workers_per_machine: int | None = None
    num_servers: int = 1
    """Processes beside the workers, for `parameter-server` and `staleness-aware`."""
    num_pairs: int = 10
    """Blocks of each strategy, each with one of `none` beside it."""
    num_warmup: int = 3
    block_s: float = 1.0
    iterations: int | None = None
    """In a block of a strategy whose workers wait for each other; by default as many as `block_s` holds."""
    slow_rank: int | None = None
    """This worker sleeps in every iteration, also under `none`."""
    slow_factor: float = 10.0
    """How many times as long its iterations take."""
    kungfu: str | None = None
    """What KungFu calls the strategy, where it was asked for by that name."""
    learning_rate: float = 0.01
    momentum: float = 0.9
    seed: int = 0

    def servers_of(self, strategy: str) -> int:
        """How many processes there are beside the workers of a strategy."""
        return self.num_servers if needs_servers(strategy) else 0

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise UsageError("Strategies with servers need one.", next_step="give --num-servers 1 or more.")
        if min(self.num_workers, self.num_pairs, self.batch_size, self.num_warmup) < 1:
            raise UsageError(
                "Without workers, warm-up, pairs or examples nothing is measured.",
                next_step="give 1 or more of each.",
            )
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.num_workers:
            raise UsageError(
                f"There is no rank {self.slow_rank} among {self.num_workers} workers.",
                next_step=f"give --slow-worker RANK:FACTOR with a rank from 0 to {self.num_workers - 1}.",
            )


_USUAL = defaults_of(TrainingConfig)
_SHORT = TrainingConfig(num_pairs=3, block_s=0.3)


class TrainingFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench training`, by our names and by those that KungFu's users type."""

    model: Annotated[
        str,
        flag(
            "What is trained, on synthetic data: mlp, ResNet50, gpt-nano, …, or your own as file.py:factory.",
            metavar="NAME",
        ),
    ] = _USUAL.model
    image_size: Annotated[int | None, flag("Side of the images.", ge=1, shown="the model's own")] = None
    sequence_length: SequenceLength = None
    strategies: Annotated[
        tuple[str, ...] | None,
        flag(
            "Beside 'none' and 'ddp'; your own is package.module:Class.",
            metavar="NAME,...",
            shown=",".join(DEFAULT_STRATEGIES),
        ),
    ] = None
    kungfu: Annotated[
        str | None,
        flag(
            f"One strategy alone, by KungFu's name: {_OPTIMIZER_NAMES}.",
            "--kungfu",
            "--kf-optimizer",
            metavar="NAME",
        ),
    ] = None
    no_ddp: Annotated[bool, flag("Leave torch's own DDP out.")] = False
    num_workers: Annotated[
        int | None,
        flag(
            "Workers, one thread each.",
            "--np",
            "-np",
            ge=1,
            shown=f"{_USUAL.num_workers}, or as many as a launcher started",
        ),
    ] = None
    option: StrategyOption = {}
    workers_per_machine: WorkersPerMachine = None
    num_servers: NumServers = None
    batch_size: Annotated[int | None, flag("Of each worker.", ge=1, shown="64 or 32, by model")] = None
    device: Device = "auto"
    no_cuda: NoCuda = False
    fuse: Annotated[bool, flag("Accepted: what is sent is always one flat buffer, or few.")] = False
    eager: Annotated[bool, flag("Accepted: PyTorch computes eagerly anyway.")] = False
    xla: Annotated[bool, flag("Accepted: nothing is compiled here.")] = False
    optimizer: Annotated[str | None, flag("Accepted: sgd, which all workers train with.", metavar="NAME")] = (
        None
    )
    num_warmup: Annotated[
        int | None,
        flag(
            "Iterations before anything is measured.",
            "--num-warmup-batches",
            ge=1,
            shown=f"{_USUAL.num_warmup}, 10 by hand",
        ),
    ] = None
    pairs: Annotated[
        int | None,
        flag(
            "Blocks of each strategy beside 'none'; by hand: iterations of a worker.",
            "--pairs",
            "--num-iters",
            ge=1,
            shown=f"{_USUAL.num_pairs}, 3000 by hand",
        ),
    ] = None
    block_seconds: Annotated[
        float | None, flag("Length of a block.", ge=0.01, shown=f"{_USUAL.block_s:g}")
    ] = None
    iterations: Annotated[
        int | None,
        flag(
            "In a block, where workers wait for each other; by hand: the same as --num-iters.",
            ge=1,
            shown="by length",
        ),
    ] = None
    num_batches_per_iter: Annotated[
        int | None, flag("The same as --iterations, of a block.", ge=1, shown=False)
    ] = None
    slow_worker: Annotated[
        str | None,
        flag(
            "This worker's iterations take so many times as long; it sleeps in them.", metavar="RANK:FACTOR"
        ),
    ] = None
    ps_hosts: Annotated[
        str | None,
        flag("Started by hand: the parameter servers; all meet at the first.", metavar="HOST:PORT,…"),
    ] = None
    worker_hosts: Annotated[
        str | None, flag("Started by hand: the workers; ports are not used.", metavar="HOST:PORT,…")
    ] = None
    job_name: Annotated[Literal["ps", "worker"] | None, flag("Started by hand: what this process is.")] = None
    task_index: Annotated[int, flag("Started by hand: which one of them.", ge=0)] = 0

    @property
    def is_by_hand(self) -> bool:
        """Whether this process is a server or a worker of those that are started by hand."""
        return not (self.ps_hosts is self.worker_hosts is self.job_name is None)


def training_command(
    flags: TrainingFlags, hosts: HostFlags, run: RunFlags, typed: Mapping[str, str]
) -> BenchmarkPlan | None:
    """Training under each strategy, beside workers that share nothing: what sharing costs.

    With --job-name this process is one parameter server or worker of those that are started by hand.
    """
    if flags.is_by_hand:
        from shoal.bench.processes.by_hand import by_hand_plan

        return by_hand_plan(flags, hosts, run, typed)
    from shoal.bench.tables.training import summarize_training, training_items

    config = training_config(flags, hosts, run)
    return BenchmarkPlan(
        config, run, summarize_training, training_items, where=hosts.starter(config.num_workers)
    )


def training_config(flags: TrainingFlags, hosts: HostFlags, run: RunFlags) -> TrainingConfig:
    """Make of the flags what is measured; UsageError where they contradict each other."""
    usual = _SHORT if run.short else _USUAL
    num_workers = hosts.num_workers(flags.num_workers, default=usual.num_workers)
    device = workers_device(flags.device, hosts, num_workers, no_cuda=flags.no_cuda)
    chosen = _chosen(flags)
    return msgspec.structs.replace(
        trained_config(flags, run.seed, device),
        strategies=chosen,
        options=options_of(chosen, flags.option),
        num_workers=num_workers,
        workers_per_machine=flags.workers_per_machine,
        num_servers=servers_of(flags.num_servers, chosen),
        num_pairs=flags.pairs or usual.num_pairs,
        block_s=flags.block_seconds or usual.block_s,
        iterations=one_of(
            {"--iterations": flags.iterations, "--num-batches-per-iter": flags.num_batches_per_iter}
        ),
        kungfu=None if flags.kungfu is None else optimizer_named(flags.kungfu),
        **slow_worker(flags.slow_worker),
    )


def trained_config(
    flags: TrainingFlags, seed: int, device: DeviceKind, usual_batch_size: int | None = None
) -> TrainingConfig:
    """Say what workers train, whoever starts them."""
    from shoal.models import model_named

    _check_accepted(flags)
    entry = model_named(flags.model).at(flags.image_size, num_tokens=flags.sequence_length)
    if flags.image_size is None:
        tell_inputs(entry, device)
    return TrainingConfig(
        model=entry.name,
        image_size=entry.image_side,
        sequence_length=entry.num_tokens,
        device=device,
        batch_size=flags.batch_size or usual_batch_size or entry.batch_size,
        num_warmup=flags.num_warmup or _USUAL.num_warmup,
        seed=seed,
    )


def _check_accepted(flags: TrainingFlags) -> None:
    """Say what KungFu's flags mean that change nothing here; UsageError for an optimizer that is none."""
    if flags.optimizer is not None and flags.optimizer.lower() != "sgd":
        raise UsageError(
            f"--optimizer {flags.optimizer} is not measured: all workers train with SGD.",
            next_step="leave it out.",
        )
    if flags.eager:
        emit("--eager: PyTorch computes eagerly anyway.", sys.stderr)
    if flags.xla:
        emit("--xla: nothing is compiled here, models run as they are.", sys.stderr)


def slow_worker(text: str | None) -> dict[str, Any]:
    """Read the rank and factor of `RANK:FACTOR` as settings of a config."""
    if text is None:
        return {}
    rank, _, factor = text.partition(":")
    try:
        slow = {"slow_rank": int(rank), "slow_factor": float(factor)}
    except ValueError:
        raise UsageError(
            f"--slow-worker {text} names no worker and factor.", next_step="say --slow-worker 1:10."
        ) from None
    if not slow["slow_factor"] >= 1:
        raise UsageError(f"--slow-worker {text} is not slower.", next_step="give a factor of 1 or more.")
    return slow


def one_of(values: Mapping[str, int | None]) -> int | None:
    """Return what was given of several flags for the same; None for none, UsageError for more than one."""
    told = {name: value for name, value in values.items() if value is not None}
    if len(told) > 1:
        raise UsageError(
            f"{' and '.join(told)} are the same here.", next_step="leave all but one of them out."
        )
    return next(iter(told.values()), None)


def _chosen(flags: TrainingFlags) -> tuple[str, ...]:
    """Name what is measured beside 'none': each that was named once, and the baseline in the same run."""
    if flags.kungfu is not None:
        if flags.strategies is not None:
            raise UsageError(
                "--kungfu and --strategies both say what is measured.", next_step="leave one of them out."
            )
        return (OPTIMIZERS[optimizer_named(flags.kungfu)],)
    named = flags.strategies
    if named is None:
        named = (*DEFAULT_STRATEGIES, *(("hierarchical",) * (flags.workers_per_machine is not None)))
    chosen = beside_none([name for name in named if not (flags.no_ddp and is_ddp(name))])
    return chosen if flags.no_ddp or any(map(is_ddp, chosen)) else (*chosen, "ddp")


def optimizer_named(name: str) -> str:
    """KungFu's optimizer as it spells it; hyphens and underscores are alike."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in OPTIMIZERS:
        raise UsageError(
            f"KungFu has no optimizer {name!r}.{did_you_mean(name, OPTIMIZERS)}",
            next_step=f"one of {', '.join(OPTIMIZERS)}; --strategies names all that there are here.",
        )
    return plain


# --- the scenario ---


class TrainingScenario:
    """One start: workers that train in pairs of blocks."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), TrainingConfig), seed=seed)
        self._measured = {name: StrategyBlocks() for name in self._config.strategies}
        self._iterations: dict[str, int | None] = {}
        self._sleep_s = 0.0
        self.open_workers: OpenWorkers = LocalWorkers

    def run(self, tell: Tell) -> Iterator[Row]:
        """All strategies in turn, pair by pair; one that fails is a row, and the rest go on."""
        config = self._config
        settings = WorkerSettings(
            "shoal.bench.training:TrainingWorker", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        for name, kept in self._measured.items():
            if kept.error is not None:
                tell(f"{name} failed: {kept.error}")
        with self.open_workers(settings) as workers:
            for number in range(config.num_pairs):
                self._prepare(workers, tell)
                tell(f"pair {number + 1} of {config.num_pairs}")
                for name in self._standing():
                    self._prepare(workers, tell)
                    if self._measured[name].error is None:
                        self._measure_pair(workers, name, number, tell)
            yield from sorted(self._rows(), key=lambda row: FIGURES.index(row.metric))

    def _standing(self) -> list[str]:
        """The strategies that have not failed."""
        return [name for name, kept in self._measured.items() if kept.error is None]

    def _prepare(self, workers: Workers, tell: Tell) -> None:
        """Attach and warm up everything, where workers have not been started or one was lost."""
        while not workers.is_running and self._standing():
            self._attach(workers, NONE, tell)
            for name in self._standing():
                try:
                    self._attach(workers, name, tell)
                except BenchmarkError as error:
                    self._give_up(name, error, tell)
                    break

    def _attach(self, workers: Workers, name: str, tell: Tell) -> None:
        tell(f"{name}: attaching and warming up")
        role = {"strategy": name, "config": msgspec.to_builtins(self._config)}
        start_servers(workers, "shoal.bench.training:serve_parameters", self._config.servers_of(name), **role)
        workers.ask("attach", strategy=name)
        blocks = self._block(workers, name, self._config.num_warmup)
        times_s = [statistics.median(block.times_s) for block in blocks]
        if name == NONE and self._config.slow_rank is not None:
            self._sleep_s = 0.0
            pace = self._block(workers, NONE, None)[self._config.slow_rank]
            self._sleep_s = statistics.median(pace.times_s) * (self._config.slow_factor - 1)
        if is_free_running(name, self._config.options):
            self._iterations[name] = None
        else:
            fitting = max(1, round(self._config.block_s / max(times_s)))
            wanted = self._config.iterations or fitting
            # whole rounds: else some blocks would hold an exchange more than others
            local_steps = self._config.options.get(name, {}).get("local_steps") or 1
            self._iterations[name] = -(-wanted // local_steps) * local_steps

    def _measure_pair(self, workers: Workers, name: str, number: int, tell: Tell) -> None:
        order = (name, NONE) if number % 2 == 0 else (NONE, name)
        try:
            blocks = {who: self._block(workers, who, self._iterations[who]) for who in order}
            if self._config.slow_rank is not None:
                sleep_s, self._sleep_s = self._sleep_s, 0.0
                self._measured[name].evens.append(self._block(workers, name, self._iterations[name]))
                self._sleep_s = sleep_s
        except BenchmarkError as error:
            self._give_up(name, error, tell)
            return
        self._measured[name].blocks.append(blocks[name])
        self._measured[name].ceilings.append(blocks[NONE])

    def _block(self, workers: Workers, name: str, iterations: int | None) -> Blocks:
        answers = workers.ask(
            "block", strategy=name, iterations=iterations, seconds=self._config.block_s, sleep_s=self._sleep_s
        )
        return msgspec.convert(answers, Blocks)

    def _give_up(self, name: str, error: BenchmarkError, tell: Tell) -> None:
        self._measured[name].error = one_line(error)
        tell(f"{name} failed: {self._measured[name].error}")

    def _rows(self) -> Iterator[Row]:
        ceilings = [blocks for kept in self._measured.values() for blocks in kept.ceilings]
        found = {NONE: StrategyBlocks(ceilings)} if ceilings else {}
        for name, kept in (found | self._measured).items():
            yield from strategy_rows(name, kept, self._config.batch_size)


# --- rows ---


class Block(msgspec.Struct, frozen=True):
    """What one worker did in one block."""

    times_s: list[float]
    """How long each iteration took."""
    waited_s: list[float] = []
    """For each rank, by this worker."""

    @property
    def seconds(self) -> float:
        """How long the block took, from the first iteration's beginning to the last one's end."""
        return sum(self.times_s)

    def examples_per_s(self, batch_size: int) -> float:
        """Computes how many examples a second this worker trained."""
        return batch_size * len(self.times_s) / self.seconds


Blocks = list[Block]
"""What all workers did in one block, by rank."""


class StrategyBlocks(msgspec.Struct):
    """All that was measured of one strategy, or why it could not be."""

    blocks: list[Blocks] = []
    ceilings: list[Blocks] = []
    """The neighbours in time of `blocks`, under `none`."""
    evens: list[Blocks] = []
    """Where somebody is slow: the same strategy beside `blocks`, with nobody slow."""
    error: str | None = None


def strategy_rows(name: str, kept: StrategyBlocks, batch_size: int) -> Iterator[Row]:
    """The figures of one strategy, or of the ceiling, which has nothing beside it."""
    key: RowKey = {"strategy": name}
    if kept.error is not None:
        yield measured(SPEED, key, error=kept.error)
        return
    speeds = [total_speed(blocks, batch_size) for blocks in kept.blocks]
    beside = [total_speed(blocks, batch_size) for blocks in kept.ceilings]
    if beside:
        yield measured(FRACTION, key, [ours / theirs for ours, theirs in zip(speeds, beside, strict=True)])
    yield measured(SPEED, key, speeds)
    num_workers = len(kept.blocks[0])
    has_waits = any(any(block.waited_s) for blocks in kept.blocks for block in blocks)
    for rank in range(num_workers):
        own = [blocks[rank] for blocks in kept.blocks]
        by_rank: RowKey = {**key, "rank": rank}
        yield measured(OWN_SPEED, by_rank, [block.examples_per_s(batch_size) for block in own])
        yield measured(ITERATION, by_rank, [time_s for block in own for time_s in block.times_s])
        if kept.evens:
            pairs = zip(own, (blocks[rank] for blocks in kept.evens), strict=True)
            fractions = [ours.examples_per_s(1) / theirs.examples_per_s(1) for ours, theirs in pairs]
            yield measured(OWN_FRACTION, by_rank, fractions)
        for other in range(num_workers) if has_waits else ():
            if other != rank:
                waits_s = [block.waited_s[other] for block in own]
                yield measured(WAITED, {**by_rank, "waited_for": other}, waits_s)


def total_speed(blocks: Blocks, batch_size: int) -> float:
    """Examples a second of all workers together."""
    return sum(block.examples_per_s(batch_size) for block in blocks)


# --- a worker ---


def serve_parameters(arguments: dict[str, Any], parent: Parent) -> None:
    """Be a parameter server of one strategy until the workers are done."""
    place, role = server_place(arguments)
    config, strategy = msgspec.convert(role["config"], TrainingConfig), role["strategy"]
    with place.open_with_servers(strategy, config.num_servers, role["server"]) as group:
        trainee = trainee_of(config, 0, place.device(config.device))
        made = make_contender(group, strategy, config.options.get(strategy, {}))
        with contextlib.suppress(SystemExit):
            made.attach(trainee.model, trainee.optimizer)


def trainee_of(config: TrainingConfig, rank: int, device: torch.device) -> Trainee:
    """Make what one worker trains."""
    from shoal.models import model_named

    recipe = Recipe(
        entry=model_named(config.model).at(config.image_size, num_tokens=config.sequence_length),
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        seed=config.seed,
    )
    return recipe.trainee(rank, device)


class TrainingWorker:
    """All trainees of one worker; its methods are the orders."""

    def __init__(self, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> None:
        place.set_up_process()
        self._place = place
        self._config = config = msgspec.convert(arguments, TrainingConfig)
        self._stack = stack
        self._device = place.device(config.device)
        self._trainees: dict[str, Trainee] = {}
        self._groups: dict[str, Group] = {}

    def attach(self, strategy: str) -> None:
        """Make a model, and attach the strategy to it; `none` attaches nothing."""
        trainee = self._trainees[strategy] = trainee_of(self._config, self._place.rank, self._device)
        if strategy == NONE:
            return
        # a group for each strategy: who waits for whom is counted apart, and each may leave its own
        opened = self._place.open_group(
            strategy,
            workers_per_machine=self._config.workers_per_machine,
            num_servers=self._config.servers_of(strategy),
        )
        group = self._groups[strategy] = self._stack.enter_context(opened)
        made = make_contender(group, strategy, self._config.options.get(strategy, {}))
        self._stack.enter_context(made.attach(trainee.model, trainee.optimizer))

    def block(
        self, strategy: str, iterations: int | None, seconds: float, sleep_s: float
    ) -> dict[str, list[float]]:
        """Iterate so often, or else for so long; the time of each iteration, and the waits of the block."""
        trainee = self._trainees[strategy]
        sleep_s = sleep_s if self._place.rank == self._config.slow_rank else 0.0
        waited_s = self._waited_s(strategy)
        laps = Laps(self._device)
        until_s = time.perf_counter() + seconds
        while len(laps) < iterations if iterations is not None else time.perf_counter() < until_s:
            if sleep_s:
                trainee.synchronize()  # a GPU would go on with the last iteration while this process sleeps
                time.sleep(sleep_s)
            trainee.step()
            laps.end()
        times_s = laps.seconds()
        waits_s = [after - before for before, after in zip(waited_s, self._waited_s(strategy), strict=True)]
        return {"times_s": times_s, "waited_s": waits_s}

    def _waited_s(self, strategy: str) -> list[float]:
        """Seconds that this worker has waited for each rank."""
        group = self._groups.get(strategy)
        return [] if group is None else list(group.stats.waited_s)
