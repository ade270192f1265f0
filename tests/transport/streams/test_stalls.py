from shoal.transport.streams.connection import StallTimer


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
