import time

import pytest

from shoal.core import SYSTEM_CLOCK, ManualClock, UsageError


def test_the_system_clock_reads_the_machines():
    before, now, after = time.monotonic(), SYSTEM_CLOCK.now_s(), time.monotonic()
    assert before <= now <= after
    before, now, after = time.time(), SYSTEM_CLOCK.wall_s(), time.time()
    assert before <= now <= after


def test_a_manual_clock_stands_still_until_it_is_moved():
    clock = ManualClock(now_s=5.0, wall_s=1000.0)
    assert (clock.now_s(), clock.wall_s()) == (5.0, 1000.0)
    clock.advance(3600)
    assert (clock.now_s(), clock.wall_s()) == (3605.0, 4600.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_clock_never_goes_back(seconds):
    clock = ManualClock()
    with pytest.raises(UsageError):
        clock.advance(seconds)
    assert clock.now_s() == 0.0
