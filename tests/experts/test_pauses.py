from shoal.experts.pauses import Pauses


def test_pauses_grow_until_something_is_answered():
    pauses = Pauses(first_s=2, longest_s=5)
    now_s = 100.0
    for length_s in (2, 4, 5, 5):
        pauses.failed("ffn.1", now_s)
        assert pauses.is_paused("ffn.1", now_s + length_s - 0.1)
        assert not pauses.is_paused("ffn.1", now_s + length_s)
        now_s += length_s
    pauses.answered("ffn.1")
    pauses.failed("ffn.1", now_s)
    assert not pauses.is_paused("ffn.1", now_s + 2)


def test_calls_of_one_moment_count_once():
    pauses = Pauses(first_s=2)
    for _ in range(5):
        pauses.failed("ffn.1", 100.0)
    assert not pauses.is_paused("ffn.1", 102.0)


def test_only_those_that_failed_are_paused():
    pauses = Pauses(first_s=2)
    assert not pauses.has_any(0.0)
    pauses.failed("ffn.1", 0.0)
    assert pauses.has_any(1.0)
    assert not pauses.is_paused("ffn.2", 1.0)
    assert not pauses.has_any(2.0)


def test_what_has_failed_is_known_until_it_answers():
    pauses = Pauses(first_s=2)
    pauses.failed("ffn.1", 0.0)
    assert pauses.has_failed("ffn.1")
    assert not pauses.has_failed("ffn.2")
    pauses.answered("ffn.1")
    assert not pauses.has_failed("ffn.1")


def test_the_next_end_is_that_of_a_pause_that_goes_on():
    pauses = Pauses(first_s=2)
    pauses.failed("ffn.1", 0.0)
    pauses.failed("ffn.2", 1.0)
    assert [pauses.next_end_s(now_s) for now_s in (1.5, 2.0, 3.0)] == [2.0, 3.0, float("inf")]
    num_changes = pauses.num_changes
    pauses.answered("ffn.3")
    assert pauses.num_changes == num_changes
    pauses.answered("ffn.1")
    assert pauses.num_changes > num_changes


def test_of_very_many_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr("shoal.experts.pauses._MAX_NAMES", 10)
    pauses = Pauses(first_s=2)
    for number in range(100):
        pauses.failed(number, float(number))
    assert sum(map(pauses.has_failed, range(100))) <= 10
    assert pauses.is_paused(99, 99.5)
