"""Two reports side by side: rows paired by key and metric, what differs around them, and what is refused.

Whether two rows differ is one decision for each row, on the medians of its process starts. Iterations of one
start are not independent, so a test on them calls equal runs different; starts are. Welch's t test on the
logarithms of the medians, or the paired one where starts took turns, for then a machine that is slow for a
while is so for both; Holm's correction over all judged rows (Holm 1979). A row's interval has the level at
which Holm decided it, so it excludes zero exactly when the row is called different. `views`, `html` and
`pytorch` show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist
from typing import Any, Self

from shoal.core.errors import NotComparable, UsageError
from shoal.report import pytorch
from shoal.report.curves import is_histogram
from shoal.report.schema import Direction, Identity, Report, Row, flatten, text
from shoal.report.statistics import (
    PERCENTILES,
    change_percent,
    known_percentile,
    mean_of,
    percentile,
    start_medians,
    t_quantile,
    t_survival,
    variance_of,
)

# --- one decision for each row ---

ALPHA = 0.01
"""The chance, over all rows together, to call any equal pair different."""
MIN_STARTS = 5
"""On either side. With fewer, the spread between starts is a guess and so is any verdict."""
EFFECT_PERCENT = 5.0
POWER = 0.9
MAX_STARTS = 1_000_000
"""The most that `starts_needed` says: a row whose mean is near zero would need any number of them."""


class RowVerdict(StrEnum):
    """What is said about one pair of rows: by its value in JSON, by a label and a tone to people."""

    label: str
    tone: str
    """The colour of its words: 'good', 'bad', 'unsure' or 'quiet'."""

    def __new__(cls, value: str, label: str, tone: str) -> Self:
        """Makes each of the members below; their value alone finds them again."""
        verdict = str.__new__(cls, value)
        verdict._value_, verdict.label, verdict.tone = value, label, tone
        return verdict

    BETTER = "better", "better", "good"
    WORSE = "worse", "worse", "bad"
    NO_DIFFERENCE = "no-difference", "no difference found", "quiet"
    TOO_FEW = "too-few-starts", "too few repeats to judge", "unsure"
    FAILED = "failed", "failed in test", "bad"
    FIXED = "fixed", "failed in baseline", "good"
    FAILED_BOTH = "failed-in-both", "failed in both", "bad"


JUDGED = (RowVerdict.BETTER, RowVerdict.WORSE, RowVerdict.NO_DIFFERENCE)


@dataclass(frozen=True)
class Judgement:
    """The verdict on one row and what it rests on; percentages are negative when the test is worse."""

    verdict: RowVerdict
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
        if min(len(old.starts), len(new.starts)) >= MIN_STARTS
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


def _unjudged(old: Row, new: Row, level: float, effect_percent: float) -> Judgement:
    if old.error is not None:
        return Judgement(RowVerdict.FIXED if new.error is None else RowVerdict.FAILED_BOTH)
    if new.error is not None:
        return Judgement(RowVerdict.FAILED)
    change = change_percent(percentile(old.samples, 50), percentile(new.samples, 50), old.direction)
    needed = starts_needed(start_medians(old), start_medians(new), level=level, effect_percent=effect_percent)
    return Judgement(
        RowVerdict.TOO_FEW, change_percent=change, starts_needed=needed, effect_percent=effect_percent
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
        differences = [after - before for before, after in zip(old, new, strict=True)]
        error, freedom = math.sqrt(variance_of(differences) / len(differences)), len(differences) - 1.0
    else:
        error, freedom = _welch_error(old, new)
    if error == 0:
        return _Test(difference, 0.0, 1.0, 1.0 if difference == 0 else 0.0, is_log, base)
    p_value = 2 * t_survival(abs(difference) / error, freedom)
    return _Test(difference, error, freedom, p_value, is_log, base)


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
    verdict = RowVerdict.NO_DIFFERENCE
    if p_adjusted <= alpha:
        verdict = RowVerdict.BETTER if is_up == (direction == "higher") else RowVerdict.WORSE
    margin = test.error * t_quantile(level / 2, test.freedom) if test.error else 0.0
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


# --- two reports ---

WORKLOAD = ("batch_size", "dataset", "model", "precision", "preset")
"""Configuration that says what one sample is: where it differs and is in no key, nothing compares."""
VOLATILE = ("before", "after")
"""Parts of the environment that differ between any two runs; `busy` looks at them."""
BUSY_STEAL_PERCENT = 2.0


@dataclass(frozen=True)
class Difference:
    """One entry of config or environment that is not the same; `-` where a side has none."""

    name: str
    baseline: str
    test: str


@dataclass(frozen=True)
class Change:
    """One percentile of both sides, None where a side has too few samples for it.

    `percent` is negative when the test is worse; None over 0, and where a side is missing.
    """

    q: int
    baseline: float | None
    test: float | None
    percent: float | None


@dataclass(frozen=True)
class RowDiff:
    """One figure in both reports. `changes` is empty where a side failed."""

    baseline: Row
    test: Row
    changes: tuple[Change, ...]
    judgement: Judgement

    @property
    def verdict(self) -> RowVerdict:
        """The judgement in one word."""
        return self.judgement.verdict


@dataclass(frozen=True)
class Diff:
    """The comparison of two reports, in the row order of the baseline."""

    baseline: Report
    test: Report
    rows: tuple[RowDiff, ...]
    only_baseline: tuple[Row, ...]
    only_test: tuple[Row, ...]
    differences: tuple[Difference, ...]
    """Of config, seeds, code and environment."""
    warnings: tuple[str, ...] = field(default=())

    def count(self, *verdicts: RowVerdict) -> int:
        """How many rows have one of these verdicts."""
        return sum(row.verdict in verdicts for row in self.rows)

    def result(self) -> dict[str, Any]:
        """The content of the RESULT line."""
        measured = [row for row in self.rows if row.judgement.change_percent is not None]
        worst = min(measured, key=lambda row: row.judgement.change_percent or 0.0, default=None)
        return {
            "benchmark": self.baseline.benchmark,
            "num_rows": len(self.rows),
            "judged": self.count(*JUDGED),
            "better": self.count(RowVerdict.BETTER),
            "worse": self.count(RowVerdict.WORSE),
            "too_few_starts": self.count(RowVerdict.TOO_FEW),
            "failed": self.count(RowVerdict.FAILED, RowVerdict.FAILED_BOTH),
            "only_baseline": len(self.only_baseline),
            "only_test": len(self.only_test),
            "worst_change_percent": worst.judgement.change_percent if worst else None,
        }

    def document(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        return {
            "schema": "shoal-diff",
            "version": 1,
            "benchmark": self.baseline.benchmark,
            "differences": [vars(difference) for difference in self.differences],
            "warnings": list(self.warnings),
            "rows": [_row_document(row) for row in self.rows],
            "only_baseline": [{"key": row.key, "metric": row.metric} for row in self.only_baseline],
            "only_test": [{"key": row.key, "metric": row.metric} for row in self.only_test],
            "result": self.result(),
        }


def compare(
    baseline: Report, test: Report, *, alpha: float = ALPHA, effect_percent: float = EFFECT_PERCENT
) -> Diff:
    """Pair and judge all rows; `alpha` holds for all of them together.

    `effect_percent` is the change for which a row with too few starts says how many it would need. Raises
    NotComparable when the reports measure different things.
    """
    _check(baseline, test)
    old_rows, new_rows = ([row for row in report.rows if _counts(row)] for report in (baseline, test))
    others = {_pairing(row): row for row in new_rows}
    pairs = [(row, others[_pairing(row)]) for row in old_rows if _pairing(row) in others]
    _check_pairs(baseline, test, pairs)
    took_turns = bool(baseline.turns) and baseline.turns == test.turns
    judgements = judge(pairs, alpha=alpha, effect_percent=effect_percent, took_turns=took_turns)
    paired: dict[Identity, bool] = {_pairing(old): True for old, _ in pairs}
    differences = _differences(baseline, test)
    return Diff(
        baseline=baseline,
        test=test,
        rows=tuple(
            RowDiff(old, new, _changes(old, new), judgement)
            for (old, new), judgement in zip(pairs, judgements, strict=True)
        ),
        only_baseline=tuple(row for row in old_rows if _pairing(row) not in paired),
        only_test=tuple(row for row in new_rows if _pairing(row) not in paired),
        differences=differences,
        warnings=tuple(_warnings(baseline, test, differences)),
    )


def _pairing(row: Row) -> Identity:
    """By what a row finds its other half: reports from before GPUs were measured name no device."""
    metric, key = row.identity
    return metric, tuple(entry for entry in key if entry != ("device", False, "cpu"))


def _counts(row: Row) -> bool:
    """Histograms are shown, not judged; PyTorch's comparison leaves the run without DDP out."""
    return row.key.get("has_ddp") is not False and not is_histogram(row)


