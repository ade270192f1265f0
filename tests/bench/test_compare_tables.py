""""""

import pytest

from bench.sample_contests import FAST, config_of, race_of, record_of, report_of
from shoal.bench.frame import measured
from shoal.bench.tables.compare import (
    compare_items,
    conditions,
    headline,
    latex_of,
    outcomes_of,
    ranking,
    summarize_compare,
)
from shoal.report.tables import Table
from shoal.simulate.world import Compute, World
from shoal.transport import FaultScript, Profile
from shoal.transport.network.distributions import Exponential


@pytest.fixture
def race():
    return race_of()


def shown(items):
    lines = []
    for item in items:
        lines += (
            [line for line, _ in item.lines()]
            if isinstance(item, Table)
            else [item if isinstance(item, str) else item[0]]
        )
    return lines


def test_the_tables_show_figures_rankings_and_why_not(race):
    lines = shown(compare_items(race))
    (row,) = [line for line in lines if line.startswith("pair ")]
    assert "≥0.3" in row
    assert "77.5 ±10.6" in row
    assert "in 1/2" in row
    (row,) = [line for line in lines if line.startswith("neighbor ")]
    assert "3.00" in row
    assert "1.00 kB" in row
    assert any(line.startswith("pair, not reached: 1 of 2") for line in lines)
    assert any(line.split()[:3] == ["all-reduce", "2.00", "s"] for line in lines)  # two seeds: no places
    assert any("in no order, 3 may tell one" in line for line in lines)


def test_places_are_those_that_the_seeds_leave_open():
    config = config_of("all-reduce", "neighbor", "pair", seeds=(1, 2, 3))
    runs = {
        "all-reduce": [record_of(0.1, *[0.5] * late, 0.9) for late in (9, 10, 11)],
        "neighbor": [record_of(0.1, *[0.5] * late, 0.9) for late in (1, 2, 3)],
        "pair": [record_of(0.1, *[0.5] * late, 0.9) for late in (10, 9, 12)],
    }
    lines = shown(compare_items(report_of(runs, config)))
    rows = [line.split() for line in lines if line.split()[:1] in (["1"], ["2-3"])]
    assert [row[:2] for row in rows] == [["1", "neighbor"], ["2-3", "all-reduce"], ["2-3", "pair"]]
    assert rows[0][2:5] == ["3.00", "s", "±83"]


def test_one_evaluation_apart_is_not_told_apart():
    runs = {
        "all-reduce": [record_of(0.1, 0.5, 0.5, 0.9)] * 3,
        "pair": [record_of(0.1, 0.5, 0.5, 0.5, 0.9)] * 3,
        "window": [record_of(0.1, *[0.5] * 30, 0.9)] * 3,
    }
    sentences = headline(report_of(runs, config_of(*runs, seeds=(1, 2, 3))))
    assert [sentence.split(": ")[0] for sentence in sentences[:3]] == [
        f"By {what} to 80 %" for what in ("seconds", "bytes", "steps")
    ]
    for sentence in sentences[:3]:
        assert "all-reduce and pair are not told apart" in sentence
        assert "behind them is window" in sentence


def test_seconds_of_a_real_machine_need_more_seeds():
    runs = {"all-reduce": [record_of(0.1, 0.9)] * 3, "pair": [record_of(0.1, *[0.5] * 30, 0.9)] * 3}
    virtual, real = (config_of(*runs, seeds=(1, 2, 3), is_real=is_real) for is_real in (False, True))
    assert headline(report_of(runs, virtual))[0].startswith("By seconds to 80 %: all-reduce, 1.00 s; then")
    told = headline(report_of(runs, real))
    assert "(3 runs of each: a ranking needs 5)" in told[0]
    assert told[1].startswith("By bytes to 80 %: all-reduce, 1.00 kB; then pair")


def test_the_only_one_that_arrives_has_not_won():
    runs = {
        "all-reduce": [record_of(0.1, 0.9)] * 3,
        "pair": [record_of(0.1, 0.9)] * 2 + [record_of(0.1, 0.2)],
    }
    sentences = headline(report_of(runs, config_of(*runs, seeds=(1, 2, 3))))
    assert sentences[0] == "By seconds to 80 %: all-reduce, 1.00 s, in 3 of 3 runs; pair in fewer."
    runs = {"all-reduce": [record_of(0.1, 0.9)], "pair": [record_of(0.1, 0.2)]}
    sentences = headline(report_of(runs, config_of(*runs, seeds=(1,))))
    few = "(one run of each: a ranking needs 3)"
    assert sentences[0] == f"By seconds to 80 %: all-reduce, 1.00 s, in 1 of 1 run; pair in fewer {few}."
    assert sentences[-1].startswith("pair did not reach 80 % with the one seed of this run: ")


def test_a_contender_that_failed_is_named():
    error = measured("final_accuracy", {"strategy": "pair"}, error="it died")
    config = config_of("all-reduce", "pair")
    report = report_of({"all-reduce": FAST}, config, [error])
    assert summarize_compare(report)["failed"] == 1
    assert "pair failed: it died" in shown(compare_items(report))


def test_conditions_say_what_is_equal_and_how_rates_were_chosen():
    lines = conditions(config_of(learning_rates=(0.1, 0.2), world=World(num_workers=3)))
    text = " ".join(lines)
    for part in ("3 workers", "ideal", "virtual time", "2 runs", "0.1, 0.2", "seed (1000008)"):
        assert part in text
    slow = Compute(step_ms=Exponential(mean=3.0), factors={1: 4.0})
    world = World(num_workers=3, compute=slow, faults=FaultScript(name="churn"))
    text = " ".join(conditions(config_of(world=world)))
    assert "drawn from kind=exponential mean=3.0, rank 1 4 times that; faults: churn." in text
    assert "not tuned" in " ".join(conditions(config_of()))


