"""What `shoal bench training` prints: strategies beside the ceiling, workers' speeds, who waited for whom."""

from __future__ import annotations

import statistics

from shoal.bench.contenders import Spread, is_free_running, workers_text
from shoal.bench.training_kungfu import becomes_text, figure_lines
from shoal.bench.training_rows import FRACTION, ITERATION, OWN_FRACTION, OWN_SPEED, SPEED
from shoal.bench.training_summary import (
    Waits,
    by_rank,
    by_strategy,
    interval_of,
    pooled,
    slow_worker,
    waits_of,
)
from shoal.report import Report, Row
from shoal.report.statistics import percentiles
from shoal.report.tables import Column, Table
from shoal.report.units import digits, scale_for
from shoal.report.views import Items

MAX_RANKS = 8
"""More workers than this have no columns of their own."""
_NOTABLE = 0.01
"""Shares of the time below this are not waiting."""


def training_items(report: Report) -> Items:
    """The tables, a sentence for each strategy that shows who was slow, and KungFu's figure lines."""
    items: Items = [(f"training  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    if kungfu := report.config.get("kungfu"):
        items += [becomes_text(kungfu), ""]
    items += [
        _strategies(report),
        "of ceiling: of the speed under 'none', where nothing is shared, right before or after.",
    ]
    if by_rank(report, OWN_FRACTION):
        items.append("rank 0, 1, ...: that worker's speed as a fraction of its own when nobody is slow.")
    items.append("")
    if by_rank(report, OWN_SPEED):
        items.append(_speeds(report))
    items += _waiting(report)
    _, evidence = slow_worker(report)
    if evidence:
        items += [*(f"{name}: {says}" for name, says in evidence.items()), ""]
    figures = figure_lines(report)
    return [*items, *figures, ""] if figures else items


def title_of(report: Report) -> str:
    """What was trained, by how many, on what."""
    config = report.config
    side = config.get("image_size")
    images = f" of {side}×{side} images" if side else ""
    workers = workers_text(config.get("num_workers"))
    where = config.get("device", "cpu")
    return f"{config.get('model')}{images}, {workers} on {where}, batch {config.get('batch_size')} each"


def _strategies(report: Report) -> Table:
    speeds, fractions = by_strategy(report, SPEED), by_strategy(report, FRACTION)
    own, times = by_rank(report, OWN_FRACTION), by_rank(report, ITERATION)
    heads = ("examples/s", "of ceiling", "95 % interval", "iteration", "p95")
    ranks = _ranks(own)
    columns = (*map(Column, heads), *(Column(f"rank {rank}") for rank in ranks))
    table = Table(title_of(report), (Column("strategy", "left"), *columns))
    errors = {str(row.key.get("strategy", "start")): row.error for row in report.failed}
    quantiles = {name: percentiles(pooled(rows), (50, 95)) for name, rows in times.items()}
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
            interval = interval_of(fractions[name])
            cells[1] = f"{statistics.median(fractions[name].samples):.3f}"
            cells[2] = f"{interval[0]:.3f}–{interval[1]:.3f}" if interval else "too few pairs"
        for rank in ranks:
            row = own.get(name, {}).get(rank)
            cells.append("-" if row is None else f"{statistics.median(row.samples):.3f}")
        table.rows.append((name, *cells))
    return table


def _speeds(report: Report) -> Table:
    """As the documents state them: in all, and of each worker."""
    totals, workers = by_strategy(report, SPEED), by_rank(report, OWN_SPEED)
    ranks = _ranks(workers)
    heads = ("in all", *(f"rank {rank}" for rank in ranks)) if ranks else ("in all", "slowest", "fastest")
    columns = (Column("strategy", "left"), *map(Column, heads))
    table = Table("examples/s, mean ± 1.96 σ over blocks", columns)
    for name, rows in workers.items():
        shown = [rows[rank] for rank in ranks]
        if not ranks:
            ordered = sorted(rows.values(), key=lambda row: statistics.fmean(row.samples))
            shown = [ordered[0], ordered[-1]]
        table.rows.append((name, *map(_plus_minus, (totals[name], *shown))))
    return table


def _waiting(report: Report) -> Items:
    """Who waited for whom, in shares of each worker's time."""
    waits = {name: _shares(waits, report, name) for name, waits in waits_of(report).items()}
    notable = {
        name: shares
        for name, shares in waits.items()
        if any(share >= _NOTABLE for row in shares.values() for share in row.values())
    }
    items: Items = []
    ranks = _ranks({name: dict.fromkeys(shares) for name, shares in notable.items()})
    if ranks:
        columns = (Column("strategy", "left"), Column("who", "left"))
        table = Table(
            "Who waited for whom, % of the time", (*columns, *(Column(f"for rank {rank}") for rank in ranks))
        )
        for name, shares in notable.items():
            for rank in ranks:
                cells = ["-" if rank == whom else f"{100 * shares[rank].get(whom, 0):.0f}" for whom in ranks]
                table.rows.append((name, f"rank {rank}", *cells))
        items.append(table)
    quiet = [name for name in by_strategy(report, FRACTION) if name not in notable]
    if not quiet or report.config.get("num_workers") == 1:
        return items
    options = report.config.get("options", {})
    uncounted = [name for name in quiet if name not in waits and not is_free_running(name, options)]
    idle = [name for name in quiet if name not in uncounted]
    items += [f"No worker waited for another under {', '.join(idle)}."] * bool(idle)
    items += [f"Not counted, as it is not Shoal that waits: {', '.join(uncounted)}."] * bool(uncounted)
    return [*items, ""]


def _shares(waits: Waits, report: Report, name: str) -> Waits:
    rows = by_rank(report, ITERATION)[name]
    return {
        who: {whom: seconds / sum(rows[who].samples) for whom, seconds in waited.items()}
        for who, waited in waits.items()
    }


def _ranks(by_name: dict[str, dict[int, Row]] | dict[str, dict[int, None]]) -> list[int]:
    """Those that have columns of their own."""
    ranks = sorted({rank: True for rows in by_name.values() for rank in rows})
    return ranks if len(ranks) <= MAX_RANKS else []


def _plus_minus(row: Row) -> str:
    speed = Spread.of(row.samples)
    return f"{speed.mean:,.1f} ± {speed.error:,.1f}"
