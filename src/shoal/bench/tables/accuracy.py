"""What the samples of `shoal bench accuracy` say: who came how far, and what each trick changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from shoal.bench.accuracy import (
    ACCURACY,
    BYTES,
    BYTES_TO_TARGET,
    DISTANCE,
    FINAL,
    NUM_TESTS,
    SPEED,
    TO_TARGET,
    WORST_FINAL,
    where_reached,
)
from shoal.report import Report
from shoal.report.curves import resolution_of, spacing
from shoal.report.diff import holm
from shoal.report.schema import with_failed
from shoal.report.statistics import MIN_SEEDS, MIN_TIMED_STARTS, lead_of, t_survival
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits, scale_for
from shoal.report.views import (
    DEVIATION,
    Items,
    contest_line,
    rarely_averaging,
    runs_of,
    title_line,
    with_every_seed,
)

_MEANS = {FINAL: 4, WORST_FINAL: 4, TO_TARGET: 3, BYTES: 0, SPEED: 1, DISTANCE: 6}
"""Digits after the point of what the RESULT line has."""
_ALPHA = 0.05
"""The chance, over all tricks of a split together, to say of one that changes nothing that it does."""


class AccuracyOutcome:
    """The figures of one contender on one split, one for each start."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self.bytes_to_target: list[float] = []
        self.resolution: dict[str, float] = {}
        """By metric, how far apart evaluations are."""
        self.error: str | None = None

    def mean(self, metric: str) -> float:
        """Averages a figure over all starts."""
        return statistics.fmean(self.samples[metric])


def outcomes_of(report: Report) -> dict[str, dict[str, AccuracyOutcome]]:
    """Collect the figures by split and contender, in the order of the report."""
    outcomes: dict[str, dict[str, AccuracyOutcome]] = {}
    for row in report.rows:
        if "contender" in row.key:
            named = outcomes.setdefault(str(row.key["split"]), {})
            outcome = named.setdefault(str(row.key["contender"]), AccuracyOutcome())
            if row.error is None:
                outcome.samples[row.metric] = row.samples
                outcome.resolution[row.metric] = resolution_of(report, row)
            else:
                outcome.error = row.error
    for curve in report.curves:
        if curve.metric == ACCURACY:
            outcome = outcomes[str(curve.key["split"])][str(curve.key["contender"])]
            outcome.resolution[BYTES_TO_TARGET] = spacing(curve, "bytes")
            for points in curve.starts:
                reached = where_reached(points["value"], _target(report))
                if reached is not None and "bytes" in points:
                    outcome.bytes_to_target.append(points["bytes"][reached])
    return outcomes


def changes_of(report: Report) -> dict[str, dict[str, list[float]]]:
    """Say what each trick changed in final accuracy, start by start, in points, by split and contender."""
    changes: dict[str, dict[str, list[float]]] = {}
    for split, named in outcomes_of(report).items():
        samples = {name: outcome.samples.get(FINAL, []) for name, outcome in named.items()}
        for contender in report.config.get("contenders", ()):
            name, base = contender["name"], contender.get("base")
            # a start that is missing on one side would be paired with another seed's
            if base and len(samples.get(name, ())) == len(samples.get(base, ())) == len(report.seeds):
                pairs = zip(samples[name], samples[base], strict=True)
                changes.setdefault(split, {})[name] = [
                    100 * (with_it - without) for with_it, without in pairs
                ]
    return changes


def summarize_accuracy(report: Report) -> dict[str, Any]:
    """The RESULT line: means over starts, by split and contender; of what was reached in every start."""
    outcomes = outcomes_of(report)
    result: dict[str, Any] = {
        "headline": headline(report),
        "conditions": _conditions(report),
        "device": report.config.get("device", "cpu"),
        "resolution": dict.fromkeys((FINAL, WORST_FINAL), _one_example(report)),
    }
    for metric, places in _MEANS.items():
        result[metric] = {
            split: {
                name: round(outcome.mean(metric), places)
                for name, outcome in named.items()
                if len(outcome.samples.get(metric, ())) == len(report.seeds)
            }
            for split, named in outcomes.items()
        }
    result[BYTES_TO_TARGET] = {
        split: {
            name: round(statistics.fmean(outcome.bytes_to_target))
            for name, outcome in named.items()
            if len(outcome.bytes_to_target) == len(report.seeds)
        }
        for split, named in outcomes.items()
    }
    changes = changes_of(report)
    if changes:
        result["points_by_trick"] = {
            split: {name: round(statistics.fmean(points), 2) for name, points in named.items()}
            for split, named in changes.items()
        }
    return with_failed(report, result)


