import pytest

from bench.sample_contests import FAST, config_of, race_of, record_of, report_of
from shoal.bench.compare_summary import headline, outcomes_of, ranking, summarize_compare


@pytest.fixture
def race():
    return race_of()


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
    assert sentences[:3] == [
        "By seconds to 80 %: all-reduce, 2.00 s; then neighbor, 3.00 s.",
        "By bytes to 80 %: all-reduce and neighbor, 1.00 kB each.",
        "By steps to 80 %: all-reduce and neighbor, 10 each.",
    ]
    assert sentences[3] == "Furthest at the end: all-reduce, 90.0 %, the mean of 2 seeds as all of these."
    assert sentences[4].startswith("pair did not reach 80 %: 1 of 2: still improving")


def test_many_that_are_missing_share_a_sentence():
    names = ("all-reduce", "neighbor", "pair", "sma", "window")
    sentences = headline(report_of({name: [record_of(0.1, 0.3)] * 2 for name in names}))
    assert sentences[0] == "Nobody reached 80 % with every seed."
    assert sentences[-1].startswith("5 of 5 did not reach 80 % with every seed: all-reduce (still improving")
    assert all(f"{name} (" in sentences[-1] for name in names)


def test_notes_are_said_last():
    config = config_of("pair", notes=("Somebody was left out.",))
    assert headline(report_of({"pair": FAST}, config))[-1] == "Somebody was left out."
