""""""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.report import Row, noise_floor, percentile, percentiles, summarize
from shoal.report.statistics import (
    change_percent,
    half_interval,
    known_percentile,
    lead_of,
    start_medians,
    t_quantile,
    t_survival,
)

samples = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)


def row(*starts):
    return Row(key={}, metric="m", unit="s", direction="lower", starts=list(starts))


@given(samples, st.floats(0, 100))
def test_percentiles_are_numpys(values, q):
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-12, abs=1e-9)


@given(samples)
def test_percentiles_stay_within_the_samples_and_in_order(values):
    found = percentiles(values)
    assert list(found) == sorted(found)
    assert min(values) <= found[0] <= found[-1] <= max(values)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentiles_that_do_not_exist_are_refused(values, q):
    with pytest.raises(UsageError):
        percentile(values, q)


def test_summary_agrees_with_numpy():
    rng = np.random.default_rng(0)
    starts = rng.lognormal(size=(4, 25))
    summary = summarize(row(*starts))
    assert summary.mean == pytest.approx(starts.mean())
    assert summary.spread == pytest.approx(starts.std(ddof=1))
    assert (summary.median, summary.percentiles[95]) == pytest.approx(tuple(np.percentile(starts, [50, 95])))
    assert start_medians(row(*starts)) == pytest.approx(np.median(starts, axis=1))
    assert (summary.num_starts, summary.num_samples) == (4, 100)


def test_a_failed_row_has_no_figures_and_a_single_sample_has_no_spread():
    assert summarize(Row(key={}, metric="m", unit="s", direction="lower", error="lost")) is None
    single = summarize(row([3.0]))
    assert (single.median, single.spread, single.noise_percent) == (3.0, 0.0, None)


def test_medians_are_taken_start_by_start():
    assert start_medians(row([1.0, 2.0, 9.0], [4.0, 5.0])) == [2.0, 4.5]


def test_noise_between_starts_grows_with_their_spread():
    rng = random.Random(0)

    def noise(spread):
        return noise_floor(row(*([rng.lognormvariate(0, spread)] * 10 for _ in range(20))))

    quiet, loud = noise(0.01), noise(0.1)
    assert 1 < quiet < 4
    assert 10 < loud < 40


def test_noise_of_equal_starts_is_zero_even_at_zero():
    assert noise_floor(row([1.0, 5.0], [5.0, 1.0])) == 0
    assert noise_floor(row([0.0], [0.0])) == 0


def test_noise_of_two_starts_is_their_difference():
    assert noise_floor(row([95.0], [105.0])) == pytest.approx(10)


def test_noise_of_one_start_sees_slow_drift_and_needs_samples():
    assert noise_floor(row([1.0] * 7)) is None
    assert noise_floor(row([1.0] * 8)) == 0
    alternating_in_blocks = ([1.0] * 4 + [1.1] * 4) * 4
    assert noise_floor(row(alternating_in_blocks)) == pytest.approx(200 * 0.1 / 2.1)


@pytest.mark.parametrize(
    ("direction", "baseline", "test", "change"),
    [
        ("lower", 0.1, 0.11, -10),
        ("lower", 0.1, 0.09, 10),
        ("higher", 100, 90, -10),
        ("higher", 100, 110, 10),
        ("higher", -10, -11, -10),
        ("lower", 0, 0, 0),
        ("lower", 0, 1, None),
    ],
)
def test_negative_is_worse(direction, baseline, test, change):
    found = change_percent(baseline, test, direction)
    assert found == change if change is None else found == pytest.approx(change)


@pytest.mark.parametrize("t", [-40.0, -1.0, -1e-9, 0.0, 0.3, 1.0, 2.5, 30.0, 1e6])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t):
    assert t_survival(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9, abs=1e-12)
    if t > 0:
        two = 1 / (math.sqrt(t * t + 2) * (math.sqrt(t * t + 2) + t))
    else:
        two = 0.5 - t / (2 * math.sqrt(t * t + 2))
    assert t_survival(t, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("freedom", "tail", "t"),
    # the printed table of Student's distribution
    [
        (3, 0.05, 2.353),
        (4, 0.005, 4.604),
        (8, 0.005, 3.355),
        (10, 0.025, 2.228),
        (19, 0.001, 3.579),
        (30, 0.0005, 3.646),
        (120, 0.005, 2.617),
        (1e7, 0.025, 1.960),
    ],
)
def test_quantiles_are_those_of_the_table(freedom, tail, t):
    assert t_quantile(tail, freedom) == pytest.approx(t, abs=6e-4)
    assert t_survival(t_quantile(tail, freedom), freedom) == pytest.approx(tail, rel=1e-8)


def test_many_degrees_of_freedom_are_normal():
    assert t_survival(1.5, 1e8) == pytest.approx(math.erfc(1.5 / math.sqrt(2)) / 2, rel=1e-6)


