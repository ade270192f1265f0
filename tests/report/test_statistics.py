import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.report import Row, noise_floor, percentile, percentiles, summarize
from shoal.report.statistics import change_percent, start_medians

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
    assert (summary.p50, summary.p95) == pytest.approx(tuple(np.percentile(starts, [50, 95])))
    assert summary.start_medians == pytest.approx(np.median(starts, axis=1))
    assert (summary.num_starts, summary.num_samples) == (4, 100)


def test_a_failed_row_has_no_figures_and_a_single_sample_has_no_spread():
    assert summarize(Row(key={}, metric="m", unit="s", direction="lower", error="lost")) is None
    single = summarize(row([3.0]))
    assert (single.p95, single.spread, single.noise_percent) == (3.0, 0.0, None)


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
