"""Queues, delays and losses of a link without faults, on times that the test makes up."""

import pytest

from shoal.transport.network.distributions import Draws, Exponential, Normal
from shoal.transport.network.links import LEAST_RETRANSMISSION_S, DownLine, Link, UpLine
from shoal.transport.network.profiles import Way


def link(up=None, down=None, seed=0, **way):
    return Link(Way(**way), up, down, Draws(seed, "a", "b"))


def test_two_messages_at_8_mbit_s():
    one = link(mbit_s=8, delay_ms=30)
    assert one.carry_stream(10.0, 1000) == pytest.approx((10.001, 10.031, False))
    assert one.carry_stream(10.0, 2000) == pytest.approx((10.003, 10.033, False))
    assert one.carry_stream(10.5, 1000) == pytest.approx((10.501, 10.531, False))
    assert one.bytes_per_s == pytest.approx(1e6)


def test_no_limit_no_queue():
    one = link(delay_ms=5)
    for _ in range(3):
        assert one.carry_stream(1.0, 10**9) == pytest.approx((1.0, 1.005, False))
        assert list(one.carry_datagram(1.0, 1200)) == [pytest.approx((1.0, 1.005, False))]
    assert one.bytes_per_s == float("inf")


def test_queues_in_a_row_take_as_long_as_the_slowest():
    slow, fast = 8, 80
    for speeds in ((slow, fast, fast), (fast, slow, fast), (fast, fast, slow), (slow, slow, slow)):
        up, way, down = speeds
        one = link(UpLine(up, 200), DownLine(down, 200), mbit_s=way, delay_ms=10)
        assert one.carry_stream(0.0, 100_000).arrives_at_s == pytest.approx(0.11)
        assert one.carry_stream(0.0, 100_000).arrives_at_s == pytest.approx(0.21)
        assert one.bytes_per_s == pytest.approx(1e6)


def test_links_share_the_line_of_their_peer():
    up = UpLine(8, 200)
    one, other = link(up, delay_ms=1), link(up, delay_ms=1)
    assert one.carry_stream(0.0, 1000).arrives_at_s == pytest.approx(0.002)
    assert other.carry_stream(0.0, 1000).arrives_at_s == pytest.approx(0.003)


def test_a_stream_waits_at_its_sender_for_a_slow_line_down():
    one = link(down=DownLine(8, 200), delay_ms=10)
    left_s, arrives_s, _ = one.carry_stream(0.0, 100_000)
    assert (left_s, arrives_s) == pytest.approx((0.1, 0.11))


def test_what_comes_from_near_does_not_wait_for_what_is_still_on_its_way():
    down = DownLine(8, 200)
    far, near = link(down=down, delay_ms=100), link(down=down, delay_ms=10)
    assert far.carry_stream(0.0, 1000).arrives_at_s == pytest.approx(0.101)
    assert near.carry_stream(0.001, 1000).arrives_at_s == pytest.approx(0.012)
    # 95 ms of work from 0.012 on: interrupted by the millisecond of the one from far
    assert near.carry_stream(0.001, 95_000).arrives_at_s == pytest.approx(0.108)
    assert near.carry_stream(0.001, 1000).arrives_at_s == pytest.approx(0.109)
    # all of that is past: nothing to wait for
    assert near.carry_stream(1.0, 1000).arrives_at_s == pytest.approx(1.011)


def test_a_line_down_is_never_asked_for_more_than_it_carries():
    down, draws = DownLine(8, 1e6), Draws(0, "times")
    total_bytes, last_s = 0, 0.0
    for number in range(500):
        size_bytes = int(2000 * draws.uniform())
        first_s = number * 1e-4 + 0.1 * draws.uniform()
        through_s = down.take(number * 1e-4, first_s, first_s, size_bytes, is_datagram=False)
        assert through_s >= first_s + size_bytes * 1e-6 - 1e-9
        total_bytes, last_s = total_bytes + size_bytes, max(last_s, through_s)
    assert last_s >= total_bytes * 1e-6
    assert last_s <= 0.15 + total_bytes * 1e-6


