"""What the samples of `shoal bench training` say, and what is printed of them.

Fractions of the ceiling, workers' speeds, who waited for whom and who was slow, and KungFu's figure lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.bench.contenders import NONE, Spread, inputs_text, is_free_running, tokens_of
from shoal.bench.training import FRACTION, ITERATION, OPTIMIZERS, OWN_FRACTION, OWN_SPEED, SPEED, WAITED
from shoal.report import Report, Row
from shoal.report.schema import rows_of, with_failed
from shoal.report.statistics import MIN_TIMED_STARTS, known_percentiles, lead_of, start_medians
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits, scale_for
from shoal.report.views import Items, contest_line, title_line
from shoal.strategies.registry import canonical

Waits = dict[int, dict[int, float]]
"""Seconds, by who waited and for whom."""
CONFIDENCE = 0.95
MIN_WAITED_SHARE = 0.2
"""Of the time, by each who waited; a third slower is a quarter of it."""
CLEARLY_SLOWER = 1.5
MAX_RANKS = 8
"""More workers than this have no columns of their own."""
_NOTABLE = 0.01
"""Shares of the time below this are not waiting."""
_PREFIX = "FIGURE:"
"""In KungFu's scripts the line says RESULT; here that is the report's."""


def summarize_training(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all blocks, by strategy, and the documents' mean and 1.96 deviations."""
    speeds, fractions = by_strategy(report, SPEED), by_strategy(report, FRACTION)
    own_speeds, own_fractions = by_rank(report, OWN_SPEED), by_rank(report, OWN_FRACTION)
    times_s = {name: pooled(rows) for name, rows in by_rank(report, ITERATION).items()}
    result: dict[str, Any] = {
        "headline": headline(report),
        "conditions": _conditions(report.config, len(report.seeds)),
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
            name: {f"p{q}": round(value, 6) for q, value in known_percentiles(times).items()}
            for name, times in times_s.items()
        },
    }
    num_tokens = tokens_of(report.config)
    if num_tokens is not None:
        result["sequence_length"] = num_tokens
        result["tokens_per_s"] = {name: round(num_tokens * _median(row), 1) for name, row in speeds.items()}
    if own_fractions:
        result["fraction_by_rank"] = {
            name: [round(_median(rows[rank]), 4) for rank in sorted(rows)]
            for name, rows in own_fractions.items()
        }
    slow, evidence = slow_worker(report)
    if slow is not None or report.config.get("slow_rank") is not None:
        result |= {"slow_worker": slow, "slow_worker_evidence": evidence}
    return with_failed(report, result)


def _conditions(config: Mapping[str, Any], num_starts: int) -> list[str]:
    """What holds for all strategies alike."""
    workers = counted(config.get("num_workers", 0), "worker")
    where = f"{config.get('model')} on {config.get('device', 'cpu')}"
    lines = [
        f"{workers} trained {where}, batch {config.get('batch_size')} each; {counted(num_starts, 'run')}.",
        "Strategies took turns, block by block, so that a machine that slows down slows all of them.",
    ]
    if config.get("slow_rank") is not None:
        slow = f"rank {config['slow_rank']} was made {config.get('slow_factor', 10):g} times as slow"
        lines.append(f"In a second part {slow}.")
    return lines


