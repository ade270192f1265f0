import pytest

from bench.sample_training import EVEN, SLOW, report, row
from shoal.bench.training_tables import headline, slow_worker, summarize_training


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
            "all-reduce": "rank 1 is the slow one: others waited 8.10 s for it",
            "pair": "rank 1 is the slow one: its iterations take 10.0 times as long",
        },
    )
    result = summarize_training(report(SLOW, slow_rank=1))
    assert result["slow_worker"] == 1
    assert result["fraction_by_rank"] == {"all-reduce": [0.2, 1.0], "pair": [0.95, 0.99]}


def test_nobody_is_named_where_nobody_is_slow():
    assert slow_worker(report(EVEN)) == (None, {})
    assert summarize_training(report(EVEN, slow_rank=1))["slow_worker"] is None


def test_the_headline_says_who_was_fastest_and_who_keeps_its_speed():
    assert headline(report(EVEN)) == ["sma, 910 examples/s, 0.85 of what workers reach that share nothing."]
    other = row("fraction_of_ceiling", "ddp", [0.5])
    assert headline(report([*EVEN, other]))[0].startswith("Fastest of 2: sma, ")
    (sentence,) = headline(report(SLOW, slow_rank=1, slow_factor=10.0))
    assert sentence.startswith("While rank 1 is 10 times as slow, ")
    assert sentence.endswith(": 0.95 under pair, 0.20 under all-reduce.")


def test_the_documents_figures_are_in_the_result():
    rows = [row("examples_per_s_per_worker", "sma", [10.0, 14.0], rank=rank) for rank in (0, 1)]
    result = summarize_training(report([row("examples_per_s", "sma", [20.0, 28.0]), *rows]))
    assert result["examples_per_s_mean"] == {"sma": [24.0, 7.8]}
    assert result["examples_per_s_per_worker"] == {"sma": [[12.0, 3.9], [12.0, 3.9]]}
