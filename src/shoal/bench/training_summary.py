"""What the samples of `shoal bench training` say: fractions of the ceiling, and who was slow."""

from __future__ import annotations

import statistics
from typing import Any

from shoal.bench.blocks import median_interval, slowest_by_times, slowest_by_waits
from shoal.bench.training import FRACTION, ITERATION, OWN_FRACTION, SPEED, WAITED, is_free_running
from shoal.report import Report, Row
from shoal.report.statistics import PERCENTILES, percentiles
from shoal.report.tables import Column, Table
from shoal.report.units import digits, scale_for
from shoal.report.views import Items


def summarize_training(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all blocks, by strategy."""
    fractions, by_rank = _by_strategy(report, FRACTION), _by_rank(report, OWN_FRACTION)
    times_s = {name: _pooled(rows) for name, rows in _by_rank(report, ITERATION).items()}
    result: dict[str, Any] = {
        "examples_per_s": {
            name: round(statistics.median(row.samples), 1)
            for name, row in _by_strategy(report, SPEED).items()
        },
        "fraction_of_ceiling": {
            name: round(statistics.median(row.samples), 4) for name, row in fractions.items()
        },
        "fraction_interval": {name: _interval(row) for name, row in fractions.items()},
        "seconds_per_iteration": {
            name: {f"p{q}": round(value, 6) for q, value in zip(PERCENTILES, percentiles(times), strict=True)}
            for name, times in times_s.items()
        },
    }
    if by_rank:
        result["fraction_by_rank"] = {
            name: [round(statistics.median(rows[rank].samples), 4) for rank in sorted(rows)]
            for name, rows in by_rank.items()
        }
    slow, evidence = slow_worker(report)
    if slow is not None or report.config.get("slow_rank") is not None:
        result |= {"slow_worker": slow, "slow_worker_evidence": evidence}
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def slow_worker(report: Report) -> tuple[int | None, dict[str, str]]:
    """The rank that most strategies show to be the slow one, and what each of them shows; None for nobody."""
    votes: dict[int, int] = {}
    evidence: dict[str, str] = {}
    waits = _by_rank(report, WAITED)
    for name, rows in _by_rank(report, ITERATION).items():
        rank, says = None, ""
        if name in waits:
            waited_s = {rank: sum(row.samples) for rank, row in waits[name].items()}
            rank = slowest_by_waits(
                dict.fromkeys(rows, 0.0) | waited_s, sum(next(iter(rows.values())).samples)
            )
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


def training_items(report: Report) -> Items:
    """One table with a line for each strategy, and a sentence for each that shows who was slow."""
    config = report.config
    num_workers = config.get("num_workers")
    workers = f"{num_workers} worker{'' if num_workers == 1 else 's'}, batch {config.get('batch_size')} each"
    items: Items = [(f"training  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    speeds, fractions = _by_strategy(report, SPEED), _by_strategy(report, FRACTION)
    own, times = _by_rank(report, OWN_FRACTION), _by_rank(report, ITERATION)
    heads = ("examples/s", "of ceiling", "95 % interval", "iteration", "p95")
    ranks = sorted({rank: True for rows in own.values() for rank in rows})
    columns = (*map(Column, heads), *(Column(f"rank {rank}") for rank in ranks))
    table = Table(f"{config.get('model')}, {workers}", (Column("strategy", "left"), *columns))
    errors = {str(row.key.get("strategy", "start")): row.error for row in report.failed}
    quantiles = {name: percentiles(_pooled(rows), (50, 95)) for name, rows in times.items()}
    scale = scale_for("s", max((p50 for p50, _ in quantiles.values()), default=0.0))
    for name in dict.fromkeys((*speeds, *errors)):
        if name in errors:
            table.notes[len(table.rows)] = (f"failed: {errors[name]}", "red")
        if name not in speeds:
            table.rows.append((name, *("-" for _ in columns)))
            continue
        cells = [digits(statistics.median(speeds[name].samples)), "-", "-"]
        cells += [scale.format(value) for value in quantiles[name]]
        if name in fractions:
            interval = _interval(fractions[name])
            cells[1] = f"{statistics.median(fractions[name].samples):.3f}"
            cells[2] = f"{interval[0]:.3f}–{interval[1]:.3f}" if interval else "too few pairs"
        for rank in ranks:
            row = own.get(name, {}).get(rank)
            cells.append("-" if row is None else f"{statistics.median(row.samples):.3f}")
        table.rows.append((name, *cells))
    items += [table, "of ceiling: of the speed under 'none', where nothing is shared, right before or after."]
    if ranks:
        items.append("rank 0, 1, ...: that worker's speed as a fraction of its own when nobody is slow.")
    items.append("")
    _, evidence = slow_worker(report)
    if evidence:
        items += [*(f"{name}: {says}" for name, says in evidence.items()), ""]
    return items


def _interval(row: Row) -> list[float] | None:
    interval = median_interval(row.samples)
    return None if interval is None else [round(end, 4) for end in interval]


def _by_strategy(report: Report, metric: str) -> dict[str, Row]:
    return {str(row.key["strategy"]): row for row in report.rows if row.metric == metric and row.starts}


def _by_rank(report: Report, metric: str) -> dict[str, dict[int, Row]]:
    rows: dict[str, dict[int, Row]] = {}
    for row in report.rows:
        if row.metric == metric and row.starts:
            rows.setdefault(str(row.key["strategy"]), {})[int(row.key["rank"])] = row
    return rows


def _pooled(rows: dict[int, Row]) -> list[float]:
    return [sample for row in rows.values() for sample in row.samples]