def headline(report: Report) -> list[str]:
    """What a person wants to know first: who is fast, and who keeps its speed beside a slow worker."""
    fractions, speeds = by_strategy(report, FRACTION), by_strategy(report, SPEED)
    sentences = []
    unit, factor = _rate(report)
    if fractions:
        if len(fractions) > 1:
            medians = {name: start_medians(row) for name, row in fractions.items()}
            what = "Of the speed of workers that share nothing"
            lead = lead_of(medians, "higher", MIN_TIMED_STARTS)
            sentences.append(contest_line(what, lead, lambda mean: f"{mean:.2f}"))
        else:
            (name,) = fractions
            sentences.append(
                f"{name}, {digits(_median(speeds[name]) * factor)} {unit}, "
                f"{_median(fractions[name]):.2f} of what workers reach that share nothing."
            )
    slow = report.config.get("slow_rank")
    kept = {
        name: [statistics.median(medians) for medians in zip(*others, strict=False)]
        for name, rows in by_rank(report, OWN_FRACTION).items()
        if name != NONE
        and len(rows) > 1
        and (others := [start_medians(row) for rank, row in rows.items() if rank != slow])
    }
    if kept:
        what = f"While rank {slow} is {report.config.get('slow_factor', 10):g} times as slow, the others keep"
        lead = lead_of(kept, "higher", MIN_TIMED_STARTS)
        if lead.is_enough and len(kept) > 1:
            sentences.append(contest_line(f"{what} of their own speed", lead, lambda mean: f"{mean:.2f}"))
        else:
            shares = ", ".join(f"{lead.means[name]:.2f} under {name}" for name in kept)
            why = f" ({lead.why_not()})" if len(kept) > 1 else ""
            sentences.append(f"{what} of their own speed: {shares}{why}.")
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
    """Sum up how long each worker waited for each other one in all blocks, by strategy."""
    waits: dict[str, Waits] = {}
    for row in rows_of(report, WAITED):
        who, whom = int(row.key["rank"]), int(row.key["waited_for"])
        waits.setdefault(str(row.key["strategy"]), {}).setdefault(who, {})[whom] = sum(row.samples)
    return waits


def interval_of(row: Row) -> list[float] | None:
    """Say where the median of a row lies, at 95 %."""
    interval = median_interval(row.samples)
    return None if interval is None else [round(end, 4) for end in interval]


def by_strategy(report: Report, metric: str) -> dict[str, Row]:
    """Rows of a metric that are of all workers together."""
    return {str(row.key["strategy"]): row for row in rows_of(report, metric)}


def by_rank(report: Report, metric: str) -> dict[str, dict[int, Row]]:
    """Rows of a metric that are of one worker, by strategy."""
    rows: dict[str, dict[int, Row]] = {}
    for row in rows_of(report, metric):
        rows.setdefault(str(row.key["strategy"]), {})[int(row.key["rank"])] = row
    return rows


def pooled(rows: dict[int, Row]) -> list[float]:
    """The samples of all workers."""
    return [sample for row in rows.values() for sample in row.samples]


def _rate(report: Report) -> tuple[str, int]:
    """In what speeds are shown, and how many of it an example is: a model of text counts tokens."""
    num_tokens = tokens_of(report.config)
    return ("examples/s", 1) if num_tokens is None else ("tokens/s", num_tokens)


def _median(row: Row) -> float:
    return statistics.median(row.samples)


def _rounded(row: Row) -> list[float]:
    speed = Spread.of(row.samples)
    return [round(speed.mean, 1), round(speed.error, 1)]


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Say where the median of what was sampled lies, at least this surely, whatever its distribution.

    Between two order statistics, by the binomial distribution; None where there are too few samples for any
    two to be far enough apart (5 at 95 %).
    """
    count = len(samples)
    outside, depth = 0.0, 0
    while depth < count:
        outside += math.comb(count, depth) / 2**count
        if 2 * outside > 1 - confidence:
            break
        depth += 1
    if depth == 0:
        return None
    ordered = sorted(samples)
    return ordered[depth - 1], ordered[-depth]


def slowest_by_waits(waited_s: Mapping[int, float], measured_s: float) -> int | None:
    """The rank for which the others waited, where it is clearly one and clearly matters.

    `waited_s` is by the rank that was waited for, summed over those who waited; `measured_s` is how long one
    of them was watched.
    """
    if len(waited_s) < 2:
        return None
    first, second = sorted(waited_s, key=lambda rank: waited_s[rank], reverse=True)[:2]
    num_waiting = len(waited_s) - 1
    is_much = waited_s[first] >= MIN_WAITED_SHARE * measured_s * num_waiting
    return first if is_much and waited_s[first] >= 2 * waited_s[second] else None


def slowest_by_times(times_s: Mapping[int, Sequence[float]]) -> tuple[int, float] | None:
    """The rank whose own iterations take clearly longer, and how many times as long as the others'."""
    medians = {rank: statistics.median(times) for rank, times in times_s.items() if times}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda rank: medians[rank])
    others = statistics.median(time_s for rank, time_s in medians.items() if rank != slowest)
    return (slowest, medians[slowest] / others) if medians[slowest] >= CLEARLY_SLOWER * others else None


