"""Rows and curves of one contender of `shoal compare`: how its runs went, one for each seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shoal.bench.compare_reasons import ended_early, reasons_of
from shoal.bench.compare_settings import CompareConfig
from shoal.bench.frame import Measured, MeasuredCurve, Metrics, RowKey, measured
from shoal.simulate.record import CourseRecord, Moment
from shoal.simulate.task_facts import TaskFacts, facts_of

SECONDS, BYTES, STEPS = "seconds_to_target", "bytes_to_target", "steps_to_target"
DISTANCE, RUN_SECONDS, SENT, CHOSEN = "consensus_distance", "run_seconds", "bytes_sent", "chosen"
MEAN_STALENESS, STALENESS, WAITED = "mean_staleness", "staleness", "waited"
NOT_REACHED, ENDED_EARLY = "not_reached", "ended_early"
MAX_MAPPED = 32
"""Workers up to which it is told who waited for whom."""


def final_of(facts: TaskFacts) -> str:
    """The metric of the last score of the mean of all models."""
    return f"final_{facts.score}"


def worst_of(facts: TaskFacts) -> str:
    """The metric of the worst worker's last score."""
    return f"worst_final_{facts.score}"


def tuning_of(facts: TaskFacts) -> str:
    """The metric of the last score in tuning; a rate without such a row has diverged."""
    return f"tuning_{facts.score}"


def metrics_of(facts: TaskFacts) -> Metrics:
    """Of a contest at one task."""
    return {
        SECONDS: ("s", "lower"),
        BYTES: ("B", "lower"),
        STEPS: ("", "lower"),
        final_of(facts): ("", facts.direction),
        worst_of(facts): ("", facts.direction),
        DISTANCE: ("", "lower"),
        MEAN_STALENESS: ("", "lower"),
        RUN_SECONDS: ("s", "lower"),
        SENT: ("B", "lower"),
        tuning_of(facts): ("", facts.direction),
        CHOSEN: ("", "higher"),
        STALENESS: ("", "lower"),
        WAITED: ("s", "lower"),
        NOT_REACHED: ("", "lower"),
        ENDED_EARLY: ("", "lower"),
    }


class Finish(msgspec.Struct, frozen=True):
    """All runs of one contender in the contest."""

    name: str
    rate: float
    records: list[CourseRecord]

    @property
    def key(self) -> RowKey:
        """Of its rows and curves."""
        return {"strategy": self.name}

    def told(self, config: CompareConfig) -> Iterator[Measured | MeasuredCurve]:
        """One sample, and one line, for each seed."""
        facts = facts_of(config.task)
        metrics = metrics_of(facts)
        for record in self.records:
            figures = _figures(record, facts, config.target)
            for metric in metrics:
                if metric in figures:
                    yield measured(metrics, metric, self.key, [figures[metric]])
            yield from self._curves(record, facts)
            for behind, count in sorted(record.staleness.items()):
                yield measured(metrics, STALENESS, {**self.key, "behind": behind}, [float(count)])
        yield from self._waits(metrics)
        arrived: list[CourseRecord] = []
        missed: list[CourseRecord] = []
        for record in self.records:
            is_reached = not record.error and record.reached(config.target) is not None
            (arrived if is_reached else missed).append(record)
        for why, count in reasons_of(missed, edge_of(config, self.rate)).items():
            for _ in range(count):
                yield measured(metrics, NOT_REACHED, {**self.key, "why": why}, [1.0])
        for record in arrived:
            if record.has_ended_early:
                yield measured(metrics, ENDED_EARLY, {**self.key, "why": ended_early(record)}, [1.0])

    def _curves(self, record: CourseRecord, facts: TaskFacts) -> Iterator[MeasuredCurve]:
        if not record.moments:
            return
        axes = {
            "step": [moment.step for moment in record.moments],
            "s": [moment.at_s for moment in record.moments],
            "bytes": [float(moment.moved_bytes) for moment in record.moments],
        }
        for metric, values in _courses(record.moments, facts).items():
            yield MeasuredCurve(
                key=self.key,
                metric=metric,
                unit="",
                direction=facts.direction if facts.score in metric else "lower",
                points={**axes, "value": values},
            )

    def _waits(self, metrics: Metrics) -> Iterator[Measured]:
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
                    yield measured(metrics, WAITED, key, [wait_s])


def edge_of(config: CompareConfig, rate: float) -> str:
    """At which end of the grid a rate is, beyond which there may be a better one; '' for neither."""
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
        final_of(facts): last.value,
        worst_of(facts): last.worst,
        DISTANCE: last.consensus_distance,
        RUN_SECONDS: last.at_s,
        SENT: float(last.moved_bytes),
    }
    if record.mean_staleness is not None:
        figures[MEAN_STALENESS] = record.mean_staleness
    return figures


def _courses(moments: Sequence[Moment], facts: TaskFacts) -> dict[str, list[float]]:
    fields: dict[str, Any] = {
        facts.score: "value",
        f"worst_{facts.score}": "worst",
        "loss": "loss",
        DISTANCE: "consensus_distance",
    }
    return {metric: [getattr(moment, field) for moment in moments] for metric, field in fields.items()}