def _check(baseline: Report, test: Report) -> None:
    kinds = [report.benchmark == pytorch.BENCHMARK for report in (baseline, test)]
    if kinds[0] != kinds[1]:
        side, other = ("baseline", "test") if kinds[0] else ("test", "baseline")
        raise NotComparable(
            f"the {side} is PyTorch's DDP-benchmark JSON and the {other} is a Shoal report",
            cause="PyTorch's file pools the samples of all ranks and starts; a Shoal report keeps them apart",
            next_step="compare two files of one kind; `shoal bench ddp --json FILE` writes PyTorch's",
        )
    if baseline.benchmark != test.benchmark:
        raise NotComparable(
            f"the baseline is of benchmark '{baseline.benchmark}', the test of '{test.benchmark}'",
            next_step=f"give two reports of `shoal bench {baseline.benchmark}`",
        )
    devices = [_device_kind(report.environment.get("device")) for report in (baseline, test)]
    if all(devices) and devices[0] != devices[1]:
        raise NotComparable(
            f"the baseline ran on {devices[0]}, the test on {devices[1]}",
            cause="figures of different kinds of device measure the devices, not the code",
            next_step="run both on the same kind; `shoal report` shows two such reports side by side",
        )


def _check_pairs(baseline: Report, test: Report, pairs: list[tuple[Row, Row]]) -> None:
    if not pairs:
        example = f"; the baseline has {baseline.rows[0].name}" if baseline.rows else ""
        example += f", the test {test.rows[0].name}" if test.rows else ""
        raise NotComparable(
            f"the two reports have no row in common{example}",
            cause="they ran other scenarios, sizes or metrics",
            next_step="run the benchmark with the same scenarios on both sides",
        )
    for old, new in pairs:
        for what in ("unit", "direction"):
            if getattr(old, what) != getattr(new, what):
                sides = f"'{getattr(old, what)}' in the baseline and '{getattr(new, what)}' in the test"
                raise NotComparable(
                    f"{old.name} has {what} {sides}",
                    cause="different versions of the benchmark wrote them",
                    next_step="run both sides with the same version of the benchmark",
                )
    for name in WORKLOAD:
        values = [report.config.get(name) for report in (baseline, test)]
        if values[0] != values[1] and not any(name in old.key for old, _ in pairs):
            raise NotComparable(
                f"{name} is {text(values[0])} in the baseline and {text(values[1])} in the test",
                cause="a sample of one is not the same work as a sample of the other",
                next_step=f"run both with the same --{name.replace('_', '-')}",
            )


