import pytest

from shoal.bench.collectives import taking_turns
from shoal.bench.tables.training import median_interval, slowest_by_times, slowest_by_waits


def test_turns_go_back_and_forth():
    assert "".join(taking_turns("ABC", 3)) == "ABCCBAABC"


@pytest.mark.parametrize(("count", "depth"), [(6, 1), (9, 2), (10, 2), (20, 6), (100, 40)])
def test_the_interval_of_a_median_lies_between_the_ranks_of_the_tables(count, depth):
    samples = [float(number) for number in range(count, 0, -1)]
    assert median_interval(samples) == (depth, count + 1 - depth)


def test_five_samples_say_nothing_at_95_percent_but_something_at_90():
    samples = [3.0, 1.0, 2.0, 5.0, 4.0]
    assert median_interval(samples) is None
    assert median_interval(samples, 0.9) == (1.0, 5.0)
    assert median_interval([]) is None


def test_who_is_waited_for_is_slow():
    assert slowest_by_waits({0: 0.2, 1: 9.1}, measured_s=10) == 1
    assert slowest_by_waits({0: 8.0, 1: 0.1, 2: 0.3}, measured_s=10) == 0


@pytest.mark.parametrize("waited_s", [{0: 0.1, 1: 1.9}, {0: 5.0, 1: 4.0}, {0: 0.0}, {}, {0: 3.9, 1: 0, 2: 0}])
def test_short_waits_and_waits_for_everybody_name_nobody(waited_s):
    assert slowest_by_waits(waited_s, measured_s=10) is None


def test_whose_own_iterations_take_longer_is_slow():
    assert slowest_by_times({0: [1.0, 1.1, 1.2], 1: [0.1, 5.0, 0.1]}) == (0, pytest.approx(11))
    assert slowest_by_times({0: [1.0], 1: [1.4]}) is None
    assert slowest_by_times({0: [1.0], 1: []}) is None
