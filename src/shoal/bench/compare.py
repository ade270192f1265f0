"""`shoal compare`: strategies at one task, in one world: by steps, by seconds and by bytes.

Two phases. In the first every contender tries each learning rate of one grid, with a seed that is none of the
contest's; in the second it runs with its best, once for each seed. All runs are independent, so that they are
spread over processes; what each of them does is `simulate.contest`'s, and what the contest's rows mean
`tables.compare`'.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import Contender, is_swarm, needs_servers, sends_by_itself, strategy_contenders
from shoal.bench.frame import Noted, RowKey, Tell, curve, measured
from shoal.bench.processes.compare import RealContest
from shoal.bench.workers import one_line, run_tasks
from shoal.core import BenchmarkError, UsageError
from shoal.core.placement import num_cores
from shoal.data.splits import IID, check_split
from shoal.report import Curve, Row
from shoal.report.units import digits
from shoal.simulate.contest import Executor, Trial
from shoal.simulate.exact import run_exact
from shoal.simulate.job import CourseRecord, TrainingJob
from shoal.simulate.stacked.executor import refuse_unfit
from shoal.simulate.swarm import check_faults
from shoal.simulate.task_facts import TaskFacts, facts_of
from shoal.simulate.tasks import make_task
from shoal.simulate.world import World
from shoal.strategies.registry import all_strategies, find
from shoal.tensors.codecs import codec_from_name
from shoal.topology import make_topology, make_topology_on
from shoal.transport.network.distributions import Delay

# --- what is compared ---

ALL = "all"
SHORT_ROUNDS: dict[str, dict[str, Any]] = {
    name: {"local_steps": 8} for name in ("diloco", "noloco", "sparse-loco")
}
"""What `all` changes: of a contest's few steps, rounds as long as these strategies' own would leave one."""
WORKERS_PER_MACHINE = 4
"""In a contest of twice as many or more, so that `hierarchical` has machines to go between."""
TUNING_SEED = 1_000_003
"""Added to the contest's first seed: nobody is tuned on what it is judged by."""
_KINDS = {
    "constant": ("value",),
    "exponential": ("mean",),
    "normal": ("mean", "deviation"),
    "pareto": ("floor", "shape"),
}


class CompareConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contest: who takes part, in which world, at what, and when it is over."""

    task: str = "digits"
    contenders: tuple[Contender, ...]
    world: World
    num_servers: int = 1
    """Beside the workers, for strategies that need them."""
    split: str = IID
    seeds: tuple[int, ...] = (0,)
    """Of initial weights, division of the data, batches, and the world's chances."""
    steps: int
    """Of each worker: after them a run is over, whoever reached what."""
    eval_every: int
    batch_size: int
    momentum: float = 0.9
    learning_rates: tuple[float, ...]
    """Each contender tries each of them, and competes with its best; a single one is not tuned.

    Where the best of anyone is at an end, all try further ones."""
    target: float
    """What seconds, bytes and steps are counted to; in terms of the task's score."""
    executor: Literal["auto", "exact", "stacked"] = "auto"
    is_real: bool = False
    """Whether the contest's runs are real processes; tuning is in virtual time all the same."""
    data_dir: str | None = None
    notes: tuple[str, ...] = ()
    """Sentences for the reader: who was left out, what was assumed."""

    def __post_init__(self) -> None:
        if not self.contenders or not self.seeds or not self.learning_rates:
            raise UsageError(
                "Without a strategy, a seed and a learning rate nothing is compared.",
                next_step="say --strategies all.",
            )
        if min(self.steps, self.eval_every, self.batch_size, self.num_servers) < 1:
            raise UsageError(
                "Without steps, examples or servers nothing is trained.", next_step="give 1 or more."
            )
        wrong = [rate for rate in self.learning_rates if not 0 < rate < math.inf]
        if wrong:
            raise UsageError(f"{wrong[0]} is no learning rate.", next_step="give numbers above 0.")
        if min(self.seeds) < 0:
            raise UsageError(f"{min(self.seeds)} is no seed.", next_step="give --seed 0 or more.")
        if not 0 < self.target < math.inf:
            raise UsageError(f"{self.target} is no target.", next_step="give a number above 0.")
        if not 0 <= self.momentum <= 1:
            raise UsageError(f"{self.momentum} is no momentum.", next_step="give a number from 0 to 1.")
        check_split(self.split)
        for each in self.contenders:
            self.world_of(each, self.seeds[0])  # a script may not suit those with servers
        if self.is_real:
            self._check_real()

    def _check_real(self) -> None:
        if self.world.faults is not None:
            raise UsageError(
                "Faults happen in virtual time alone.", next_step="leave --real or --faults out."
            )
        swarms = [each.name for each in self.contenders if is_swarm(each.strategy)]
        if swarms:
            raise UsageError(
                f"{', '.join(swarms)}: in a contest members of a swarm live in virtual time alone.",
                next_step="leave --real out, or that strategy.",
            )
        served = [each.name for each in self.contenders if needs_servers(each.strategy)]
        if served and self.world.between == "machines":
            raise UsageError(
                f"{', '.join(served)}: servers beside real processes have no machine of their own.",
                next_step="leave them out of --strategies, or leave --real or --between machines out.",
            )

    @property
    def tuning_seed(self) -> int:
        """None of the contest's."""
        return self.seeds[0] + TUNING_SEED

    @property
    def is_tuned(self) -> bool:
        """Whether each contender chooses its rate."""
        return len(self.learning_rates) > 1

    def world_of(self, contender: Contender, seed: int) -> World:
        """The contest's, with servers where the strategy needs some, and chances of that seed."""
        num_servers = self.num_servers if needs_servers(contender.strategy) else 0
        return msgspec.structs.replace(self.world, num_servers=num_servers, seed=seed)


