"""`--fail-if-slower`: whether a comparison passes, and the exit code that says so."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.core.errors import UsageError
from shoal.report.diff import Diff, RowDiff
from shoal.report.judge import Verdict

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


def check(diff: Diff, limit_percent: float) -> Gate:
    """Fails on a row that is judged worse by more than the limit, or that failed in the test alone.

    Undecided when a row with too few starts is past the limit: it may be slower, and nothing can say so.
    """
    failed = [
        f"{row.test.name} failed in the test: {row.test.error}"
        for row in diff.rows
        if row.verdict is Verdict.FAILED
    ]
    slower = [
        f"{row.test.name} is worse{_by(row)}; the limit is {limit_percent:g}%"
        for row in diff.rows
        if row.verdict is Verdict.WORSE and _is_past(row, limit_percent)
    ]
    if failed or slower:
        return Gate(SLOWER, (*failed, *slower))
    unclear = tuple(
        f"{row.test.name} looks worse{_by(row)}, but has too few repeats to judge: "
        f"it needs {row.judgement.starts_needed} starts on each side"
        for row in diff.rows
        if row.verdict is Verdict.TOO_FEW and _is_past(row, limit_percent)
    )
    return Gate(UNDECIDED, unclear) if unclear else Gate(PASSED)


def _is_past(row: RowDiff, limit_percent: float) -> bool:
    change = row.judgement.change_percent
    if change is None:  # from a zero baseline: any loss is past any limit
        return row.verdict is Verdict.WORSE or _lost(row)
    return change < -limit_percent


def _by(row: RowDiff) -> str:
    change = row.judgement.change_percent
    return "" if change is None else f" by {-change:.1f}%"


def _lost(row: RowDiff) -> bool:
    median = row.changes[0]
    return (median.test < median.baseline) == (row.test.direction == "higher")
