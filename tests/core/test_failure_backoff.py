"""Who failed is left out for a growing while."""

from shoal.core.rates import FailureBackoff


def test_pauses_grow_until_something_is_answered():
    backoff = FailureBackoff(first_s=2, longest_s=5)
    now_s = 100.0
    for length_s in (2, 4, 5, 5):
        backoff.failed("ffn.1", now_s)
        assert backoff.is_paused("ffn.1", now_s + length_s - 0.1)
        assert not backoff.is_paused("ffn.1", now_s + length_s)
        now_s += length_s
    backoff.answered("ffn.1")
    backoff.failed("ffn.1", now_s)
    assert not backoff.is_paused("ffn.1", now_s + 2)


def test_calls_of_one_moment_count_once():
    backoff = FailureBackoff(first_s=2)
    for _ in range(5):
        backoff.failed("ffn.1", 100.0)
    assert not backoff.is_paused("ffn.1", 102.0)


def test_only_those_that_failed_are_paused():
    backoff = FailureBackoff(first_s=2)
    assert not backoff.has_any(0.0)
    backoff.failed("ffn.1", 0.0)
    assert backoff.has_any(1.0)
    assert not backoff.is_paused("ffn.2", 1.0)
    assert not backoff.has_any(2.0)


def test_what_has_failed_is_known_until_it_answers():
    backoff = FailureBackoff(first_s=2)
    backoff.failed("ffn.1", 0.0)
    assert backoff.has_failed("ffn.1")
    assert not backoff.has_failed("ffn.2")
    backoff.answered("ffn.1")
    assert not backoff.has_failed("ffn.1")


def test_the_next_end_is_that_of_a_pause_that_goes_on():
    backoff = FailureBackoff(first_s=2)
    backoff.failed("ffn.1", 0.0)
    backoff.failed("ffn.2", 1.0)
    assert [backoff.next_end_s(now_s) for now_s in (1.5, 2.0, 3.0)] == [2.0, 3.0, float("inf")]
    num_changes = backoff.num_changes
    backoff.answered("ffn.3")
    assert backoff.num_changes == num_changes
    backoff.answered("ffn.1")
    assert backoff.num_changes > num_changes


def test_of_very_many_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr("shoal.core.rates._MAX_FAILED", 10)
    backoff = FailureBackoff(first_s=2)
    for number in range(100):
        backoff.failed(number, float(number))
    assert sum(map(backoff.has_failed, range(100))) <= 10
    assert backoff.is_paused(99, 99.5)


def test_how_long_the_latest_pause_is():
    backoff = FailureBackoff(first_s=2.0, longest_s=7.0)
    assert backoff.pause_s("one") == 0.0
    for at_s, pause_s in ((0.0, 2.0), (1.0, 2.0), (2.0, 4.0), (10.0, 7.0), (20.0, 7.0)):
        backoff.failed("one", at_s)
        assert backoff.pause_s("one") == pause_s
    backoff.answered("one")
    assert backoff.pause_s("one") == 0.0