def headline(report: Report) -> list[str]:
    """For each split who was fastest, to which accuracy, at how many bytes, and what the tricks did."""
    sentences = []
    outcomes, changes = outcomes_of(report), changes_of(report)
    for split, named in outcomes.items():
        whole = {name: outcome for name, outcome in named.items() if FINAL in outcome.samples}
        told = _race(whole, report) if whole else []
        if split in changes:
            told.append(_changes_seen(changes[split], 100 * _one_example(report)))
        sentences += [f"{split}: {sentence}" for sentence in told]
    return sentences


def _race(outcomes: Mapping[str, AccuracyOutcome], report: Report) -> list[str]:
    """Who was first at the target, came furthest, and sent the least; nobody where starts do not tell."""
    target = _percent(_target(report))
    num_starts = max(len(outcome.samples[FINAL]) for outcome in outcomes.values())
    reached = {
        name: outcome
        for name, outcome in outcomes.items()
        if len(outcome.samples.get(TO_TARGET, ())) == num_starts
    }
    missing = [name for name in outcomes if name not in reached]
    sentences = []
    if reached:
        times = {name: outcome.samples[TO_TARGET] for name, outcome in reached.items()}
        apart_s = {name: outcome.resolution.get(TO_TARGET, 0.0) for name, outcome in reached.items()}
        lead = lead_of(times, "lower", MIN_TIMED_STARTS, apart_s)
        sentences.append(
            contest_line(f"seconds to {target}", lead, lambda mean: f"{digits(mean)} s", missing)
        )
    else:
        sentences.append(f"nobody reached {target} {with_every_seed(num_starts)}.")
    finals = {name: outcome.samples[FINAL] for name, outcome in outcomes.items()}
    lead = lead_of(finals, "higher", MIN_SEEDS, dict.fromkeys(finals, _one_example(report)))
    sentences.append(contest_line("accuracy at the end", lead, lambda mean: f"{100 * mean:.1f} %"))
    sent = {name: outcome.bytes_to_target for name, outcome in reached.items() if outcome.bytes_to_target}
    if len(sent) > 1:
        apart_bytes = {name: reached[name].resolution.get(BYTES_TO_TARGET, 0.0) for name in sent}
        lead = lead_of(sent, "lower", MIN_SEEDS, apart_bytes)
        sentences.append(contest_line(f"bytes sent to {target}", lead, lambda mean: _bytes([mean])))
    return sentences


def _changes_seen(points: Mapping[str, list[float]], resolution: float) -> str:
    """Which tricks changed the final accuracy by more than chance, all of them being one family of tests."""
    num_seeds = min(map(len, points.values()))
    if num_seeds < MIN_SEEDS:
        few = counted(num_seeds, "run")
        return f"no trick is seen to change the final accuracy ({few} of each: a verdict needs {MIN_SEEDS})."
    # each difference is one of two accuracies, both of which are whole examples
    least = resolution * math.sqrt(2 / 12)
    p_values = []
    for samples in points.values():
        error = max(statistics.stdev(samples), least) / math.sqrt(len(samples))
        p_values.append(2 * t_survival(abs(statistics.fmean(samples)) / error, len(samples) - 1))
    adjusted, _ = holm(p_values, _ALPHA)
    changed = [name for name, p_value in zip(points, adjusted, strict=True) if p_value <= _ALPHA]
    if not changed:
        return "no trick is seen to change the final accuracy (their 95 % intervals have 0 in them)."
    told = ", ".join(f"{name} by {_change(points[name])} points" for name in changed)
    return f"changed the final accuracy by more than chance: {told}."


