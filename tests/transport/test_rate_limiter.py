import pytest

from shoal.transport.limits import RateLimiter


def test_a_burst_at_once_then_so_many_a_second():
    shares = RateLimiter(num_a_s=0.2, burst=6)
    assert [shares.take("10.0.0.1", 1, 100.0) for _ in range(6)] == [0.0] * 6
    assert shares.take("10.0.0.1", 1, 100.0) == pytest.approx(5.0)
    assert shares.take("10.0.0.1", 1, 103.0) == pytest.approx(2.0)  # what was refused is not charged
    assert shares.take("10.0.0.1", 1, 105.1) == 0.0
    assert shares.take("10.0.0.1", 1, 105.1) > 0


def test_each_asker_has_its_own():
    shares = RateLimiter(num_a_s=1, burst=2)
    assert shares.take("10.0.0.1", 2, 0.0) == 0.0
    assert shares.take("10.0.0.1", 1, 0.0) > 0
    assert shares.take("10.0.0.2", 2, 0.0) == 0.0


def test_silence_fills_up_to_a_burst_and_not_more():
    shares = RateLimiter(num_a_s=10, burst=20)
    shares.take("a", 5, 0.0)
    assert shares.take("a", 20, 1000.0) == 0.0
    assert shares.take("a", 1, 1000.0) == pytest.approx(0.1)


def test_the_rate_holds_over_time_whatever_the_pattern():
    shares = RateLimiter(num_a_s=100, burst=50)
    taken = sum(3 for step in range(10_000) if shares.take("a", 3, step * 0.001) == 0.0)
    assert 1000 <= taken <= 1000 + 50


def test_more_than_a_burst_is_waited_for_afterwards():
    shares = RateLimiter(num_a_s=10, burst=20)
    assert shares.take("a", 100, 0.0) == 0.0
    assert shares.take("a", 1, 7.9) == pytest.approx(0.2)
    assert shares.take("a", 1, 8.2) == 0.0


def test_a_bounded_number_is_remembered_and_the_silent_are_forgotten_first():
    shares = RateLimiter(num_a_s=1, burst=1, max_askers=3)
    for asker in ("a", "b", "c"):
        shares.take(asker, 1, 0.0)
    assert shares.take("a", 1, 0.0) > 0  # it asks, and so is the last to go
    shares.take("d", 1, 0.0)
    assert len(shares) == 3
    assert shares.take("a", 1, 0.0) > 0
    assert shares.take("b", 1, 0.0) == 0.0
