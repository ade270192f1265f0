"""Two reports side by side: rows paired by key and metric, what differs around them, and what is refused.

`judge` decides; `tables`, `html` and `pytorch` show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import NotComparable
from shoal.report import pytorch
from shoal.report.histograms import is_histogram
from shoal.report.judge import ALPHA, EFFECT_PERCENT, JUDGED, Judgement, Verdict, judge
from shoal.report.schema import Identity, Report, Row, flatten, text
from shoal.report.statistics import PERCENTILES, change_percent, percentiles

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
    """One percentile of both sides; `percent` is negative when the test is worse, None over 0."""

    q: int
    baseline: float
    test: float
    percent: float | None


@dataclass(frozen=True)
class RowDiff:
    """One figure in both reports. `changes` is empty where a side failed."""

    baseline: Row
    test: Row
    changes: tuple[Change, ...]
    judgement: Judgement

    @property
    def verdict(self) -> Verdict:
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

    def count(self, *verdicts: Verdict) -> int:
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
            "better": self.count(Verdict.BETTER),
            "worse": self.count(Verdict.WORSE),
            "too_few_starts": self.count(Verdict.TOO_FEW),
            "failed": self.count(Verdict.FAILED, Verdict.FAILED_BOTH),
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
        for what, first, second in (
            ("unit", old.unit, new.unit),
            ("direction", old.direction, new.direction),
        ):
            if first != second:
                raise NotComparable(
                    f"{old.name} has {what} '{first}' in the baseline and '{second}' in the test",
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
    values = zip(PERCENTILES, percentiles(old.samples), percentiles(new.samples), strict=True)
    return tuple(
        Change(q, first, second, change_percent(first, second, old.direction)) for q, first, second in values
    )


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
