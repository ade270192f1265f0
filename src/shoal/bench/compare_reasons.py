"""Why a contender did not reach the target, in one clause; for all seeds of which that is so together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from shoal.report.units import digits
from shoal.simulate.record import CourseRecord
from shoal.simulate.task_facts import TaskFacts, facts_of

DIVERGED_ALWAYS = "diverged at every rate of the grid"
_TAIL = 0.25  # of a course: where it must still gain to be called improving
_NOTABLE = 0.02  # of the whole way from the first score to the best
_FALLEN = 0.2  # of that way, lost again at the end


class Reason(msgspec.Struct, frozen=True):
    """Of one run: what kind, and where its score was best."""

    kind: str
    best: float | None = None
    step: float = 0.0
    may_be_the_rate: bool = True
    """Whether another rate may have helped."""


def shown_score(facts: TaskFacts, value: float) -> str:
    """A share as a percentage, anything else with three digits."""
    return f"{100 * value:.1f} %" if facts.score == "accuracy" else digits(value)


def shown_target(facts: TaskFacts, value: float) -> str:
    """As it was asked for."""
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
    """Of one that did not do a single step."""
    return f"could not take part: {clause(why)}"


def ended_early(record: CourseRecord) -> str:
    """Of one that no worker has brought to its end."""
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
