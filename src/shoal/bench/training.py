"""`shoal bench training`: how much of the speed of workers that share nothing is left under each strategy.

One set of workers holds a model for every strategy and one for `none`, to which nothing is attached: the
ceiling. A block of a strategy and one of `none` are neighbours in time, and their ratio is what counts. What
the samples say is `training_summary`'s, what a worker does `training_worker`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import NONE, is_free_running, needs_servers
from shoal.bench.frame import Measured, Tell
from shoal.bench.training_rows import METRICS, Blocks, Lane, lane_rows
from shoal.bench.workers import Crew, CrewSettings, Helper, OpenCrew, Workers, one_line
from shoal.core import BenchmarkError, UsageError

DEFAULT_STRATEGIES = ("all-reduce", "neighbor", "pair", "sma", "ddp")
DEFAULT_WARMUP = 3
_ANSWER_S = 900.0  # a block of a slow worker with a large model on a CPU


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, and for how long."""

    model: str = "mlp"
    image_size: int | None = None
    """The side of the images; None is the model's own."""
    device: Literal["cpu", "cuda"] = "cpu"
    batch_size: int = 64
    """Of each worker."""
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    options: dict[str, dict[str, Any]] = {}
    """Of each strategy, where it has others than its defaults."""
    num_workers: int = 2
    workers_per_machine: int | None = None
    num_servers: int = 1
    """Processes beside the workers, for `parameter-server` and `staleness-aware`."""
    num_pairs: int = 10
    """Blocks of each strategy, each with one of `none` beside it."""
    num_warmup: int = DEFAULT_WARMUP
    """Iterations before anything is measured."""
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


class ServerRole(msgspec.Struct, frozen=True):
    """Which server of which strategy a process is."""

    strategy: str
    server: int
    config: TrainingConfig


class TrainingScenario:
    """One start: a crew that trains in pairs of blocks."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), TrainingConfig), seed=seed)
        self._lanes = {name: Lane() for name in self._config.strategies}
        self._iterations: dict[str, int | None] = {}
        self._sleep_s = 0.0
        self.open_crew: OpenCrew = Crew

    def run(self, tell: Tell) -> Iterator[Measured]:
        """All strategies in turn, pair by pair; one that fails is a row, and the rest go on."""
        config = self._config
        settings = CrewSettings(
            "shoal.bench.training_worker:work", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        for name, lane in self._lanes.items():
            if lane.error is not None:
                tell(f"{name} failed: {lane.error}")
        with self.open_crew(settings) as crew:
            for number in range(config.num_pairs):
                self._prepare(crew, tell)
                tell(f"pair {number + 1} of {config.num_pairs}")
                for name in self._standing():
                    self._prepare(crew, tell)
                    if self._lanes[name].error is None:
                        self._measure_pair(crew, name, number, tell)
            yield from sorted(self._rows(), key=lambda row: list(METRICS).index(row.metric))

    def _standing(self) -> list[str]:
        """The strategies that have not failed."""
        return [name for name, lane in self._lanes.items() if lane.error is None]

    def _prepare(self, crew: Workers, tell: Tell) -> None:
        """Attach and warm up everything, in a crew that has not been started or has lost somebody."""
        while not crew.is_running and self._standing():
            self._attach(crew, NONE, tell)
            for name in self._standing():
                try:
                    self._attach(crew, name, tell)
                except BenchmarkError as error:
                    self._give_up(name, error, tell)
                    break

    def _attach(self, crew: Workers, name: str, tell: Tell) -> None:
        tell(f"{name}: attaching and warming up")
        for server in range(self._config.num_servers if needs_servers(name) else 0):
            role = msgspec.to_builtins(ServerRole(name, server, self._config))
            crew.hire(Helper("shoal.bench.training_worker:serve_parameters", f"server {server}", role))
        crew.ask("attach", strategy=name)
        blocks = self._block(crew, name, self._config.num_warmup)
        times_s = [statistics.median(block.times_s) for block in blocks]
        if name == NONE and self._config.slow_rank is not None:
            self._sleep_s = 0.0
            pace = self._block(crew, NONE, None)[self._config.slow_rank]
            self._sleep_s = statistics.median(pace.times_s) * (self._config.slow_factor - 1)
        if is_free_running(name, self._config.options):
            self._iterations[name] = None
        else:
            fitting = max(1, round(self._config.block_s / max(times_s)))
            wanted = self._config.iterations or fitting
            # whole rounds: else some blocks would hold an exchange more than others
            local_steps = self._config.options.get(name, {}).get("local_steps") or 1
            self._iterations[name] = -(-wanted // local_steps) * local_steps

    def _measure_pair(self, crew: Workers, name: str, number: int, tell: Tell) -> None:
        order = (name, NONE) if number % 2 == 0 else (NONE, name)
        try:
            measured = {who: self._block(crew, who, self._iterations[who]) for who in order}
            if self._config.slow_rank is not None:
                sleep_s, self._sleep_s = self._sleep_s, 0.0
                self._lanes[name].evens.append(self._block(crew, name, self._iterations[name]))
                self._sleep_s = sleep_s
        except BenchmarkError as error:
            self._give_up(name, error, tell)
            return
        self._lanes[name].blocks.append(measured[name])
        self._lanes[name].ceilings.append(measured[NONE])

    def _block(self, crew: Workers, name: str, iterations: int | None) -> Blocks:
        answers = crew.ask(
            "block",
            strategy=name,
            iterations=iterations,
            seconds=self._config.block_s,
            sleep_s=self._sleep_s,
        )
        return msgspec.convert(answers, Blocks)

    def _give_up(self, name: str, error: BenchmarkError, tell: Tell) -> None:
        self._lanes[name].error = one_line(error)
        tell(f"{name} failed: {self._lanes[name].error}")

    def _rows(self) -> Iterator[Measured]:
        ceilings = [blocks for lane in self._lanes.values() for blocks in lane.ceilings]
        lanes = {NONE: Lane(ceilings)} if ceilings else {}
        for name, lane in (lanes | self._lanes).items():
            yield from lane_rows(name, lane, self._config.batch_size)
