import msgspec
import pytest

from shoal.bench.accuracy import AccuracyConfig, TrickSettings, trick_contenders
from shoal.bench.contenders import strategy_contenders
from shoal.bench.tables.accuracy import accuracy_items, changes_of, headline, summarize_accuracy
from shoal.report import Curve, Report, Row
from shoal.report.tables import Table
from shoal.report.words import METRICS

CREATED = "2026-01-02T03:04:05+00:00"


def rows_of(contender, split="iid", **samples):
    key = {"contender": contender, "split": split}
    return [
        Row(
            key=key,
            metric=metric,
            unit=METRICS[metric].unit,
            direction=METRICS[metric].direction,
            starts=[[x] for x in xs],
        )
        for metric, xs in samples.items()
    ]


def finals(contender, accuracy, times_s=(), split="iid", sent=1e6):
    samples = {
        "final_accuracy": accuracy,
        "worst_final_accuracy": [x - 0.01 for x in accuracy],
        "bytes_sent": [sent] * len(accuracy),
        "examples_per_s": [100.0] * len(accuracy),
        "consensus_distance": [0.5] * len(accuracy),
    }
    if times_s:
        samples["seconds_to_target"] = list(times_s)
    return rows_of(contender, split, **samples)


def curve(contender, split="iid", **points):
    key = {"contender": contender, "split": split}
    return Curve(key=key, metric="accuracy", unit="", direction="higher", starts=[points] * 2)


def report(rows, curves=(), contenders=None, num_starts=2):
    contenders = contenders or strategy_contenders(["all-reduce", "pair"], {})
    config = AccuracyConfig(contenders=contenders, num_workers=4, target_accuracy=0.9)
    return Report(
        benchmark="accuracy",
        created=CREATED,
        config=msgspec.to_builtins(config),
        seeds=list(range(num_starts)),
        environment={"cores": 2},
        rows=rows,
        curves=list(curves),
    )


@pytest.fixture
def race():
    rows = [*finals("all-reduce", [0.97, 0.95], [2.0, 4.0]), *finals("pair", [0.93, 0.91], [1.0, 2.0])]
    curves = [
        curve("all-reduce", value=[0.1, 0.95], bytes=[0.0, 4e6], s=[0.0, 3.0]),
        curve("pair", value=[0.1, 0.92], bytes=[0.0, 1e6], s=[0.0, 1.5]),
    ]
    return report(rows, curves)


def test_the_headline_says_who_was_fastest_to_what_and_at_how_many_bytes(race):
    few = "are not told apart, {}–{} (2 runs of each: a ranking needs {})."
    assert headline(race) == [
        "iid: seconds to 90 %: all-reduce and pair " + few.format("1.50 s", "3.00 s", 5),
        "iid: accuracy at the end: all-reduce and pair " + few.format("92.0 %", "96.0 %", 3),
        "iid: bytes sent to 90 %: all-reduce and pair " + few.format("1.00 MB", "4.00 MB", 3),
    ]
    rows = [
        *finals("all-reduce", [0.97, 0.95, 0.96, 0.96, 0.97], [2.0, 2.1, 2.2, 2.0, 2.1]),
        *finals("pair", [0.96, 0.95, 0.97, 0.96, 0.96], [1.0, 1.1, 1.2, 1.0, 1.1]),
    ]
    first, last = headline(report(rows, num_starts=5))
    assert first == "iid: seconds to 90 %: pair, 1.08 s; then all-reduce, 2.08 s."
    assert last.endswith("are not told apart, 96.0 %–96.2 % (their 95 % intervals overlap).")


def test_who_reached_the_target_in_some_starts_only_is_not_the_first():
    rows = [*finals("all-reduce", [0.97, 0.95], [2.0, 4.0]), *finals("pair", [0.93, 0.80], [1.0])]
    told = report(rows)
    few = "(2 runs of each: a ranking needs 5)"
    assert headline(told)[0] == (
        f"iid: seconds to 90 %: all-reduce, 3.00 s, in 2 of 2 runs; pair in fewer {few}."
    )
    assert "pair" not in summarize_accuracy(told)["seconds_to_target"]["iid"]
    assert "in 1 of 2" in text_of(told)


def test_when_nobody_reaches_the_target_it_says_so():
    told = report([*finals("all-reduce", [0.8, 0.8]), *finals("pair", [0.8, 0.8])])
    assert headline(told)[0] == "iid: nobody reached 90 % with every seed."
    one = report([*finals("all-reduce", [0.8])], num_starts=1)
    assert headline(one)[0] == "iid: nobody reached 90 % with the one seed of this run."
    assert headline(told)[1].startswith(
        "iid: accuracy at the end: all-reduce and pair are not told apart, 80.0 %"
    )
    assert "not reached" in text_of(told)