def _device_kind(device: object) -> str:
    if isinstance(device, dict):
        device = device.get("kind") or device.get("type") or ""
    words = str(device or "").replace(":", " ").split()
    return words[0].lower() if words else ""


def _changes(old: Row, new: Row) -> tuple[Change, ...]:
    if not old.starts or not new.starts:
        return ()
    changes = []
    for q in PERCENTILES:
        first, second = known_percentile(old.samples, q), known_percentile(new.samples, q)
        if first is None or second is None:
            changes.append(Change(q, first, second, None))
        else:
            changes.append(Change(q, first, second, change_percent(first, second, old.direction)))
    return tuple(changes)


def _differences(baseline: Report, test: Report) -> tuple[Difference, ...]:
    sides = []
    for report in (baseline, test):
        place = {name: value for name, value in report.environment.items() if name not in VOLATILE}
        sides.append(
            flatten({"config": report.config, "environment": place})
            | {"seeds": report.seeds, "code": str(report.code)}
        )
    return tuple(
        Difference(name, *(text(side[name]) if name in side else "-" for side in sides))
        for name in sorted({**sides[0], **sides[1]})
        if sides[0].get(name, "-") != sides[1].get(name, "-")
    )


def _warnings(baseline: Report, test: Report, differences: tuple[Difference, ...]) -> list[str]:
    places = [
        item.name.removeprefix("environment.") for item in differences if item.name.startswith("environment.")
    ]
    warnings = [f"the environments differ: {', '.join(places)}"] if places else []
    for side, report in (("baseline", baseline), ("test", test)):
        warnings += [f"{side}: {reason}" for reason in busy(report)]
    return warnings