# --- tables ---


def training_items(report: Report) -> Items:
    """The tables, a sentence for each strategy that shows who was slow, and KungFu's figure lines."""
    items: Items = [title_line(report), ""]
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


def _strategies(report: Report) -> Table:
    speeds, fractions = by_strategy(report, SPEED), by_strategy(report, FRACTION)
    own, times = by_rank(report, OWN_FRACTION), by_rank(report, ITERATION)
    unit, factor = _rate(report)
    heads = (unit, "of ceiling", "95 % interval", "iteration", "p95")
    ranks = _ranks(own)
    columns = (*map(Column, heads), *(Column(f"rank {rank}") for rank in ranks))
    config = report.config
    what = f"{config.get('model')}{inputs_text(config)}, {counted(config.get('num_workers', 0), 'worker')}"
    title = f"{what} on {config.get('device', 'cpu')}, batch {config.get('batch_size')} each"
    table = Table(title, (Column("strategy", "left"), *columns))
    errors = {str(row.key.get("strategy", "start")): row.error for row in report.failed}
    quantiles = {name: known_percentiles(pooled(rows), (50, 95)) for name, rows in times.items()}
    scale = scale_for("s", max((known[50] for known in quantiles.values()), default=0.0))
    for name in dict.fromkeys((*speeds, *errors)):
        if name in errors:
            table.notes[len(table.rows)] = (f"failed: {errors[name]}", "red")
        if name not in speeds:
            table.rows.append((name, *("-" for _ in columns)))
            continue
        cells = [digits(factor * statistics.median(speeds[name].samples)), "-", "-"]
        known = quantiles[name]
        cells += [scale.format(known[q]) if q in known else "-" for q in (50, 95)]
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
    unit, factor = _rate(report)
    table = Table(f"{unit}, mean ± 1.96 σ over blocks", columns)
    for name, rows in workers.items():
        shown = [rows[rank] for rank in ranks]
        if not ranks:
            ordered = sorted(rows.values(), key=lambda row: statistics.fmean(row.samples))
            shown = [ordered[0], ordered[-1]]
        spreads = [Spread.of([factor * sample for sample in row.samples]) for row in (totals[name], *shown)]
        table.rows.append((name, *(f"{spread.mean:,.1f} ± {spread.error:,.1f}" for spread in spreads)))
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


# --- KungFu's words ---


def becomes_text(name: str) -> str:
    """What it is measured as, and on what."""
    how = ""
    if name.endswith("-nccl"):
        how = ": the group itself carries it, on GPUs as on CPUs"
    if "hierarchical" in name:
        how += ", inside each machine first"
    return f"{name} is the strategy {OPTIMIZERS[name]} here{how}."


def figure_lines(report: Report) -> list[str]:
    """Write a line for each strategy: the first worker's speed, its error (1.96 deviations), and what ran."""
    lines = []
    for row in report.rows:
        if row.metric != OWN_SPEED or row.key.get("rank") != 0 or not row.starts:
            continue
        strategy = str(row.key["strategy"])
        if strategy != NONE:
            speed = Spread.of([sample * _rate(report)[1] for sample in row.samples])
            facts = msgspec.json.encode(_facts(strategy, report.config)).decode()
            lines.append(f"{_PREFIX} {speed.mean:f} +-{speed.error:f} {facts}")
    return lines


def _facts(strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    """By the names that KungFu's line has."""
    own = canonical(strategy)
    optimizer = next((name for name, ours in OPTIMIZERS.items() if ours == own), None)
    return {
        "framework": "shoal",
        "np": config.get("num_workers"),
        "strategy": strategy,
        "bs": config.get("batch_size"),
        "model": config.get("model"),
        "xla": False,
        "kf-opt": config.get("kungfu") or optimizer,
        "fuse": True,
        "nvlink": None,
        "data": "synthetic",
        **({} if tokens_of(config) is None else {"unit": "tokens/s"}),
    }
