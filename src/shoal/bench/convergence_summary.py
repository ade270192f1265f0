"""What the figures of `shoal bench convergence` say: how well was learned, and how stale updates were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.bench.convergence import (
    ACCURACY,
    EXPERT_STALENESS,
    FINAL_LOSS,
    LOST,
    MEAN_STALENESS,
    NUM_LAST,
    STALENESS,
    TOUCHED,
    TRAIN_LOSS,
    VAL_LOSS,
    VIRTUAL,
    ConvergenceConfig,
)
from shoal.report import Curve, Report
from shoal.report.tables import Column, Table
from shoal.report.units import digits
from shoal.report.views import Items, histogram_items

MAX_LINES = 24
"""Of the table of evaluations; more are thinned evenly."""
_MEANS = {FINAL_LOSS: 4, MEAN_STALENESS: 3, EXPERT_STALENESS: 3, VIRTUAL: 3, TOUCHED: 1, LOST: 1}
"""Digits after the point of what the RESULT line has as means over seeds."""


def summarize_convergence(report: Report) -> dict[str, Any]:
    """The RESULT line: medians of the last evaluations of all seeds, and means over seeds."""
    result: dict[str, Any] = {"headline": headline(report)}
    for metric, num_last in NUM_LAST.items():
        last = last_accuracies(report, num_last)
        if last:
            result[metric] = round(statistics.median(last), 4)
            result[f"{metric}_std"] = round(_deviation(_samples(report, metric)), 4)
    for metric, places in _MEANS.items():
        samples = _samples(report, metric)
        if samples:
            result[metric] = round(statistics.fmean(samples), places)
    result["num_seeds"] = len(_samples(report, ACCURACY))
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def last_accuracies(report: Report, num_last: int) -> list[float]:
    """Of the last evaluations of every seed, together."""
    curve = _curve(report, ACCURACY)
    starts = [] if curve is None else curve.starts
    return [value for points in starts for value in points["value"][-num_last:]]


def headline(report: Report) -> list[str]:
    """How well was learned, from how stale gradients, and in what time."""
    last = last_accuracies(report, NUM_LAST[ACCURACY])
    if not last:
        return ["No seed came to its end."]
    config, medians = report.config, _samples(report, ACCURACY)
    num_last = min(NUM_LAST[ACCURACY], len(last) // len(medians))
    seeds = f" of {len(medians)} seeds" if len(medians) > 1 else ""
    apart = f" ± {100 * _deviation(medians):.1f}" if len(medians) > 1 else ""
    of = "the last evaluation" if num_last == 1 else f"the median of the last {num_last} evaluations"
    stale, virtual = (statistics.fmean(_samples(report, metric)) for metric in (MEAN_STALENESS, VIRTUAL))
    learned = f"{100 * statistics.median(last):.1f}{apart} % of the test images"
    sentences = [
        f"{_setup(report)}: {learned} after {config.get('steps'):,} updates, {of}{seeds}.",
        f"An update was {digits(stale)} behind on average; they took {digits(virtual)} s of virtual time.",
    ]
    if report.failed:
        sentences.append(f"{len(report.failed)} of {config.get('num_seeds')} seeds did not come to an end.")
    return sentences


def convergence_items(report: Report) -> Items:
    """What was trained, each evaluation as mean and deviation over seeds, the staleness, the headline."""
    items: Items = [(f"convergence  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    items += [*_conditions(report), ""]
    items += [(f"Seed {row.key.get('seed', '')} failed: {row.error}", "red") for row in report.failed]
    items += [""] * bool(report.failed)
    table = _evaluations(report)
    if table is not None:
        items.append(table)
    items += histogram_items(row for row in report.rows if row.metric == STALENESS)
    return [*items, *headline(report), *_by_seed(report), ""]


def _conditions(report: Report) -> list[str]:
    config = report.config
    num_seeds = config.get("num_seeds", 1)
    first, last = config.get("seed", 0), config.get("seed", 0) + num_seeds - 1
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    return [
        f"{_setup(report)}, batch {config.get('batch_size')} each.",
        f"{config.get('steps'):,} updates of Adam with AMSGrad, {seeds}.",
        *_how(msgspec.convert(config, ConvergenceConfig)),
    ]


def _how(config: ConvergenceConfig) -> list[str]:
    is_mixture, step_ms = config.has_gate, 1000 * config.compute_s
    if config.is_faithful:
        changed = "gate not trained, experts' gradients not delayed, " * is_mixture
        return [f"As the original: {changed}one lock for all trainers, held {step_ms:,g} ms for an update."]
    trainers = f"Trainers compute side by side, {step_ms:,g} ms for an update"
    window_ms = 1000 * config.window_s
    together = f"; those that end within {window_ms:,g} ms do so together" if window_ms else ""
    return [f"{trainers}{together}.", *["The gate is trained, experts' gradients are delayed."] * is_mixture]


def _setup(report: Report) -> str:
    keys = (row.key for row in report.rows)
    return next((str(key["contender"]) for key in keys if "contender" in key), "convergence")


def _evaluations(report: Report) -> Table | None:
    """A line for each evaluation; training loss is that of the last window before it."""
    accuracy, loss, training = (_curve(report, metric) for metric in (ACCURACY, VAL_LOSS, TRAIN_LOSS))
    if accuracy is None or loss is None:
        return None
    several = len(accuracy.starts) > 1
    title = f"MNIST, 10,000 test images{', mean ± deviation over seeds' if several else ''}"
    heads = ("updates", "virtual s", "accuracy %", "loss", "train loss")
    table = Table(title, tuple(map(Column, heads)))
    count = min(len(points["value"]) for points in accuracy.starts)
    for index in _kept(count):
        at = accuracy.starts[0]["step"][index]
        trained = [] if training is None else [_before(points, at) for points in training.starts]
        table.rows.append(
            (
                f"{at:,.0f}",
                digits(statistics.fmean(points["s"][index] for points in accuracy.starts), 4),
                _spread([100 * points["value"][index] for points in accuracy.starts], 2),
                _spread([points["value"][index] for points in loss.starts], 3),
                _spread([value for value in trained if value is not None], 3),
            )
        )
    return table


def _by_seed(report: Report) -> list[str]:
    medians = _samples(report, ACCURACY)
    if len(medians) < 2:
        return []
    return [f"Each seed's own: {', '.join(f'{100 * median:.1f}' for median in medians)} %."]


def _before(points: dict[str, list[float]], at: float) -> float | None:
    """The last value that was taken up to there."""
    values = [value for step, value in zip(points["step"], points["value"], strict=True) if step <= at]
    return values[-1] if values else None


def _kept(count: int) -> list[int]:
    if count <= MAX_LINES:
        return list(range(count))
    return list({round(index * (count - 1) / (MAX_LINES - 1)): True for index in range(MAX_LINES)})


def _curve(report: Report, metric: str) -> Curve | None:
    return next((curve for curve in report.curves if curve.metric == metric), None)


def _samples(report: Report, metric: str) -> list[float]:
    return [sample for row in report.rows if row.metric == metric for sample in row.samples]


def _spread(values: Sequence[float], places: int) -> str:
    if not values:
        return "-"
    deviation = f" ± {_deviation(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{deviation}"


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
