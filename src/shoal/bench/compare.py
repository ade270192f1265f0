"""`shoal compare`: strategies at one task, in one world: by steps, by seconds and by bytes.

Two phases. In the first every contender tries each learning rate of one grid, with a seed that is none of
the contest's; in the second it runs with its best, once for each seed. All runs are independent, so that
they are spread over processes; what each of them does is `simulate.contest`'s, what the contest's rows say is
`compare_rows`', and what all that means `compare_summary`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shoal.bench.accuracy_contenders import Contender
from shoal.bench.compare_reasons import DIVERGED_ALWAYS, clause, unfit
from shoal.bench.compare_rows import CHOSEN, NOT_REACHED, Finish, final_of, metrics_of, tuning_of
from shoal.bench.compare_settings import CompareConfig, read_config
from shoal.bench.contest_real import RealContest
from shoal.bench.frame import Measured, MeasuredCurve, Noted, Tell, measured
from shoal.bench.workers import one_line, run_tasks
from shoal.core import BenchmarkError, UsageError
from shoal.core.placement import num_cores
from shoal.simulate.contest import Errand, Executor
from shoal.simulate.job import Job
from shoal.simulate.record import CourseRecord
from shoal.simulate.stacked import refuse_unfit
from shoal.simulate.task_facts import facts_of
from shoal.simulate.world import World

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
        """For a process of the pool."""
        job, world = self.job(config), config.world_of(self.contender, self.seed)
        executor = config.executor if config.executor != "auto" else suited(job, world)
        return Errand(job=job, world=world, executor=executor).plain()

    def job(self, config: CompareConfig) -> Job:
        """What each of its workers is to do."""
        return Job(
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

    def run(self, tell: Tell) -> Iterator[Measured | MeasuredCurve | Noted]:
        """Tune, then compete; a contender whose run fails is a row, and the others go on."""
        config = self._config
        metrics = metrics_of(facts_of(config.task))
        began_s = time.perf_counter()
        tried = self._tuned(tell) if config.is_tuned else {}
        tuned_s = time.perf_counter()
        rates = self._rates(tried)
        for contender, found in self._contest(rates, tell):
            key = {"strategy": contender.name}
            failures = [each for each in found if isinstance(each, BenchmarkError)]
            records = [each for each in found if isinstance(each, CourseRecord)]
            if contender.name in rates:
                yield from Finish(contender.name, rates[contender.name], records).told(config)
            else:
                why = why_no_rate(tried[contender.name])
                for _ in config.seeds:
                    yield measured(metrics, NOT_REACHED, {**key, "why": why}, [1.0])
            if failures:
                final = final_of(facts_of(config.task))
                yield measured(metrics, final, key, error=one_line(failures[0]))
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
        """By contender and rate."""
        config = self._config
        tries = [
            Try(contender, rate, config.tuning_seed)
            for contender in config.contenders
            for rate in config.learning_rates
        ]
        found: dict[str, dict[float, Ran]] = {contender.name: {} for contender in config.contenders}
        for each, ran in zip(tries, self._run(tries, "tuning", tell), strict=True):
            found[each.contender.name][each.rate] = ran
        return found

    def _tuning_rows(
        self, tried: Mapping[str, Mapping[float, Ran]], rates: Mapping[str, float]
    ) -> Iterator[Measured]:
        """Last scores by rate, and which rate each competed with."""
        facts = facts_of(self._config.task)
        metrics, metric = metrics_of(facts), tuning_of(facts)
        for name, by_rate in tried.items():
            for rate, ran in by_rate.items():
                key = {"strategy": name, "learning_rate": rate}
                if isinstance(ran, BenchmarkError):
                    yield measured(metrics, metric, key, error=one_line(ran))
                elif not ran.error and ran.moments:
                    yield measured(metrics, metric, key, [ran.moments[-1].value])
        for name, rate in rates.items():
            yield measured(metrics, CHOSEN, {"strategy": name, "learning_rate": rate}, [1.0])

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


def suited(job: Job, world: World) -> Executor:
    """All workers in one tensor where they are many and it can be; else a thread for each."""
    if world.num_workers <= MAX_EXACT:
        return "exact"
    try:
        refuse_unfit(job, world)
    except UsageError:
        return "exact"
    return "stacked"


def best_rate(tried: Mapping[float, Ran], target: float) -> float | None:
    """That which reached the target first, the better at the end of equals; where none did, the best one.

    A run that broke off is worse than any; None where all have.
    """
    records = {rate: ran for rate, ran in tried.items() if isinstance(ran, CourseRecord) and not ran.error}
    if not records:
        return None

    def order(rate: float) -> tuple[bool, float, float]:
        record = records[rate]
        facts = facts_of(record.job.task)
        reached, final = record.reached(target), record.moments[-1].value
        loss = -final if facts.direction == "higher" else final
        return reached is None, 0.0 if reached is None else reached.at_s, loss

    return min(records, key=order)


def why_no_rate(tried: Mapping[float, Ran]) -> str:
    """Why a contender could not choose any."""
    broken = [ran for ran in tried.values() if isinstance(ran, CourseRecord) and ran.moments]
    if broken:
        others = [ran.error for ran in broken if not ran.has_diverged]
        return clause(others[0]) if others else DIVERGED_ALWAYS
    first = next(iter(tried.values()))
    return unfit(one_line(first) if isinstance(first, BenchmarkError) else first.error)
