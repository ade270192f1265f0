"""Hand-made reports of `shoal bench training`: nobody slow, and rank 1 slow."""

from shoal.report import Report, Row
from shoal.report.words import METRICS


def row(metric, strategy, samples=None, error=None, **key):
    _, unit, direction, _ = METRICS[metric]
    starts = [] if samples is None else [samples]
    key = {"strategy": strategy, **key}
    return Row(key=key, metric=metric, unit=unit, direction=direction, starts=starts, error=error)


def report(rows, **config):
    config = {"model": "mlp", "num_workers": 2, "batch_size": 64, **config}
    return Report(benchmark="training", created="", config=config, rows=rows)


EVEN = [
    row("examples_per_s", "none", [1000.0, 1100.0, 1200.0]),
    row("seconds_per_iteration", "none", [0.1, 0.1], rank=0),
    row("seconds_per_iteration", "none", [0.1, 0.1], rank=1),
    row("fraction_of_ceiling", "sma", [0.8, 0.9, 0.85, 0.7, 0.95, 0.86]),
    row("examples_per_s", "sma", [900.0, 910.0, 920.0]),
    row("seconds_per_iteration", "sma", [0.1, 0.2], rank=0),
    row("seconds_per_iteration", "sma", [0.2, 0.3], rank=1),
    row("waited", "sma", [0.0, 0.001], rank=1, waited_for=0),
    row("waited", "sma", [0.02, 0.01], rank=0, waited_for=1),
    row("examples_per_s", "ddp", error="it broke"),
]
SLOW = [
    row("examples_per_s", "all-reduce", [10.0]),
    row("seconds_per_iteration", "all-reduce", [1.0] * 10, rank=0),
    row("seconds_per_iteration", "all-reduce", [1.0] * 10, rank=1),
    row("fraction_of_own_speed", "all-reduce", [0.1, 0.3, 0.2], rank=0),
    row("fraction_of_own_speed", "all-reduce", [1.0], rank=1),
    row("waited", "all-reduce", [8.0, 0.1], rank=0, waited_for=1),
    row("waited", "all-reduce", [0.0, 0.0], rank=1, waited_for=0),
    row("examples_per_s", "pair", [10.0]),
    row("seconds_per_iteration", "pair", [0.1] * 10, rank=0),
    row("seconds_per_iteration", "pair", [1.0] * 2, rank=1),
    row("fraction_of_own_speed", "pair", [0.95], rank=0),
    row("fraction_of_own_speed", "pair", [0.99], rank=1),
]