def accuracy_items(report: Report) -> Items:
    """What was equal for all, a table for each split, one of the tricks, and the headline."""
    config = report.config
    items: Items = [title_line(report), ""]
    items += [*_conditions(report), *[DEVIATION] * (len(report.seeds) > 1), ""]
    for split, named in outcomes_of(report).items():
        items.append(_split_table(split, named, report))
    for row in report.failed:
        if "contender" not in row.key:
            items += [(f"A start broke off: {' '.join(str(row.error).split())}", "red"), ""]
    changes = changes_of(report)
    if changes:
        point = 100 * _one_example(report)
        example = f"One of {NUM_TESTS[config['task']]} test examples is {digits(point)} points."
        items += [_trick_table(changes), *config.get("tricks", ()), example, ""]
    return [*items, *headline(report), ""]


def _conditions(report: Report) -> list[str]:
    config = report.config
    num_workers, runs = config.get("num_workers", 0), runs_of(report.seeds)
    what = f"{config.get('task')}, {config.get('model')}, {num_workers} workers"
    every = config.get("eval_every", 0)
    how_long = f"batch {config.get('batch_size')} each, {config.get('steps')} steps; {runs}"
    lines = [
        f"{what} on {config.get('device', 'cpu')}, {how_long}.",
        f"SGD, lr {config.get('learning_rate')}, momentum {config.get('momentum')}: the same for all.",
        "Accuracy is that of the mean of all models on examples for tests.",
        f"The target is an accuracy of {_percent(_target(report))}"
        + (f", looked at every {counted(every, 'step')}." if every else "."),
    ]
    lines += rarely_averaging(config.get("contenders", ()))
    cores = report.environment.get("cores")
    if isinstance(cores, int) and num_workers > cores:
        lines.append(
            f"{num_workers} workers share {cores} cores: steps and bytes compare, seconds hardly do."
        )
    return lines


def _split_table(split: str, named: Mapping[str, AccuracyOutcome], report: Report) -> Table:
    heads = (
        "accuracy",
        "worst worker",
        "distance",
        f"s to {_percent(_target(report))}",
        "sent",
        "examples/s",
    )
    columns = (Column("contender", "left", wraps=True), *(Column(head, wraps=True) for head in heads))
    table = Table(split, columns)
    for name, outcome in named.items():
        if outcome.error is not None:
            table.notes[len(table.rows)] = (f"failed: {outcome.error}", "red")
        if FINAL not in outcome.samples:
            table.rows.append((name, *("-" for _ in heads)))
            continue
        num_starts, times_s = len(outcome.samples[FINAL]), outcome.samples.get(TO_TARGET, [])
        to_target = digits(statistics.fmean(times_s)) if len(times_s) == num_starts else "not reached"
        if 0 < len(times_s) < num_starts:
            to_target = f"in {len(times_s)} of {num_starts}"
        cells = (
            _spread(outcome.samples[FINAL]),
            _spread(outcome.samples[WORST_FINAL]),
            digits(outcome.mean(DISTANCE)),
            to_target,
            _bytes(outcome.samples.get(BYTES, [])) or "-",
            digits(outcome.mean(SPEED)),
        )
        table.rows.append((name, *cells))
    return table


def _trick_table(changes: Mapping[str, Mapping[str, list[float]]]) -> Table:
    """A line for each contender with a trick, a column for each split."""
    title = "Change of the final accuracy by each trick, in points: mean (least to most over seeds)"
    table = Table(title, (Column("", "left"), *map(Column, changes)))
    for name in dict.fromkeys(name for named in changes.values() for name in named):
        points = [named.get(name) for named in changes.values()]
        table.rows.append((name, *("-" if each is None else _change(each) for each in points)))
    return table


def _change(points: list[float]) -> str:
    span = f" ({min(points):+.1f} to {max(points):+.1f})" if len(points) > 1 else ""
    return f"{statistics.fmean(points):+.1f}{span}"


def _spread(samples: list[float]) -> str:
    deviation = f" ±{100 * statistics.stdev(samples):.1f}" if len(samples) > 1 else ""
    return f"{100 * statistics.fmean(samples):.1f}{deviation} %"


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _bytes(samples: list[float]) -> str:
    """Their mean; empty where nothing was counted."""
    if not samples:
        return ""
    mean = statistics.fmean(samples)
    return scale_for("B", mean).format(mean)


def _one_example(report: Report) -> float:
    """What one example for tests changes of an accuracy."""
    return 1 / NUM_TESTS[report.config["task"]]


def _target(report: Report) -> float:
    return float(report.config.get("target_accuracy", 1.0))