def test_slow_links_into_one_line_down_take_as_long_as_it_needs():
    down = DownLine(100, 200)
    links = [link(down=down, mbit_s=20) for _ in range(8)]
    arrivals_s = [one.carry_stream(0.0, 1_000_000).arrives_at_s for one in links]
    assert min(arrivals_s) == pytest.approx(0.4)
    assert max(arrivals_s) == pytest.approx(0.64)  # 64 Mbit at 100 Mbit/s


def test_a_bulk_stream_delays_datagrams_and_drops_none():
    for one in (link(mbit_s=8, queue_ms=10), link(UpLine(8, 10)), link(down=DownLine(8, 10))):
        assert one.carry_datagram(0.0, 1000)
        assert one.carry_stream(0.0, 100_000).arrives_at_s == pytest.approx(0.101)
        taken = [one.carry_datagram(number / 10**3, 1000) for number in range(1, 20)]
        assert [passages[0].arrives_at_s for passages in taken] == pytest.approx(
            [0.101 + number / 10**3 for number in range(1, 20)]
        )
        # their own queue is as short as ever
        assert sum(bool(one.carry_datagram(0.02, 1000)) for _ in range(30)) == pytest.approx(11, abs=1)


def test_datagrams_are_dropped_where_a_queue_is_full():
    for one in (
        link(mbit_s=8, queue_ms=10.5),
        link(UpLine(8, 10.5)),
        link(down=DownLine(8, 10.5)),
    ):
        taken = [bool(one.carry_datagram(0.0, 1000)) for _ in range(30)]
        assert taken == [True] * 11 + [False] * 19
        assert one.carry_datagram(1.0, 1000)


def test_streams_wait_where_a_queue_is_full():
    one = link(mbit_s=8, queue_ms=10)
    assert one.carry_stream(0.0, 10**6).left_at_s == pytest.approx(1.0)
    assert one.carry_stream(0.0, 10**6).left_at_s == pytest.approx(2.0)


def test_loss_of_datagrams_goes_by_packets():
    one = link(loss=0.1)
    lost = [not one.carry_datagram(0.0, 1200) for _ in range(5000)]
    assert sum(lost) == pytest.approx(500, rel=0.15)
    lost = [not one.carry_datagram(0.0, 2800) for _ in range(5000)]
    assert sum(lost) == pytest.approx(5000 * (1 - 0.9**2), rel=0.15)


def test_streams_feel_loss_as_a_round_trip_more():
    one = link(loss=0.1, delay_ms=20)
    delays_s = [one.carry_stream(0.0, 100).arrives_at_s for _ in range(5000)]
    late = [delay_s for delay_s in delays_s if delay_s > 0.021]
    assert len(late) == pytest.approx(500, rel=0.15)
    assert min(late) == pytest.approx(0.06)
    assert sorted({round(delay_s, 6) for delay_s in late})[:2] == [0.06, 0.1]  # lost twice
    near = link(loss=0.5, delay_ms=0.1)
    assert max(near.carry_stream(0.0, 100).arrives_at_s for _ in range(50)) >= LEAST_RETRANSMISSION_S


def test_jitter_goes_both_ways_and_not_below_zero():
    one = link(delay_ms=10, jitter_ms=2)
    delays_s = [one.carry_stream(0.0, 1).arrives_at_s for _ in range(2000)]
    assert 0.008 <= min(delays_s) < 0.0081
    assert 0.0119 < max(delays_s) <= 0.012
    assert min(link(delay_ms=1, jitter_ms=5).carry_stream(0.0, 1).arrives_at_s for _ in range(100)) >= 0


@pytest.mark.parametrize("delay_ms", [Normal(40, 5), Exponential(40)])
def test_each_message_draws_its_own_delay(delay_ms):
    one = link(delay_ms=delay_ms)
    delays_s = [one.carry_stream(0.0, 1).arrives_at_s for _ in range(100)]
    assert len(set(delays_s)) == 100
    same = link(delay_ms=delay_ms)
    assert [same.carry_stream(0.0, 1).arrives_at_s for _ in range(100)] == delays_s
    assert link(delay_ms=delay_ms, seed=1).carry_stream(0.0, 1).arrives_at_s != delays_s[0]


def test_nothing_ever_changes():
    stop = link().when_changed(lambda: pytest.fail("it was called"))
    assert stop() is None