def read_config(config: Mapping[str, Any]) -> CompareConfig:
    """Read the configuration of a contest as a report holds it."""
    return msgspec.convert(dict(config), CompareConfig, str_keys=True)


def left_out() -> list[str]:
    """Strategies that `all` does not mean: what they send passes their group by, or they are a swarm's."""
    return [info.name for info in all_strategies() if info.has_own_channel]


def compared(texts: Sequence[str], common: Mapping[str, Any]) -> tuple[Contender, ...]:
    """Strategies with options of their own, as 'neighbor topology=ring'; `all` stands for every one.

    UsageError for one whose bytes a simulated network cannot carry.
    """
    named = [text for text in texts if text != ALL]
    if ALL in texts:
        everybody = [info.name for info in all_strategies() if not info.has_own_channel]
        named = [*everybody, *(text for text in named if text not in everybody)]
    contenders = strategy_contenders(named, common)
    for contender in contenders:
        if sends_by_itself(contender.strategy) and not is_swarm(contender.strategy):
            raise UsageError(
                f"{contender.strategy} cannot be compared: what it sends passes its group by, so that "
                "neither a profile nor a virtual clock reaches it.",
                next_step="leave it out; `shoal bench training` measures it on real machines.",
            )
    shortened = shortened_in(texts, common)
    return tuple(
        msgspec.structs.replace(each, options={**each.options, **shortened.get(each.name, {})})
        for each in contenders
    )


