import pytest

from bench.sample_contests import record_of
from shoal.bench.compare_reasons import reasons_of, shown_score, shown_target
from shoal.simulate.task_facts import facts_of


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (record_of(0.1, 0.5, 0.6, 0.7, 0.75), "still improving at the end; best 75.0 % at step 40"),
        (record_of(0.1, 0.7, 0.75, 0.75, 0.75, 0.75), "flat at the end; best 75.0 % at step 20"),
        (record_of(0.1, 0.7, 0.4, 0.1, 0.1), "fell back by the end; best 70.0 % at step 10"),
        (record_of(0.1, 0.1, 0.05), "never better than at the start; best 10.0 % at step 0"),
        (record_of(0.1, 0.5, error="it diverged."), "it diverged; best 50.0 % at step 10"),
        (record_of(error="it needs momentum."), "could not take part: it needs momentum"),
        (
            record_of(0.1, 0.5, ended={0: "rank 1 is lost.", 1: "it was killed."}),
            "ended early, rank 0 says: rank 1 is lost; best 50.0 % at step 10",
        ),
        (record_of(0.1, 0.3, 0.5, ended={1: "killed"}), "still improving at the end; best 50.0 % at step 20"),
        (record_of(9.0, 3.0, 2.0, 1.0, task="quadratic"), "still improving at the end; best 1.00 at step 30"),
    ],
)
def test_a_run_has_one_reason(record, reason):
    assert reasons_of([record]) == {reason: 1}


def test_runs_of_one_kind_are_told_together():
    records = [record_of(0.1, 0.5, 0.7), record_of(0.1, 0.6, 0.8), record_of(0.1, error="it diverged.")]
    assert reasons_of(records) == {
        "still improving at the end; best 75.0 % at step 20": 2,
        "it diverged; best 10.0 % at step 0": 1,
    }
    assert reasons_of([]) == {}
    assert list(reasons_of(records[2:], "at the largest rate of the grid")) == [
        "it diverged, at the largest rate of the grid; best 10.0 % at step 0"
    ]


def test_shares_are_percentages_and_distances_are_not():
    assert shown_score(facts_of("digits"), 0.9123) == "91.2 %"
    assert shown_target(facts_of("digits"), 0.9) == "90 %"
    assert shown_target(facts_of("quadratic"), 0.01) == "0.01"
