import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import AdaptiveDeadline, Deadline, DeadlineExceeded, ManualClock, UsageError

MIB = 1 << 20
seconds = st.floats(0.001, 100)


def taught(waits_s, **options):
    adaptive = AdaptiveDeadline(**options)
    for wait_s in waits_s:
        adaptive.observe(wait_s)
    return adaptive


def test_a_deadline_passes_with_its_clock():
    clock = ManualClock()
    deadline = Deadline.after(10, clock)
    assert deadline.remaining_s == 10
    clock.advance(9)
    assert (deadline.remaining_s, deadline.is_past) == (1, False)
    deadline.check("the answer")
    clock.advance(1)
    assert (deadline.remaining_s, deadline.is_past) == (0, True)
    clock.advance(1)
    assert deadline.remaining_s == 0
    with pytest.raises(DeadlineExceeded, match="the answer: the deadline has passed"):
        deadline.check("the answer")


def test_never_is_never_past_and_later_than_all():
    never = Deadline.never()
    assert never.remaining_s == math.inf
    assert not never.is_past
    soon = Deadline.after(1)
    assert never.earlier(soon) is soon
    assert soon.earlier(never) is soon
    assert Deadline.after(math.inf).remaining_s == math.inf


def test_the_earlier_of_two_is_the_one_that_comes_first():
    clock = ManualClock()
    first, second = Deadline.after(1, clock), Deadline.after(2, clock)
    assert first.earlier(second) is first
    assert second.earlier(first) is first


def test_nan_is_refused_and_the_past_is_past():
    with pytest.raises(UsageError, match="NaN"):
        Deadline.after(math.nan)
    assert Deadline.after(-1).is_past


def test_repr_tells_what_is_left():
    assert repr(Deadline.after(2.5, ManualClock())) == "Deadline(in 2.500 s)"


def test_before_it_has_seen_enough_it_answers_the_initial_wait():
    adaptive = AdaptiveDeadline(initial_s=7)
    for _ in range(4):
        adaptive.observe(0.001)
        assert adaptive.timeout_s() == 7
    adaptive.observe(0.001)
    assert adaptive.timeout_s() < 1


def test_it_is_the_median_and_k_times_the_mad():
    waits_s = [1.0, 2.0, 3.0, 4.0, 5.0]  # median 3, absolute deviations 2 1 0 1 2: MAD 1
    assert taught(waits_s, k=10).timeout_s() == 13
    assert taught(waits_s, k=1).timeout_s() == 9  # three medians at least


def test_it_is_never_below_its_floor():
    assert taught([1e-6] * 10, floor_s=0.05).timeout_s() == 0.05


@given(st.lists(seconds, min_size=1, max_size=80), st.floats(0.1, 10), st.integers(0, 100 * MIB))
def test_patience_scales_every_answer(waits_s, patience, size_bytes):
    plain, patient = taught(waits_s), taught(waits_s, patience=patience)
    assert patient.timeout_s(size_bytes) == pytest.approx(patience * plain.timeout_s(size_bytes))


@pytest.mark.parametrize("patience", [0, -1, math.nan])
def test_patience_must_be_above_zero(patience):
    with pytest.raises(UsageError, match="patience must be above 0"):
        AdaptiveDeadline(patience=patience)


@given(st.lists(seconds, min_size=1, max_size=200))
def test_a_wait_like_the_usual_ones_is_always_granted(waits_s):
    adaptive = taught(waits_s, initial_s=100)
    recent = sorted(waits_s[-64:])
    assert adaptive.timeout_s() >= recent[len(recent) // 2]


def test_bytes_add_their_time_at_the_measured_bandwidth():
    adaptive = taught([0.01] * 10)
    for _ in range(3):
        adaptive.observe(1.0, 100 * MIB)
    small_s, large_s = adaptive.timeout_s(), adaptive.timeout_s(1000 * MIB)
    assert small_s < 0.1  # what moved bytes taught nothing about latency
    assert large_s == pytest.approx(small_s + 3 * 10.0)


def test_many_bytes_of_unknown_bandwidth_get_the_initial_wait_too():
    adaptive = taught([0.01] * 10, initial_s=10)
    assert adaptive.timeout_s(100 * MIB) > 10
    assert adaptive.timeout_s(1000) < 1


def test_waits_for_many_bytes_alone_do_not_make_it_impatient_with_small_ones():
    adaptive = AdaptiveDeadline()
    for _ in range(5):
        adaptive.observe(2.0, MIB)
    assert adaptive.timeout_s() >= 2.0
    assert adaptive.timeout_s(MIB) >= 2.0
    assert adaptive.timeout_s(100 * MIB) >= 200.0


def test_it_follows_a_network_that_becomes_slower_and_one_that_recovers():
    adaptive = taught([0.1] * 64)
    fast_s = adaptive.timeout_s()
    for _ in range(40):
        adaptive.observe(2.0)
    assert adaptive.timeout_s() > 2.0
    for _ in range(64):
        adaptive.observe(0.1)
    assert adaptive.timeout_s() == pytest.approx(fast_s)


def test_each_miss_doubles_it_until_one_succeeds():
    adaptive = taught([1.0] * 10)
    usual_s = adaptive.timeout_s()
    adaptive.missed()
    assert adaptive.timeout_s() == 2 * usual_s
    adaptive.missed()
    assert adaptive.timeout_s() == 4 * usual_s
    adaptive.observe(1.0)
    assert adaptive.timeout_s() == usual_s
    for _ in range(1000):
        adaptive.missed()
    assert adaptive.timeout_s() == 1024 * usual_s


def test_next_is_a_deadline_on_the_given_clock():
    clock = ManualClock(now_s=100)
    assert taught([1.0] * 10).next(clock=clock) == Deadline(103.0, clock)


def test_a_timeout_for_asyncio_is_none_when_it_never_passes():
    clock = ManualClock()
    assert Deadline.never().timeout_s is None
    assert Deadline.after(3, clock).timeout_s == 3
    late = Deadline.after(1, clock)
    clock.advance(5)
    assert late.timeout_s == 0