def test_the_result_has_means_over_starts(race):
    result = summarize_accuracy(race)
    assert result["final_accuracy"] == {"iid": {"all-reduce": 0.96, "pair": 0.92}}
    assert result["seconds_to_target"] == {"iid": {"all-reduce": 3.0, "pair": 1.5}}
    assert result["bytes_sent"]["iid"]["pair"] == 1_000_000
    assert result["bytes_to_target"] == {"iid": {"all-reduce": 4_000_000, "pair": 1_000_000}}
    assert "failed" not in result
    assert "points_by_trick" not in result


def text_of(told):
    lines = []
    for item in accuracy_items(told):
        if isinstance(item, Table):
            lines += [line for line, _ in item.lines()]
        else:
            lines.append(item if isinstance(item, str) else item[0])
    return "\n".join(lines)


def test_what_is_printed_says_what_was_equal_and_what_came_out(race):
    text = text_of(race)
    assert "4 workers on cpu, batch 16 each, 300 steps; 2 runs of each, with the seeds 0 and 1" in text
    assert "lr 0.1, momentum 0.9: the same for all" in text
    assert "4 workers share 2 cores" in text
    assert "96.0 ±1.4 %" in text
    assert max(map(len, text.splitlines())) <= 120


def tricks_report(**accuracies):
    contenders = trick_contenders(TrickSettings(300, 4, orders=("adapt-then-combine",)))
    rows = [row for name, samples in accuracies.items() for row in finals(name, samples)]
    return report(rows, contenders=contenders)


def test_a_trick_is_judged_by_the_same_seeds():
    told = tricks_report(**{"atc": [0.90, 0.94], "atc+average": [0.92, 0.95], "atc+decay": [0.80, 0.94]})
    changes = changes_of(told)["iid"]
    assert changes["atc+average"] == pytest.approx([2.0, 1.0])
    assert changes["atc+decay"] == pytest.approx([-10.0, 0.0])
    assert summarize_accuracy(told)["points_by_trick"] == {"iid": {"atc+average": 1.5, "atc+decay": -5.0}}
    assert headline(told)[-1] == (
        "iid: no trick is seen to change the final accuracy (2 runs of each: a verdict needs 3)."
    )
    assert "+1.5 (+1.0 to +2.0)" in text_of(told)
    assert "One of 360 test examples is 0.278 points." in text_of(told)


def test_a_trick_is_named_where_its_change_is_more_than_chance_among_all_tricks():
    base = [0.90, 0.91, 0.92, 0.90, 0.91]
    told = tricks_report(
        **{
            "atc": base,
            "atc+average": [accuracy + 0.02 for accuracy in base],
            "atc+decay": [0.91, 0.90, 0.92, 0.91, 0.90],
        }
    )
    told = msgspec.structs.replace(told, seeds=[0, 1, 2, 3, 4])
    assert headline(told)[-1] == (
        "iid: changed the final accuracy by more than chance: atc+average by +2.0 (+2.0 to +2.0) points."
    )


def test_one_evaluation_apart_is_not_seen():
    rows = [*finals("all-reduce", [0.9] * 5, [2.0] * 5), *finals("pair", [0.9] * 5, [3.0] * 5)]
    apart = [curve(name, value=[0.1, 0.5, 0.9], s=[0.0, 1.0, 2.0]) for name in ("all-reduce", "pair")]
    assert headline(report(rows, num_starts=5))[0].endswith("all-reduce, 2.00 s; then pair, 3.00 s.")
    assert "not told apart" in headline(report(rows, apart, num_starts=5))[0]


def test_a_trick_that_lacks_a_start_is_not_judged():
    told = tricks_report(**{"atc": [0.90, 0.94], "atc+average": [0.92]})
    assert changes_of(told) == {}


def test_what_failed_is_shown_and_counted():
    failed = Row(
        key={"contender": "pair", "split": "iid", "start": 1},
        metric="final_accuracy",
        unit="",
        direction="higher",
        error="it diverged.",
    )
    start = Row(key={"scenario": "start"}, metric="completed", unit="", direction="higher", error="killed")
    told = report([*finals("all-reduce", [0.97, 0.95], [2.0, 4.0]), failed, start])
    text = text_of(told)
    assert "failed: it diverged." in text
    assert "killed" in text
    assert summarize_accuracy(told)["failed"] == 2
    assert headline(told)[0].startswith("iid: seconds to 90 %: all-reduce, 3.00 s")
