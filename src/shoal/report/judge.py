"""Whether two rows differ: one decision for each row, on the medians of its process starts.

Iterations of one start are not independent, so a test on them calls equal runs different; starts are.
Welch's t test on the logarithms of the medians, or the paired one where starts took turns, for then a machine
that is slow for a while is so for both; Holm's correction over all judged rows (Holm 1979). A row's interval
has the level at which Holm decided it, so it excludes zero exactly when the row is called different.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from shoal.report.schema import Direction, Row
from shoal.report.statistics import change_percent, mean_of, percentile, start_medians, variance_of
from shoal.report.student import quantile, survival

ALPHA = 0.01
"""The chance, over all rows together, to call any equal pair different."""
MIN_STARTS = 5
"""On either side. With fewer, the spread between starts is a guess and so is any verdict."""
EFFECT_PERCENT = 5.0
POWER = 0.9
MAX_STARTS = 1_000_000
"""The most that `starts_needed` says: a row whose mean is near zero would need any number of them."""


class Verdict(StrEnum):
    """What is said about one pair of rows."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no-difference"
    TOO_FEW = "too-few-starts"
    FAILED = "failed"
    FIXED = "fixed"
    FAILED_BOTH = "failed-in-both"


LABELS = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.NO_DIFFERENCE: "no difference found",
    Verdict.TOO_FEW: "too few repeats to judge",
    Verdict.FAILED: "failed in test",
    Verdict.FIXED: "failed in baseline",
    Verdict.FAILED_BOTH: "failed in both",
}
JUDGED = (Verdict.BETTER, Verdict.WORSE, Verdict.NO_DIFFERENCE)


@dataclass(frozen=True)
class Judgement:
    """The verdict on one row and what it rests on; percentages are negative when the test is worse."""

    verdict: Verdict
    change_percent: float | None = None
    """Of the typical start median where judged, of the pooled median otherwise."""
    low_percent: float | None = None
    high_percent: float | None = None
    confidence: float | None = None
    """Of the interval from low to high, for example 0.99."""
    p_value: float | None = None
    p_adjusted: float | None = None
    """By Holm, over all judged rows of the comparison."""
    starts_needed: int | None = None
    """On each side, to find a change of `effect_percent`; both only where there were too few to judge."""
    effect_percent: float | None = None


@dataclass(frozen=True)
class _Test:
    """A t test of two samples, and the way back from its scale to percent."""

    difference: float
    error: float
    freedom: float
    p_value: float
    is_log: bool
    base: float

    def percent(self, difference: float, direction: Direction) -> float | None:
        if self.is_log:
            change = 100 * math.expm1(min(difference, 700.0))
        elif self.base == 0:
            return 0.0 if difference == 0 else None
        else:
            change = 100 * difference / abs(self.base)
        if not math.isfinite(change):
            return None
        return change if direction == "higher" else -change


