import pytest

from shoal.bench.training import METRICS
from shoal.bench.training_summary import slow_worker, summarize_training, training_items
from shoal.report import Report, Row
from shoal.report.tables import Table


def row(metric, strategy, samples=None, rank=None, error=None):
    unit, direction = METRICS[metric]
    key = {"strategy": strategy} | ({} if rank is None else {"rank": rank})
    starts = [] if samples is None else [samples]
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
    row("others_waited", "sma", [0.01, 0.01], rank=0),
    row("others_waited", "sma", [0.02, 0.01], rank=1),
    row("examples_per_s", "ddp", error="it broke"),
]
SLOW = [
    row("examples_per_s", "all-reduce", [10.0]),
    row("seconds_per_iteration", "all-reduce", [1.0] * 10, rank=0),
    row("seconds_per_iteration", "all-reduce", [1.0] * 10, rank=1),
    row("fraction_of_own_speed", "all-reduce", [0.1, 0.3, 0.2], rank=0),
    row("fraction_of_own_speed", "all-reduce", [1.0], rank=1),
    row("others_waited", "all-reduce", [9.0, 0.1], rank=1),
    row("examples_per_s", "pair", [10.0]),
    row("seconds_per_iteration", "pair", [0.1] * 10, rank=0),
    row("seconds_per_iteration", "pair", [1.0] * 2, rank=1),
    row("fraction_of_own_speed", "pair", [0.95], rank=0),
    row("fraction_of_own_speed", "pair", [0.99], rank=1),
]


def test_the_result_has_medians_and_intervals_by_strategy():
    result = summarize_training(report(EVEN))
    assert result["examples_per_s"] == {"none": 1100.0, "sma": 910.0}
    assert result["fraction_of_ceiling"] == {"sma": 0.855}
    assert result["fraction_interval"] == {"sma": [0.7, 0.95]}
    assert result["seconds_per_iteration"]["sma"]["p50"] == pytest.approx(0.2)
    assert result["seconds_per_iteration"]["none"]["p95"] == pytest.approx(0.1)
    assert result["failed"] == 1
    assert "slow_worker" not in result
    assert "fraction_by_rank" not in result


def test_the_slow_worker_is_named_by_waits_and_by_its_own_pace():
    assert slow_worker(report(SLOW)) == (
        1,
        {
            "all-reduce": "rank 1 is the slow one: others waited 9.10 s for it",
            "pair": "rank 1 is the slow one: its iterations take 10.0 times as long",
        },
    )
    result = summarize_training(report(SLOW, slow_rank=1))
    assert result["slow_worker"] == 1
    assert result["fraction_by_rank"] == {"all-reduce": [0.2, 1.0], "pair": [0.95, 0.99]}


def test_nobody_is_named_where_nobody_is_slow():
    assert slow_worker(report(EVEN)) == (None, {})
    assert summarize_training(report(EVEN, slow_rank=1))["slow_worker"] is None


def test_the_table_has_a_line_for_each_strategy_and_says_what_failed():
    (table,) = (item for item in training_items(report(EVEN)) if isinstance(item, Table))
    assert table.title == "mlp, 2 workers, batch 64 each"
    assert table.rows == [
        ("none", "1,100", "-", "-", "100 ms", "100 ms"),
        ("sma", "910", "0.855", "0.700–0.950", "200 ms", "285 ms"),
        ("ddp", *("-" for _ in range(5))),
    ]
    assert table.notes == {2: ("failed: it broke", "red")}


def test_the_times_of_a_table_have_one_unit():
    fast = row("seconds_per_iteration", "none", [0.0007], rank=0)
    rows = [row("examples_per_s", "none", [9.0]), fast, *EVEN[4:7]]
    (table,) = (item for item in training_items(report(rows)) if isinstance(item, Table))
    assert [line[4] for line in table.rows] == ["0.700 ms", "200 ms"]


def test_with_a_slow_worker_the_table_has_its_ranks_and_a_sentence():
    items = training_items(report(SLOW, slow_rank=1))
    (table,) = (item for item in items if isinstance(item, Table))
    assert [line[-2:] for line in table.rows] == [("0.200", "1.000"), ("0.950", "0.990")]
    assert "all-reduce: rank 1 is the slow one: others waited 9.10 s for it" in items
