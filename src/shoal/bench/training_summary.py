"""What the samples of `shoal bench training` say: fractions of the ceiling, and who was slow.

How it is printed is left to `training_tables`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from shoal.bench.blocks import median_interval, slowest_by_times, slowest_by_waits
from shoal.bench.contenders import NONE, Spread, is_free_running
from shoal.bench.training_rows import (
    FRACTION,
    ITERATION,
    OWN_FRACTION,
    OWN_SPEED,
    SPEED,
    WAITED,
)
from shoal.report import Report, Row
from shoal.report.statistics import PERCENTILES, percentiles
from shoal.report.units import digits

Waits = dict[int, dict[int, float]]
"""Seconds, by who waited and for whom."""


def summarize_training(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all blocks, by strategy, and the documents' mean and 1.96 deviations."""
    speeds, fractions = by_strategy(report, SPEED), by_strategy(report, FRACTION)
    own_speeds, own_fractions = by_rank(report, OWN_SPEED), by_rank(report, OWN_FRACTION)
    times_s = {name: pooled(rows) for name, rows in by_rank(report, ITERATION).items()}
    result: dict[str, Any] = {
        "headline": headline(report),
        "device": report.config.get("device", "cpu"),
        "image_size": report.config.get("image_size"),
        "examples_per_s": {name: round(_median(row), 1) for name, row in speeds.items()},
        "examples_per_s_mean": {name: _rounded(row) for name, row in speeds.items()},
        "examples_per_s_per_worker": {
            name: [_rounded(rows[rank]) for rank in sorted(rows)] for name, rows in own_speeds.items()
        },
        "fraction_of_ceiling": {name: round(_median(row), 4) for name, row in fractions.items()},
        "fraction_interval": {name: interval_of(row) for name, row in fractions.items()},
        "seconds_per_iteration": {
            name: {f"p{q}": round(value, 6) for q, value in zip(PERCENTILES, percentiles(times), strict=True)}
            for name, times in times_s.items()
        },
    }
    if own_fractions:
        result["fraction_by_rank"] = {
            name: [round(_median(rows[rank]), 4) for rank in sorted(rows)]
            for name, rows in own_fractions.items()
        }
    slow, evidence = slow_worker(report)
    if slow is not None or report.config.get("slow_rank") is not None:
        result |= {"slow_worker": slow, "slow_worker_evidence": evidence}
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def headline(report: Report) -> list[str]:
    """What a person wants to know first: who was fastest, and who keeps its speed beside a slow worker."""
    fractions, speeds = by_strategy(report, FRACTION), by_strategy(report, SPEED)
    sentences = []
    if fractions:
        best = max(fractions, key=lambda name: _median(fractions[name]))
        first = f"Fastest of {len(fractions)}: {best}" if len(fractions) > 1 else best
        sentences.append(
            f"{first}, {digits(_median(speeds[best]))} examples/s, "
            f"{_median(fractions[best]):.2f} of what workers reach that share nothing."
        )
    slow = report.config.get("slow_rank")
    kept = {
        name: statistics.median(_median(row) for rank, row in rows.items() if rank != slow)
        for name, rows in by_rank(report, OWN_FRACTION).items()
        if name != NONE and len(rows) > 1
    }
    if kept:
        order = sorted(kept, key=lambda name: kept[name], reverse=True)
        sentences.append(
            f"While rank {slow} is {report.config.get('slow_factor', 10):g} times as slow, the others keep "
            f"of their own speed: {', '.join(f'{kept[name]:.2f} under {name}' for name in order)}."
        )
    return sentences


def slow_worker(report: Report) -> tuple[int | None, dict[str, str]]:
    """The rank that most strategies show to be the slow one, and what each of them shows; None for nobody."""
    votes: dict[int, int] = {}
    evidence: dict[str, str] = {}
    waits = waits_of(report)
    for name, rows in by_rank(report, ITERATION).items():
        rank, says = None, ""
        if name in waits:
            waited_s = dict.fromkeys(rows, 0.0)
            for waited in waits[name].values():
                for other, seconds in waited.items():
                    waited_s[other] += seconds
            rank = slowest_by_waits(waited_s, sum(next(iter(rows.values())).samples))
            if rank is not None:
                says = f"rank {rank} is the slow one: others waited {digits(waited_s[rank])} s for it"
        if rank is None and is_free_running(name, report.config.get("options", {})):
            found = slowest_by_times({rank: row.samples for rank, row in rows.items()})
            if found is not None:
                rank, factor = found
                says = f"rank {rank} is the slow one: its iterations take {digits(factor)} times as long"
        if rank is not None:
            votes[rank] = votes.get(rank, 0) + 1
            evidence[name] = says
    return (max(votes, key=lambda rank: votes[rank]) if votes else None), evidence


def waits_of(report: Report) -> dict[str, Waits]:
    """By strategy: how long each worker waited for each other one, in all blocks."""
    waits: dict[str, Waits] = {}
    for row in _rows(report, WAITED):
        who, whom = int(row.key["rank"]), int(row.key["waited_for"])
        waits.setdefault(str(row.key["strategy"]), {}).setdefault(who, {})[whom] = sum(row.samples)
    return waits


def interval_of(row: Row) -> list[float] | None:
    """Where the median of a row lies, at 95 %."""
    interval = median_interval(row.samples)
    return None if interval is None else [round(end, 4) for end in interval]


def by_strategy(report: Report, metric: str) -> dict[str, Row]:
    """Rows of a metric that are of all workers together."""
    return {str(row.key["strategy"]): row for row in _rows(report, metric)}


def by_rank(report: Report, metric: str) -> dict[str, dict[int, Row]]:
    """Rows of a metric that are of one worker, by strategy."""
    rows: dict[str, dict[int, Row]] = {}
    for row in _rows(report, metric):
        rows.setdefault(str(row.key["strategy"]), {})[int(row.key["rank"])] = row
    return rows


def pooled(rows: dict[int, Row]) -> list[float]:
    """The samples of all workers."""
    return [sample for row in rows.values() for sample in row.samples]


def _rows(report: Report, metric: str) -> Iterable[Row]:
    return (row for row in report.rows if row.metric == metric and row.starts)


def _median(row: Row) -> float:
    return statistics.median(row.samples)


def _rounded(row: Row) -> list[float]:
    speed = Spread.of(row.samples)
    return [round(speed.mean, 1), round(speed.error, 1)]