def judge(
    pairs: Sequence[tuple[Row, Row]],
    *,
    alpha: float = ALPHA,
    effect_percent: float = EFFECT_PERCENT,
    took_turns: bool = False,
) -> list[Judgement]:
    """One judgement for each (baseline, test) pair; the pairs are one family for Holm's correction.

    `took_turns` says that starts of the same number are neighbours in time.
    """
    tests = [
        _t_test(start_medians(old), start_medians(new), are_pairs=took_turns)
        if _can_judge(old, new)
        else None
        for old, new in pairs
    ]
    p_values = [test.p_value for test in tests if test is not None]
    adjusted, levels = holm(p_values, alpha)
    # with enough starts a row joins the family; Holm's strictest step holds whatever the other rows show
    num_family = sum(old.error is None and new.error is None for old, new in pairs)
    strictest = alpha / max(1, num_family)
    judgements, decided = [], 0
    for (old, new), test in zip(pairs, tests, strict=True):
        if test is None:
            judgements.append(_unjudged(old, new, strictest, effect_percent))
        else:
            judgements.append(_judged(test, old.direction, adjusted[decided], levels[decided], alpha))
            decided += 1
    return judgements


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> tuple[list[float], list[float]]:
    """For each p-value its adjusted one (different when at most `alpha`) and the level it was held against.

    Those that stay equal share the level of the first that did, so that intervals agree with the decisions.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, levels = [1.0] * len(order), [alpha] * len(order)
    running, level = 0.0, alpha
    for rank, index in enumerate(order):
        remaining = len(order) - rank
        if running <= alpha:
            level = alpha / remaining
        running = max(running, min(1.0, p_values[index] * remaining))
        adjusted[index], levels[index] = running, level
    return adjusted, levels


def starts_needed(
    baseline: Sequence[float],
    test: Sequence[float],
    *,
    level: float = ALPHA,
    effect_percent: float = EFFECT_PERCENT,
) -> int:
    """How many starts each side needs to find a change of `effect_percent` nine times in ten; at least five.

    Takes start medians. `level` is the one at which the row will be tested: for a family of rows, `judge`
    gives Holm's strictest step, alpha over the number of rows. The normal approximation with Guenther's
    correction for the t distribution; where no side has two starts the spread is unknown, and the answer is
    the least that can be judged.
    """
    old, new, is_log = _on_one_scale(baseline, test)
    sides = (old, new)
    freedom = sum(len(side) - 1 for side in sides if side)
    size = math.log1p(effect_percent / 100) * (1.0 if is_log else abs(mean_of([*old, *new])))
    if freedom <= 0 or size <= 0:
        return MIN_STARTS
    variance = sum(variance_of(side) * (len(side) - 1) for side in sides if len(side) > 1) / freedom
    normal = NormalDist()
    z_level, z_power = normal.inv_cdf(1 - level / 2), normal.inv_cdf(POWER)
    spread = math.sqrt(variance) / size
    count = 2 * (z_level + z_power) ** 2 * spread * spread + z_level**2 / 4
    return max(MIN_STARTS, math.ceil(min(count, MAX_STARTS)))


def _can_judge(old: Row, new: Row) -> bool:
    return min(len(old.starts), len(new.starts)) >= MIN_STARTS


def _unjudged(old: Row, new: Row, level: float, effect_percent: float) -> Judgement:
    if old.error is not None and new.error is not None:
        return Judgement(Verdict.FAILED_BOTH)
    if new.error is not None:
        return Judgement(Verdict.FAILED)
    if old.error is not None:
        return Judgement(Verdict.FIXED)
    change = change_percent(percentile(old.samples, 50), percentile(new.samples, 50), old.direction)
    needed = starts_needed(start_medians(old), start_medians(new), level=level, effect_percent=effect_percent)
    return Judgement(
        Verdict.TOO_FEW, change_percent=change, starts_needed=needed, effect_percent=effect_percent
    )


def _on_one_scale(old: Sequence[float], new: Sequence[float]) -> tuple[list[float], list[float], bool]:
    """Both sides as they are tested, and whether that is by logarithms: where all are positive.

    Others are divided by one power of two, which no ratio of them notices, so that squares of any float are
    floats too.
    """
    values = [*old, *new]
    if all(value > 0 for value in values):
        return [math.log(value) for value in old], [math.log(value) for value in new], True
    exponent = math.frexp(max(abs(value) for value in values))[1]
    return (
        [math.ldexp(value, -exponent) for value in old],
        [math.ldexp(value, -exponent) for value in new],
        False,
    )


def _t_test(baseline: list[float], test: list[float], *, are_pairs: bool) -> _Test:
    """Paired where every start has its neighbour, Welch's elsewhere."""
    old, new, is_log = _on_one_scale(baseline, test)
    base = mean_of(old)
    difference = mean_of(new) - base
    if are_pairs and len(old) == len(new):
        error, freedom = _paired_error([after - before for before, after in zip(old, new, strict=True)])
    else:
        error, freedom = _welch_error(old, new)
    if error == 0:
        return _Test(difference, 0.0, 1.0, 1.0 if difference == 0 else 0.0, is_log, base)
    p_value = 2 * survival(abs(difference) / error, freedom)
    return _Test(difference, error, freedom, p_value, is_log, base)


def _paired_error(differences: list[float]) -> tuple[float, float]:
    """Of the mean difference: its error, and degrees of freedom."""
    return math.sqrt(variance_of(differences) / len(differences)), len(differences) - 1


def _welch_error(old: list[float], new: list[float]) -> tuple[float, float]:
    """Of the difference of means: its error, and degrees of freedom."""
    shares = variance_of(old) / len(old), variance_of(new) / len(new)
    total = sum(shares)
    if total == 0:
        return 0.0, 1.0
    # of the shares' shares, for the square of a small variance may be no float
    parts = (shares[0] / total) ** 2 / (len(old) - 1) + (shares[1] / total) ** 2 / (len(new) - 1)
    return math.sqrt(total), 1 / parts


def _judged(test: _Test, direction: Direction, p_adjusted: float, level: float, alpha: float) -> Judgement:
    is_up = test.difference > 0
    verdict = Verdict.NO_DIFFERENCE
    if p_adjusted <= alpha:
        verdict = Verdict.BETTER if is_up == (direction == "higher") else Verdict.WORSE
    margin = test.error * quantile(level / 2, test.freedom) if test.error else 0.0
    ends = [test.percent(test.difference + side * margin, direction) for side in (-1, 1)]
    if direction == "lower":
        ends.reverse()
    return Judgement(
        verdict,
        change_percent=test.percent(test.difference, direction),
        low_percent=ends[0],
        high_percent=ends[1],
        confidence=1 - level,
        p_value=test.p_value,
        p_adjusted=p_adjusted,
    )
