from report import samples
from shoal.report import Row
from shoal.report.figures import Shown
from shoal.report.glance import best_cells, glance_tables


def speed(value, spread=0.0, metric="speed", direction="higher", **key):
    starts = [[value * (1 + spread * number)] for number in (-1, 0, 1)]
    return samples.row(key, metric, "1/s", direction, starts)


def places(*rows):
    best = best_cells([(0, row) for row in rows])
    return [best.get((0, row.identity)) for row in rows]


def test_the_best_of_each_setting_is_marked_in_the_direction_of_its_metric():
    rows = [
        speed(value, strategy=name, split=split) for split in "ab" for name, value in (("x", 2), ("y", 3))
    ]
    assert places(*rows) == [None, "best", None, "best"]
    rows = [speed(value, direction="lower", strategy=name) for name, value in (("x", 2), ("y", 3))]
    assert places(*rows) == ["best", None]


def test_what_noise_may_have_decided_is_near():
    assert places(speed(100, strategy="x"), speed(99, 0.02, strategy="y"), speed(50, strategy="z")) == [
        "best",
        "near",
        None,
    ]


def test_the_ceiling_and_equals_win_nothing():
    assert places(speed(9, strategy="none"), speed(2, strategy="x"), speed(1, strategy="y")) == [
        None,
        "best",
        None,
    ]
    assert places(speed(2, strategy="x"), speed(2, strategy="y")) == [None, None]


def test_sizes_do_not_compete():
    assert places(speed(1, size=1), speed(2, size=2)) == [None, None]
    assert places(speed(1, mode="a"), speed(2, mode="b")) == [None, "best"]


def test_metrics_of_the_same_keys_share_a_table_without_the_ranks():
    table = glance_tables([Shown(samples.training())])
    assert table.count("<table") == 1
    for words in ("examples_per_s", "fraction_of_ceiling", "pair-averaging", "failed"):
        assert words in table
    assert "seconds_per_iteration" not in table


def test_one_metric_alone_has_no_table():
    assert glance_tables([Shown(samples.latencies())]) == ""


def test_what_is_called_none_competes_unless_it_is_who_competes():
    def row(codec, value):
        return Row(
            key={"compression": codec}, metric="speed", unit="1/s", direction="higher", starts=[[value]]
        )

    rows = [row("none", 300.0), row("fp16", 200.0)]
    best = best_cells([(0, each) for each in rows])
    assert best == {(0, rows[0].identity): "best"}
