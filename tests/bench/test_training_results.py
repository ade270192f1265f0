import pytest

from bench.sample_training import EVEN, SLOW, report, row
from shoal.bench.tables.training import (
    MAX_RANKS,
    headline,
    slow_worker,
    summarize_training,
    training_items,
)
from shoal.report import Row
from shoal.report.tables import Table


def test_the_result_has_medians_and_intervals_by_strategy():
    result = summarize_training(report(EVEN))
    assert result["examples_per_s"] == {"none": 1100.0, "sma": 910.0}
    assert result["fraction_of_ceiling"] == {"sma": 0.855}
    assert result["fraction_interval"] == {"sma": [0.7, 0.95]}
    assert result["seconds_per_iteration"]["sma"]["p50"] == pytest.approx(0.2)
    assert result["seconds_per_iteration"]["none"] == {"p50": pytest.approx(0.1), "p75": pytest.approx(0.1)}
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


def test_the_headline_says_how_fast_they_are_and_who_keeps_its_speed():
    assert headline(report(EVEN)) == ["sma, 910 examples/s, 0.85 of what workers reach that share nothing."]
    other = row("fraction_of_ceiling", "ddp", [0.5])
    assert headline(report([*EVEN, other]))[0].startswith(
        "Of the speed of workers that share nothing: sma and ddp are not told apart, "
    )
    (sentence,) = headline(report(SLOW, slow_rank=1, slow_factor=10.0))
    assert sentence.startswith("While rank 1 is 10 times as slow, ")
    few = "(one run of each: a ranking needs 5)"
    assert sentence.endswith(f": 0.20 under all-reduce, 0.95 under pair {few}.")


def test_who_keeps_more_of_its_speed_is_said_where_starts_tell():
    def kept(name, shares):
        return [
            Row(
                key={"strategy": name, "rank": rank},
                metric="fraction_of_own_speed",
                unit="",
                direction="higher",
                starts=[[share] for share in (shares if rank == 0 else [0.1] * 5)],
            )
            for rank in (0, 1)
        ]

    rows = [*kept("all-reduce", [0.2, 0.21, 0.2, 0.22, 0.2]), *kept("pair", [0.9, 0.91, 0.93, 0.9, 0.92])]
    (sentence,) = headline(report(rows, slow_rank=1, slow_factor=10.0))
    assert sentence == (
        "While rank 1 is 10 times as slow, the others keep of their own speed: pair, 0.91; "
        "then all-reduce, 0.21."
    )


def test_the_documents_figures_are_in_the_result():
    rows = [row("examples_per_s_per_worker", "sma", [10.0, 14.0], rank=rank) for rank in (0, 1)]
    result = summarize_training(report([row("examples_per_s", "sma", [20.0, 28.0]), *rows]))
    assert result["examples_per_s_mean"] == {"sma": [24.0, 7.8]}
    assert result["examples_per_s_per_worker"] == {"sma": [[12.0, 3.9], [12.0, 3.9]]}


def tables_of(rows, **config):
    return [item for item in training_items(report(rows, **config)) if isinstance(item, Table)]


def test_the_table_has_a_line_for_each_strategy_and_says_what_failed():
    table = tables_of(EVEN)[0]
    assert table.title == "mlp, 2 workers on cpu, batch 64 each"
    assert table.rows == [
        ("none", "1,100", "-", "-", "100 ms", "-"),
        ("sma", "910", "0.855", "0.700–0.950", "200 ms", "-"),
        ("ddp", *("-" for _ in range(5))),
    ]
    assert table.notes == {2: ("failed: it broke", "red")}


def test_the_times_of_a_table_have_one_unit():
    fast = row("seconds_per_iteration", "none", [0.0007], rank=0)
    rows = [row("examples_per_s", "none", [9.0]), fast, *EVEN[4:7]]
    table = tables_of(rows)[0]
    assert [line[4] for line in table.rows] == ["0.700 ms", "200 ms"]


def test_with_a_slow_worker_the_table_has_its_ranks_and_a_sentence():
    items = training_items(report(SLOW, slow_rank=1))
    table = next(item for item in items if isinstance(item, Table))
    assert [line[-2:] for line in table.rows] == [("0.200", "1.000"), ("0.950", "0.990")]
    assert "all-reduce: rank 1 is the slow one: others waited 8.10 s for it" in items


def test_it_says_who_waited_for_whom():
    items = training_items(report(SLOW, slow_rank=1, options={"pair": {}}))
    table = next(item for item in items if isinstance(item, Table) and item.title.startswith("Who waited"))
    assert table.rows == [("all-reduce", "rank 0", "-", "81"), ("all-reduce", "rank 1", "0", "-")]


def test_it_says_where_nobody_waited_and_where_it_is_not_known():
    names = ("pair", "ddp")
    rows = [row("fraction_of_ceiling", name, [0.9]) for name in names]
    items = training_items(report(rows))
    assert "No worker waited for another under pair." in items
    assert "Not counted, as it is not Shoal that waits: ddp." in items
    alone = training_items(report(rows, num_workers=1))
    assert not [item for item in alone if isinstance(item, str) and "waited" in item]


def test_each_workers_speed_has_the_documents_error():
    rows = [row("examples_per_s", "sma", [20.0, 28.0]), row("seconds_per_iteration", "sma", [1.0], rank=0)]
    rows += [row("examples_per_s_per_worker", "sma", [10.0, 14.0], rank=rank) for rank in (0, 1)]
    assert tables_of(rows)[1].rows == [("sma", "24.0 ± 7.8", "12.0 ± 3.9", "12.0 ± 3.9")]


def test_of_many_workers_the_slowest_and_the_fastest_are_shown():
    rows = [row("examples_per_s", "sma", [20.0]), row("seconds_per_iteration", "sma", [1.0], rank=0)]
    rows += [
        row("examples_per_s_per_worker", "sma", [10.0 + rank], rank=rank) for rank in range(MAX_RANKS + 1)
    ]
    table = tables_of(rows)[1]
    assert [column.name for column in table.columns] == ["strategy", "in all", "slowest", "fastest"]
    assert table.rows == [("sma", "20.0 ± 0.0", "10.0 ± 0.0", f"{10.0 + MAX_RANKS} ± 0.0")]


def test_the_title_says_what_was_trained_on_what():
    assert tables_of(EVEN, image_size=32, device="cuda")[0].title == (
        "mlp of 32×32 images, 2 workers on cuda, batch 64 each"
    )
