"""Token buckets: a burst at once, then so many a second, for a bounded number of keys."""

import pytest

from shoal.core.rates import RateLimiter


def test_a_burst_at_once_then_so_many_a_second():
    limiter = RateLimiter(num_a_s=0.2, burst=6)
    assert [limiter.take("10.0.0.1", 1, 100.0) for _ in range(6)] == [0.0] * 6
    assert limiter.take("10.0.0.1", 1, 100.0) == pytest.approx(5.0)
    assert limiter.take("10.0.0.1", 1, 103.0) == pytest.approx(2.0)  # what was refused is not charged
    assert limiter.take("10.0.0.1", 1, 105.1) == 0.0
    assert limiter.take("10.0.0.1", 1, 105.1) > 0


def test_each_key_has_its_own():
    limiter = RateLimiter(num_a_s=1, burst=2)
    assert limiter.take("10.0.0.1", 2, 0.0) == 0.0
    assert limiter.take("10.0.0.1", 1, 0.0) > 0
    assert limiter.take("10.0.0.2", 2, 0.0) == 0.0


def test_silence_fills_up_to_a_burst_and_not_more():
    limiter = RateLimiter(num_a_s=10, burst=20)
    limiter.take("a", 5, 0.0)
    assert limiter.take("a", 20, 1000.0) == 0.0
    assert limiter.take("a", 1, 1000.0) == pytest.approx(0.1)


def test_the_rate_holds_over_time_whatever_the_pattern():
    limiter = RateLimiter(num_a_s=100, burst=50)
    taken = sum(3 for step in range(10_000) if limiter.take("a", 3, step * 0.001) == 0.0)
    assert 1000 <= taken <= 1000 + 50


def test_more_than_a_burst_is_waited_for_afterwards():
    limiter = RateLimiter(num_a_s=10, burst=20)
    assert limiter.take("a", 100, 0.0) == 0.0
    assert limiter.take("a", 1, 7.9) == pytest.approx(0.2)
    assert limiter.take("a", 1, 8.2) == 0.0


def test_a_bounded_number_is_remembered_and_the_silent_are_forgotten_first():
    limiter = RateLimiter(num_a_s=1, burst=1, max_keys=3)
    for asker in ("a", "b", "c"):
        limiter.take(asker, 1, 0.0)
    assert limiter.take("a", 1, 0.0) > 0  # it asks, and so is the last to go
    limiter.take("d", 1, 0.0)
    assert len(limiter) == 3
    assert limiter.take("a", 1, 0.0) > 0
    assert limiter.take("b", 1, 0.0) == 0.0


def test_one_bucket_for_all_where_nobody_is_told_apart():
    limiter = RateLimiter(num_a_s=3, burst=3)
    assert [limiter.allows(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [limiter.allows(11.0) for _ in range(4)] == [True, True, True, False]