def shortened_in(texts: Sequence[str], common: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By strategy, the options that `all` changes; none of what was named or set by itself."""
    if ALL not in texts:
        return {}
    return {
        name: {option: value for option, value in changes.items() if option not in common}
        for name, changes in SHORT_ROUNDS.items()
        if name not in texts
    }


def notes_of(texts: Sequence[str], common: Mapping[str, Any]) -> list[str]:
    """What `all` leaves out and changes, in sentences; nothing where each was named."""
    if ALL not in texts:
        return []
    why = "what they send passes their group by: it can neither be counted nor put into virtual time"
    outside = [name for name in left_out() if not is_swarm(name)]
    notes = [f"'all' leaves out {' and '.join(outside)}: {why}."]
    if not any(is_swarm(text.split()[0]) for text in texts if text != ALL):
        notes.append(
            "'all' leaves out swarm: say what its rounds are, as --strategies all,'swarm target_samples=64'."
        )
    for name, changes in shortened_in(texts, common).items():
        given = ", ".join(f"{option}={value}" for option, value in changes.items())
        if given:
            notes.append(f"'all' gives {name} {given}: rounds as long as its own would leave too few.")
    return notes


def compute_of(text: str) -> Delay:
    """What a step costs, in milliseconds: '10', 'exponential:10', 'normal:10:2', 'pareto:5:2'."""
    kind, *words = text.split(":")
    try:
        numbers = [*map(float, words or [kind])]
        value = {"kind": kind, **dict(zip(_KINDS[kind], numbers, strict=True))} if words else numbers[0]
        read: Delay = msgspec.convert(value, Delay)
    except (KeyError, ValueError, msgspec.ValidationError):
        known = ", ".join(":".join([kind, *names]) for kind, names in _KINDS.items())
        raise UsageError(
            f"--compute-ms {text} is no cost of a step.",
            next_step=f"give milliseconds, or a distribution: {known}.",
        ) from None
    return read


def stragglers_of(texts: Sequence[str]) -> dict[int, float]:
    """By rank, how many times as long its steps take: 'RANK:FACTOR' each."""
    factors = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise UsageError(
                f"--stragglers {text} names no worker and factor.", next_step="say --stragglers 1:10."
            ) from None
        if not 0 < factors[int(rank)] < math.inf:
            raise UsageError(f"--stragglers {text} is no factor.", next_step="give a number above 0.")
    return factors


# --- why a contender did not reach the target ---

DIVERGED_ALWAYS = "diverged at every rate of the grid"
_TAIL = 0.25  # of a course: where it must still gain to be called improving
_NOTABLE = 0.02  # of the whole way from the first score to the best
_FALLEN = 0.2  # of that way, lost again at the end


class Reason(msgspec.Struct, frozen=True):
    """Why one run did not reach the target: what kind, and where its score was best."""

    kind: str
    best: float | None = None
    step: float = 0.0
    may_be_the_rate: bool = True
    """Whether another rate may have helped."""


def shown_score(facts: TaskFacts, value: float) -> str:
    """A share as a percentage, anything else with three digits."""
    return f"{100 * value:.1f} %" if facts.score == "accuracy" else digits(value)


def shown_target(facts: TaskFacts, value: float) -> str:
    """Show a target as it was asked for."""
    return f"{100 * value:g} %" if facts.score == "accuracy" else f"{value:g}"


def reasons_of(records: Sequence[CourseRecord], where: str = "") -> dict[str, int]:
    """For runs of one contender that did not reach the target: clauses, and how many runs each is of.

    `where` tells what all of them have in common, a rate at the end of the grid; said where that may be why.
    """
    kinds: dict[str, list[Reason]] = {}
    for record in records:
        reason = _reason(record)
        kinds.setdefault(reason.kind, []).append(reason)
    facts = facts_of(records[0].job.task) if records else None
    told = {}
    for kind, reasons in kinds.items():
        bests = [reason.best for reason in reasons if reason.best is not None]
        best = ""
        if facts is not None and bests:
            step = statistics.fmean(reason.step for reason in reasons)
            best = f"; best {shown_score(facts, statistics.fmean(bests))} at step {step:.0f}"
        told[kind + (f", {where}" if where and reasons[0].may_be_the_rate else "") + best] = len(reasons)
    return told


def unfit(why: str) -> str:
    """Say why one did not do a single step."""
    return f"could not take part: {clause(why)}"


def ended_early(record: CourseRecord) -> str:
    """Say why no worker has brought one to its end."""
    rank, why = min(record.ended.items())
    return f"ended early, rank {rank} says: {clause(why)}"


def clause(text: str) -> str:
    """A sentence as a part of another."""
    return " ".join(text.split()).rstrip(".")


def _reason(record: CourseRecord) -> Reason:
    best = record.best
    if best is None:
        return Reason(unfit(record.error or "nobody has begun"), may_be_the_rate=False)
    if record.error:
        return Reason(clause(record.error), best.value, best.step, record.has_diverged)
    if record.has_ended_early:
        return Reason(ended_early(record), best.value, best.step, may_be_the_rate=False)
    return Reason(_course_kind(record, best.value, best.step), best.value, best.step)


def _course_kind(record: CourseRecord, best: float, best_step: float) -> str:
    facts = facts_of(record.job.task)
    values = [moment.value for moment in record.moments]
    way = abs(best - values[0])
    if not math.isfinite(way) or way == 0:
        return "never better than at the start"
    if abs(best - values[-1]) > _FALLEN * way:
        return "fell back by the end"
    tail_begins = (1 - _TAIL) * record.moments[-1].step
    before = [moment.value for moment in record.moments if moment.step <= tail_begins]
    gained = abs(best - facts.best(before)) if best_step > tail_begins and before else 0.0
    return "still improving at the end" if gained > _NOTABLE * way else "flat at the end"


# --- rows and curves ---

SECONDS, BYTES, STEPS = "seconds_to_target", "bytes_to_target", "steps_to_target"
DISTANCE, RUN_SECONDS, SENT, CHOSEN = "consensus_distance", "run_seconds", "bytes_sent", "chosen"
MEAN_STALENESS, STALENESS, WAITED = "mean_staleness", "staleness", "waited"
NOT_REACHED, ENDED_EARLY = "not_reached", "ended_early"
MAX_MAPPED = 32
"""Workers up to which it is told who waited for whom."""


def score_of(facts: TaskFacts, which: Literal["final", "worst_final", "tuning"]) -> str:
    """The metric of a last score: of the mean of all models, of the worst worker's, or of the mean in tuning.

    A rate without a row of the last has diverged.
    """
    return f"{which}_{facts.score}"


class Finish(msgspec.Struct, frozen=True):
    """All runs of one contender in the contest."""

    name: str
    rate: float
    records: list[CourseRecord]

    @property
    def key(self) -> RowKey:
        """The key of its rows and curves."""
        return {"strategy": self.name}

    def told(self, config: CompareConfig) -> Iterator[Row | Curve]:
        """One sample, and one line, for each seed."""
        facts = facts_of(config.task)
        for record in self.records:
            for metric, figure in _figures(record, facts, config.target).items():
                yield measured(metric, self.key, [figure])
            yield from self._curves(record, facts)
            for behind, count in sorted(record.staleness.items()):
                yield measured(STALENESS, {**self.key, "behind": behind}, [float(count)])
        yield from self._waits()
        arrived: list[CourseRecord] = []
        missed: list[CourseRecord] = []
        for record in self.records:
            is_reached = not record.error and record.reached(config.target) is not None
            (arrived if is_reached else missed).append(record)
        for why, count in reasons_of(missed, edge_of(config, self.rate)).items():
            for _ in range(count):
                yield measured(NOT_REACHED, {**self.key, "why": why}, [1.0])
        for record in arrived:
            if record.has_ended_early:
                yield measured(ENDED_EARLY, {**self.key, "why": ended_early(record)}, [1.0])

    def _curves(self, record: CourseRecord, facts: TaskFacts) -> Iterator[Curve]:
        if not record.moments:
            return
        axes = {
            "step": [moment.step for moment in record.moments],
            "s": [moment.at_s for moment in record.moments],
            "bytes": [float(moment.moved_bytes) for moment in record.moments],
        }
        fields = {
            facts.score: "value",
            f"worst_{facts.score}": "worst",
            "loss": "loss",
            DISTANCE: "consensus_distance",
        }
        for metric, field in fields.items():
            values = [float(getattr(moment, field)) for moment in record.moments]
            yield curve(metric, self.key, {**axes, "value": values})

    def _waits(self) -> Iterator[Row]:
        maps = [record.waited_s for record in self.records if record.waited_s]
        if not maps or len(maps[0]) > MAX_MAPPED:
            return
        for rank in range(len(maps[0])):
            for awaited in range(len(maps[0][rank])):
                waits_s = [waited_s[rank][awaited] for waited_s in maps]
                if not any(waits_s):
                    continue
                key = {**self.key, "rank": rank, "waited_for": awaited}
                for wait_s in waits_s:
                    yield measured(WAITED, key, [wait_s])


def edge_of(config: CompareConfig, rate: float) -> str:
    """Say at which end of the grid a rate is, as there may be a better one beyond; '' for neither."""
    if not config.is_tuned:
        return ""
    if rate == min(config.learning_rates):
        return "at the smallest rate of the grid"
    return "at the largest rate of the grid" if rate == max(config.learning_rates) else ""


def _figures(record: CourseRecord, facts: TaskFacts, target: float) -> dict[str, float]:
    """Where the target was reached, and what was at the end of a run that nobody left before it.

    Nothing of a run that broke off.
    """
    if record.error or not record.moments:
        return {}
    last, reached = record.moments[-1], record.reached(target)
    figures: dict[str, float] = {}
    if reached is not None:
        figures |= {SECONDS: reached.at_s, BYTES: float(reached.moved_bytes), STEPS: reached.step}
    if record.has_ended_early:
        return figures
    figures |= {
        score_of(facts, "final"): last.value,
        score_of(facts, "worst_final"): last.worst,
        DISTANCE: last.consensus_distance,
    }
    if record.mean_staleness is not None:
        figures[MEAN_STALENESS] = record.mean_staleness
    return {**figures, RUN_SECONDS: last.at_s, SENT: float(last.moved_bytes)}


# --- the contest ---

Ran = CourseRecord | BenchmarkError
MAX_EXACT = 64
"""Workers up to which each has a thread of its own unless told otherwise."""
_RUN_TASK = "shoal.simulate.contest:run_task"


class Try(msgspec.Struct, frozen=True):
    """One run: a contender with a rate and a seed."""

    contender: Contender
    rate: float
    seed: int

    def task(self, config: CompareConfig) -> dict[str, Any]:
        """Describe the run for a process of the pool."""
        job, world = self.job(config), config.world_of(self.contender, self.seed)
        executor = config.executor if config.executor != "auto" else suited(job, world)
        return Trial(job=job, world=world, executor=executor).plain()

    def job(self, config: CompareConfig) -> TrainingJob:
        """What each of its workers is to do."""
        return TrainingJob(
            task=config.task,
            strategy=self.contender.strategy,
            options=self.contender.options,
            num_workers=config.world.num_workers,
            num_joining=config.world.num_joining,
            steps=config.steps,
            eval_every=config.eval_every,
            batch_size=config.batch_size,
            learning_rate=self.rate,
            momentum=config.momentum,
            split=config.split,
            data_dir=config.data_dir,
            seed=self.seed,
        )


class CompareScenario:
    """All of a contest; `seed` stands in the config already, with those of the other runs."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = read_config(config)
        self._num_processes = num_cores()

    def run(self, tell: Tell) -> Iterator[Row | Curve | Noted]:
        """Tune, then compete; a contender whose run fails is a row, and the others go on."""
        config = self._config
        began_s = time.perf_counter()
        tried = self._tuned(tell) if config.is_tuned else {}
        tuned_s = time.perf_counter()
        rates = self._rates(tried)
        config = with_rates(config, dict.fromkeys(rate for by_rate in tried.values() for rate in by_rate))
        for contender, found in self._contest(rates, tell):
            key = {"strategy": contender.name}
            failures = [each for each in found if isinstance(each, BenchmarkError)]
            records = [each for each in found if isinstance(each, CourseRecord)]
            if contender.name in rates:
                yield from Finish(contender.name, rates[contender.name], records).told(config)
            else:
                why = why_no_rate(tried[contender.name])
                for _ in config.seeds:
                    yield measured(NOT_REACHED, {**key, "why": why}, [1.0])
            if failures:
                final = score_of(facts_of(config.task), "final")
                yield measured(final, key, error=one_line(failures[0]))
        yield from self._tuning_rows(tried, rates)
        walls = {"wall_s": time.perf_counter() - began_s, "tuning_wall_s": tuned_s - began_s}
        yield Noted(facts={**walls, "num_processes": self._num_processes})

    def _rates(self, tried: Mapping[str, Mapping[float, Ran]]) -> dict[str, float]:
        """By contender; none for one that no rate suited."""
        config = self._config
        rates = {}
        for contender in config.contenders:
            rate = config.learning_rates[0]
            if config.is_tuned:
                found = best_rate(tried[contender.name], config.target)
                if found is None:
                    continue
                rate = found
            rates[contender.name] = rate
        return rates

    def _tuned(self, tell: Tell) -> dict[str, dict[float, Ran]]:
        """By contender and rate; the grid is wider afterwards where the best of anyone was at its end."""
        config = self._config
        found: dict[str, dict[float, Ran]] = {contender.name: {} for contender in config.contenders}
        rates = config.learning_rates
        for num_widened in range(MAX_WIDENINGS + 1):
            tries = [
                Try(contender, rate, config.tuning_seed) for contender in config.contenders for rate in rates
            ]
            phase = "tuning" if num_widened == 0 else f"tuning with rates {', '.join(map(str, rates))} too"
            for each, ran in zip(tries, self._run(tries, phase, tell), strict=True):
                found[each.contender.name][each.rate] = ran
            if not (rates := further_rates(list(found.values()), config.target)):
                break
        return found

    def _tuning_rows(
        self, tried: Mapping[str, Mapping[float, Ran]], rates: Mapping[str, float]
    ) -> Iterator[Row]:
        """Last scores by rate, and which rate each competed with."""
        metric = score_of(facts_of(self._config.task), "tuning")
        for name, by_rate in tried.items():
            for rate, ran in by_rate.items():
                key = {"strategy": name, "learning_rate": rate}
                if isinstance(ran, BenchmarkError):
                    yield measured(metric, key, error=one_line(ran))
                elif not ran.error and ran.moments:
                    yield measured(metric, key, [ran.moments[-1].value])
        for name, rate in rates.items():
            yield measured(CHOSEN, {"strategy": name, "learning_rate": rate}, [1.0])

    def _contest(self, rates: Mapping[str, float], tell: Tell) -> Iterator[tuple[Contender, list[Ran]]]:
        """Each contender with its runs, none for one without a rate; as they are done."""
        config = self._config
        tries = [
            Try(contender, rates[contender.name], seed)
            for contender in config.contenders
            if contender.name in rates
            for seed in config.seeds
        ]
        runs = self._run_real(tries, tell) if config.is_real else self._run(tries, "contest", tell)
        for contender in config.contenders:
            found = [next(runs) for _ in config.seeds] if contender.name in rates else []
            yield contender, found

    def _run(self, tries: Sequence[Try], phase: str, tell: Tell) -> Iterator[Ran]:
        tasks = [each.task(self._config) for each in tries]
        if not tasks:
            return
        tell(f"{phase}: {len(tasks)} runs in {min(self._num_processes, len(tasks))} processes")
        answers = run_tasks(_RUN_TASK, tasks, num_processes=self._num_processes, tell=lambda _: None)
        for number, answer in enumerate(answers, 1):
            tell(f"{phase}: {number} of {len(tasks)}")
            yield answer if isinstance(answer, BenchmarkError) else CourseRecord.read(answer)

    def _run_real(self, tries: Sequence[Try], tell: Tell) -> Iterator[Ran]:
        """One after another: they share the machine's cores among their own workers alone."""
        config = self._config
        with RealContest(config.world.num_workers) as contest:
            for number, each in enumerate(tries, 1):
                tell(f"{each.contender.name}, seed {each.seed}: {number} of {len(tries)}")
                yield contest.run(each.job(config), config.world_of(each.contender, each.seed))


def suited(job: TrainingJob, world: World) -> Executor:
    """Choose one tensor for all workers where they are many and it can be; else a thread for each."""
    if world.num_workers <= MAX_EXACT:
        return "exact"
    try:
        refuse_unfit(job, world)
    except UsageError:
        return "exact"
    return "stacked"


MAX_WIDENINGS = 3
"""How often the grid of rates is made wider at each end at most."""


def with_rates(config: CompareConfig, tried: Iterable[float]) -> CompareConfig:
    """The config with all rates that were tried, where any were."""
    return msgspec.structs.replace(config, learning_rates=tuple(sorted(tried)) or config.learning_rates)


def further_rates(tried: Sequence[Mapping[float, Ran]], target: float) -> tuple[float, ...]:
    """Rates beyond the ends of the grid at which the best of anyone is; the same for all contenders."""
    grid = sorted(tried[0])
    bests = []
    for by_rate in tried:
        best = best_rate(by_rate, target)
        has_diverged = any(isinstance(ran, CourseRecord) and ran.has_diverged for ran in by_rate.values())
        bests.append(grid[0] if best is None and has_diverged else best)
    further = []
    if grid[0] in bests:
        further.append(grid[0] * grid[0] / grid[1])
    if grid[-1] in bests:
        further.append(grid[-1] * grid[-1] / grid[-2])
    return tuple(float(f"{rate:.2g}") for rate in further)


def best_rate(tried: Mapping[float, Ran], target: float) -> float | None:
    """That which reached the target first, the better at the end of equals; where none did, the best one.

    None that ends worse than another by more than noise, which is two deviations of the other's last quarter.
    A run that broke off is worse than any; None where all have.
    """
    records = {rate: ran for rate, ran in tried.items() if isinstance(ran, CourseRecord) and not ran.error}
    if not records:
        return None
    is_higher_better = facts_of(next(iter(records.values())).job.task).direction == "higher"
    losses = {
        rate: [-moment.value if is_higher_better else moment.value for moment in record.moments]
        for rate, record in records.items()
    }
    best = min(losses.values(), key=lambda course: course[-1])
    tail = best[-max(2, len(best) // 4) :]
    worst = best[-1] + (2 * statistics.stdev(tail) if len(tail) > 1 else 0.0)

    def order(rate: float) -> tuple[bool, float, float]:
        reached = records[rate].reached(target)
        return reached is None, 0.0 if reached is None else reached.at_s, losses[rate][-1]

    return min((rate for rate in records if losses[rate][-1] <= worst), key=order)


def why_no_rate(tried: Mapping[float, Ran]) -> str:
    """Why a contender could not choose any."""
    broken = [ran for ran in tried.values() if isinstance(ran, CourseRecord) and ran.moments]
    if broken:
        others = [ran.error for ran in broken if not ran.has_diverged]
        return clause(others[0]) if others else DIVERGED_ALWAYS
    first = next(iter(tried.values()))
    return unfit(one_line(first) if isinstance(first, BenchmarkError) else first.error)


# --- what is found out before anything runs ---

MAX_THREADS = 256
"""Workers up to which each may have a thread of its own."""
_NO_CODEC = "none"


def check_contest(config: CompareConfig) -> list[str]:
    """UsageError for what no run could do; else what will be slow, in sentences.

    The task's data is found, or fetched, on the way.
    """
    for contender in config.contenders:
        _check_options(contender, config.world)
    slow = _check_executors(config)
    make_task(Try(config.contenders[0], config.learning_rates[0], config.seeds[0]).job(config))
    if any(is_swarm(contender.strategy) for contender in config.contenders):
        check_faults(config.world)
    if config.world.faults is not None:
        # that its script concerns workers that there are, and what can happen to them
        for outcome in run_exact(config.world, lambda _: None):
            if isinstance(outcome.error, UsageError):
                raise outcome.error
    return slow


def _check_options(contender: Contender, world: World) -> None:
    """That what options name is there."""
    topology, codec = contender.options.get("topology"), contender.options.get("codec", _NO_CODEC)
    try:
        if topology is not None and find(contender.strategy)[0].needs_machines:
            make_topology(topology, world.num_machines)
        elif topology is not None:
            make_topology_on(topology, world.num_workers, world.num_machines)
        if codec != _NO_CODEC:
            codec_from_name(codec)
    except UsageError as error:
        raise UsageError(
            f"{contender.name}: {error.what}", cause=error.cause, next_step=error.next_step
        ) from error


def _check_executors(config: CompareConfig) -> list[str]:
    threaded = []
    for contender in config.contenders:
        tried = Try(contender, config.learning_rates[0], config.seeds[0])
        job, world = tried.job(config), config.world_of(contender, tried.seed)
        if config.executor == "stacked":
            refuse_unfit(job, world)
        elif config.executor == "exact" or suited(job, world) == "exact":
            threaded.append(contender.name)
    size = config.world.num_workers
    if not threaded or size <= MAX_EXACT:
        return []
    names = ", ".join(threaded)
    who = "every strategy" if len(threaded) == len(config.contenders) > 1 else names
    if size <= MAX_THREADS:
        return [f"Slow with {size} workers, each in a thread of its own: {who}."]
    instead = "--faults out" if config.world.faults is not None else f"{names} out of --strategies"
    if config.executor == "exact":
        instead = "--executor exact out"
    raise UsageError(
        f"{size} workers are too many to have a thread each, as {who} would need.",
        cause="only strategies that mix linearly and in lockstep, without faults, run in one tensor.",
        next_step=f"leave {instead}, or give --workers {MAX_THREADS} or fewer.",
    )