def busy(report: Report) -> list[str]:
    """Signs that something else ran there: load above the number of cores beforehand, or CPU time stolen."""
    reasons = []
    cores = report.environment.get("cores")
    for when in VOLATILE:
        state = report.environment.get(when)
        if not isinstance(state, dict):
            continue
        load, steal = state.get("load_average"), state.get("cpu_steal_percent")
        if isinstance(load, list | tuple) and load:
            load = load[0]
        if when == "before" and isinstance(load, int | float) and isinstance(cores, int) and load > cores:
            reasons.append(f"the load average was {load:.1f} on {cores} cores before the run")
        if isinstance(steal, int | float) and steal > BUSY_STEAL_PERCENT:
            moment = "before" if when == "before" else "during"
            reasons.append(f"{steal:.1f}% of the CPU was stolen by other guests {moment} the run")
    return reasons


def _row_document(row: RowDiff) -> dict[str, Any]:
    judgement = row.judgement
    interval = None if judgement.low_percent is None else [judgement.low_percent, judgement.high_percent]
    return {
        "key": row.baseline.key,
        "metric": row.baseline.metric,
        "unit": row.baseline.unit,
        "direction": row.baseline.direction,
        "verdict": judgement.verdict.value,
        "change_percent": judgement.change_percent,
        "interval_percent": interval,
        "confidence": judgement.confidence,
        "p_value": judgement.p_value,
        "p_adjusted": judgement.p_adjusted,
        "starts": [len(row.baseline.starts), len(row.test.starts)],
        "starts_needed": judgement.starts_needed,
        "percentiles": [vars(change) for change in row.changes],
        "errors": [row.baseline.error, row.test.error],
    }


# --- --fail-if-slower ---

PASSED, SLOWER, UNDECIDED = 0, 1, 3


@dataclass(frozen=True)
class Gate:
    """The exit code, and one sentence for each row that led to it."""

    exit_code: int
    reasons: tuple[str, ...] = ()


def parse_limit(limit: str) -> float:
    """Percent from '5%' or '5'. Raises UsageError for anything else, and for a bare fraction such as 0.05."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", limit, re.ASCII)
    if match is None:
        raise UsageError(
            f"--fail-if-slower takes a percentage, not {limit!r}",
            next_step="--fail-if-slower 5% (or 5, the same)",
        )
    percent = float(match[1])
    if 0 < percent < 1 and not match[2]:
        raise UsageError(
            f"--fail-if-slower {limit} is ambiguous",
            cause=f"it could mean {percent:g} percent or {100 * percent:g} percent",
            next_step=f"--fail-if-slower {percent:g}% or --fail-if-slower {100 * percent:g}%",
        )
    return percent


def check_gate(diff: Diff, limit_percent: float) -> Gate:
    """Fails on a row that is judged worse by more than the limit, or that failed in the test alone.

    Undecided when a row with too few starts is past the limit: it may be slower, and nothing can say so.
    """
    failed = [
        f"{row.test.name} failed in the test: {row.test.error}"
        for row in diff.rows
        if row.verdict is RowVerdict.FAILED
    ]
    slower = [
        f"{row.test.name} is worse{_by(row)}; the limit is {limit_percent:g}%"
        for row in diff.rows
        if row.verdict is RowVerdict.WORSE and _is_past(row, limit_percent)
    ]
    if failed or slower:
        return Gate(SLOWER, (*failed, *slower))
    unclear = tuple(
        f"{row.test.name} looks worse{_by(row)}, but has too few repeats to judge: "
        f"it needs {row.judgement.starts_needed} starts on each side"
        for row in diff.rows
        if row.verdict is RowVerdict.TOO_FEW and _is_past(row, limit_percent)
    )
    return Gate(UNDECIDED, unclear) if unclear else Gate(PASSED)


def _is_past(row: RowDiff, limit_percent: float) -> bool:
    change = row.judgement.change_percent
    if change is not None:
        return change < -limit_percent
    # from a zero baseline: any loss is past any limit
    old, new = percentile(row.baseline.samples, 50), percentile(row.test.samples, 50)
    has_lost = (new < old) == (row.test.direction == "higher")
    return has_lost or row.verdict is RowVerdict.WORSE


def _by(row: RowDiff) -> str:
    change = row.judgement.change_percent
    return "" if change is None else f" by {-change:.1f}%"