def test_the_table_for_a_paper_is_in_the_order_of_seconds(race):
    lines = latex_of(race).splitlines()
    body = [line.split(" & ") for line in lines if line.endswith(r"\\")]
    assert [cells[0] for cells in body] == ["", "all-reduce", "neighbor", "pair"]
    assert body[0][1:] == [r"accuracy (\%)", r"worst worker (\%)", "time (s)", "traffic (kB)", r"steps \\"]
    assert body[1][1] == r"$90.0 \pm 0.0$"  # two seeds prove nothing, so nothing is bold
    assert body[3][3] == "--"
    assert any("80 \\%" in line for line in lines)


def test_distances_are_no_percentages():
    config = config_of("all-reduce", task="quadratic", target=1.5)
    records = [record_of(9.0, 2.0, value, task="quadratic") for value in (1.0, 1.2)]
    report = report_of({"all-reduce": records}, config)
    assert headline(report)[0] == "By seconds to 1.5: all-reduce, 2.00 s (2 runs)."
    assert summarize_compare(report)["final_distance"] == {"all-reduce": 1.1}
    (row,) = [line for line in shown(compare_items(report)) if line.startswith("all-reduce")]
    assert "1.10 ±0.1" in row


def test_only_those_are_ranked_that_reached_the_target_with_every_seed(race):
    outcomes = outcomes_of(race)
    assert ranking(outcomes, "seconds_to_target") == ["all-reduce", "neighbor"]
    assert outcomes["pair"].samples["seconds_to_target"] == [2.0]
    assert (
        outcomes["pair"].why()
        == "1 of 2: still improving at the end, at the largest rate of the grid; best 70.0 % at step 20"
    )
    assert outcomes["all-reduce"].why() == ""
    assert outcomes["pair"].rate == 0.3


def test_the_result_has_means_rankings_rates_and_reasons(race):
    result = summarize_compare(race)
    assert result["ranking"]["bytes"] == ["all-reduce", "neighbor"]
    assert result["learning_rate"] == {"all-reduce": 0.2, "neighbor": 0.2, "pair": 0.3}
    assert result["seconds_to_target"] == {"all-reduce": 2.0, "neighbor": 3.0}
    assert result["final_accuracy"]["pair"] == pytest.approx(0.775)
    assert list(result["not_reached"]) == ["pair"]
    assert "failed" not in result


def test_the_headline_names_the_first_ties_and_who_is_missing(race):
    sentences = headline(race)
    few = "(2 runs of each: a ranking needs 3)"
    assert sentences[:3] == [
        f"By seconds to 80 %: all-reduce and neighbor are not told apart, 2.00 s–3.00 s {few}.",
        f"By bytes to 80 %: all-reduce and neighbor are not told apart, 1.00 kB {few}.",
        f"By steps to 80 %: all-reduce and neighbor are not told apart, 10 {few}.",
    ]
    assert sentences[3].startswith(
        "At the end: all-reduce, neighbor and pair are not told apart, 77.5 %–90.0 %"
    )
    assert sentences[4].startswith("pair did not reach 80 % with every seed: 1 of 2: still improving")


def test_many_that_are_missing_share_a_sentence():
    names = ("all-reduce", "neighbor", "pair", "sma", "window")
    sentences = headline(report_of({name: [record_of(0.1, 0.3)] * 2 for name in names}))
    assert sentences[0] == "Nobody reached 80 % with every seed."
    assert sentences[-1].startswith("5 of 5 did not reach 80 % with every seed: all-reduce (still improving")
    assert all(f"{name} (" in sentences[-1] for name in names)


def test_notes_are_said_last():
    config = config_of("pair", notes=("Somebody was left out.",))
    assert headline(report_of({"pair": FAST}, config))[-1] == "Somebody was left out."


def test_those_behind_a_winner_come_with_their_figures_the_best_first():
    late = {"pair": (30, 31, 32), "all-reduce": (0, 0, 0), "window": (60, 61, 62), "sma": (30, 32, 31)}
    runs = {name: [record_of(0.1, *[0.5] * each, 0.9) for each in waits] for name, waits in late.items()}
    told = headline(report_of(runs, config_of(*runs, seeds=(1, 2, 3))))[0]
    assert told == (
        "By seconds to 80 %: all-reduce, 1.00 s; then pair (32.0 s), sma (32.0 s) and window (62.0 s); "
        "intervals of some of these overlap."
    )
    runs = {name: runs[name] for name in ("pair", "all-reduce", "sma")}
    told = headline(report_of(runs, config_of(*runs, seeds=(1, 2, 3))))[0]
    assert told.endswith("then pair (32.0 s) and sma (32.0 s), and these 2 are not told apart.")


def test_who_is_behind_the_first_alone_is_said_to_be_behind_that_one():
    late = {"all-reduce": (10, 10, 10), "pair": (10, 20, 30), "window": (30, 30, 30)}
    runs = {name: [record_of(0.1, *[0.5] * each, 0.9) for each in waits] for name, waits in late.items()}
    told = headline(report_of(runs, config_of(*runs, seeds=(1, 2, 3))))[0]
    assert told.endswith("; window is behind all-reduce, but not behind pair.")


def test_conditions_tell_the_network_in_numbers_and_every_seed():
    text = " ".join(conditions(config_of(world=World(num_workers=3, profile=Profile.load("home")))))
    assert "home (20 Mbit/s up and 100 Mbit/s down, a one-way delay of 15 ms or more, 0.3 %" in text
    assert "with the seeds 5 and 6" in text
