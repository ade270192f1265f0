from shoal.transport.limits import Limits
from shoal.transport.streams.connection import StallDetector, StallTimer


def looks(patience, seconds, num_bytes=lambda second: 0, is_expected=True):
    """The first second at which patience ended, or None."""
    for second in range(seconds):
        if patience.has_ended(1000.0 + second, num_bytes(second), is_expected=is_expected):
            return second
    return None


def test_patience_ends_after_its_time():
    assert looks(StallTimer(10, 1000), 100) == 11  # the first look only begins to count


def test_patience_lasts_while_nothing_is_expected():
    assert looks(StallTimer(10, 1000), 1000, is_expected=False) is None


def test_bytes_at_the_least_rate_renew_patience():
    assert looks(StallTimer(10, 1000), 1000, lambda second: 1000 * second) is None
    assert looks(StallTimer(10, 1000), 1000, lambda second: 900 * second) in range(90, 120)


def test_many_bytes_at_once_do_not_buy_hours():
    assert looks(StallTimer(10, 1000), 100, lambda second: 10**9 * (second > 0)) in range(10, 14)


def test_a_long_pause_of_our_own_counts_little():
    patience = StallTimer(10, 1000)
    assert not patience.has_ended(0, 0, is_expected=True)
    assert not patience.has_ended(10_000, 0, is_expected=True)


def test_a_new_frame_is_a_new_beginning():
    watch = StallDetector(Limits(frame_s=3))
    for second in range(100):
        watch.num_frames += second % 3 == 0
        assert not watch.is_stuck(float(second), 0, is_inside_frame=True)
    assert any(watch.is_stuck(100.0 + second, 0, is_inside_frame=True) for second in range(6))


def test_what_was_given_up_once_is_not_given_up_every_second():
    watch = StallDetector(Limits(frame_s=1))
    given_up = [second for second in range(20) if watch.has_stalled(float(second), is_expecting=True)]
    assert 3 <= len(given_up) <= 5


def test_a_reader_is_judged_by_what_leaves():
    watch = StallDetector(Limits(frame_s=1, min_bytes_per_s=100))
    assert not any(watch.does_not_read(float(s), 100_000, 50_000 - 100 * s) for s in range(100))
    assert any(watch.does_not_read(100.0 + s, 100_000, 40_000) for s in range(6))
    assert not watch.does_not_read(200.0, 100_000, 0)


def test_anything_heard_counts_as_use():
    watch = StallDetector(Limits())
    assert [watch.has_heard(number) for number in (5, 5, 6, 6)] == [True, False, True, False]