@pytest.mark.parametrize("freedom", [0.7, 1.0, 4.35, 17.2, 400.0])
def test_survival_is_symmetric_and_falls(freedom):
    values = [t_survival(t / 4, freedom) for t in range(-40, 41)]
    assert values == sorted(values, reverse=True)
    assert all(a + b == pytest.approx(1, abs=1e-12) for a, b in zip(values, reversed(values), strict=True))
    assert t_survival(math.inf, freedom) == 0


@pytest.mark.parametrize(
    "call", [lambda: t_survival(1, 0), lambda: t_survival(math.nan, 3), lambda: t_quantile(0, 3)]
)
def test_nonsense_is_refused(call):
    with pytest.raises(UsageError):
        call()


# --- who leads ---


def test_one_that_is_ahead_by_more_than_its_noise_leads():
    lead = lead_of({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]}, "lower", 3)
    assert (lead.names, lead.behind, lead.is_told_apart) == (("a",), ("b",), True)
    lead = lead_of({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.2]}, "higher", 3)
    assert lead.names == ("b",)


def test_too_few_samples_tell_nobody_apart_however_far_they_are():
    lead = lead_of({"a": [1.0, 1.0], "b": [100.0, 100.0]}, "higher", 3)
    assert not lead.is_told_apart
    assert lead.names == ("b", "a")
    assert lead.why_not() == "2 runs of each: a ranking needs 3"


def test_samples_that_agree_by_chance_prove_nothing():
    noisy = {name: [1.0, 2.0, 3.0] for name in "cde"}
    assert not lead_of({"a": [2.5] * 3, **noisy}, "higher", 3).is_told_apart


def test_one_that_needs_far_less_is_not_drowned_in_the_noise_of_those_that_need_much():
    contest = {"a": [0.5, 0.55, 0.6], "b": [5.0, 5.5, 6.0], "c": [5.1, 5.4, 6.1]}
    assert lead_of(contest, "lower", 3).names == ("a",)
    assert lead_of({**contest, "d": [0.62, 0.62, 0.62]}, "lower", 3).names == ("a", "d")


def test_many_equals_with_many_samples_are_not_told_apart_by_their_number():
    draws = random.Random(3)
    contests = [{str(name): [draws.gauss(10, 1) for _ in range(20)] for name in range(17)} for _ in range(60)]
    leads = [lead_of(contest, "lower", 3) for contest in contests]
    assert sum(bool(lead.behind or lead.between) for lead in leads) <= 3


def test_one_alone_leads_nobody():
    assert not lead_of({"a": [1.0] * 5}, "higher", 3).is_told_apart


def test_what_is_one_evaluation_apart_is_not_seen_however_constant_it_is():
    steps = {"a": [40.0] * 3, "b": [45.0] * 3}
    assert lead_of(steps, "lower", 3).is_told_apart
    assert not lead_of(steps, "lower", 3, {"a": 5.0, "b": 5.0}).is_told_apart
    many = {"a": [40.0] * 30, "b": [45.0] * 30}
    assert not lead_of(many, "lower", 3, {"a": 5.0, "b": 5.0}).is_told_apart
    assert lead_of({**many, "b": [50.0] * 30}, "lower", 3, {"a": 5.0, "b": 5.0}).is_told_apart
    assert lead_of(many, "lower", 3, {"a": 1.0, "b": 1.0}).is_told_apart


def test_behind_are_only_those_that_are_worse_than_every_leader():
    contest = {"a": around(1.0, 0.05), "b": around(1.2, 0.05), "c": around(1.3, 0.05), "d": around(3, 0.05)}
    lead = lead_of(contest, "lower", 3)
    assert (lead.names, lead.between, lead.behind) == (("a", "b"), ("c",), ("d",))
    assert lead.places == {"a": (1, 2), "b": (1, 3), "c": (2, 3), "d": (4, 4)}


def around(mean, deviation):
    return [mean - deviation, mean, mean + deviation]


def test_few_samples_leave_every_place_open():
    assert lead_of({"a": [1.0], "b": [9.0]}, "lower", 3).places == {"a": (1, 2), "b": (1, 2)}


def test_half_an_interval_is_students():
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert half_interval([2.0, 2.0, 2.0], least_deviation=1.0) == half_interval([1.0, 2.0, 3.0])
    assert half_interval([1.0]) == math.inf


def test_percentiles_need_a_sample_beyond_them():
    for count, q in ((1, 50), (4, 75), (4, 25), (20, 95), (20, 5), (100, 99)):
        assert known_percentile([3.0] * count, q) == 3.0
    for count, q in ((0, 50), (3, 75), (3, 25), (19, 95), (19, 5), (99, 99)):
        assert known_percentile([3.0] * count, q) is None


def test_equal_contenders_are_told_apart_in_few_of_many_contests():
    draws = random.Random(1)
    contests = [{name: [draws.gauss(0, 1) for _ in range(3)] for name in "ab"} for _ in range(1000)]
    assert sum(lead_of(contest, "higher", 3).is_told_apart for contest in contests) <= 30
