import asyncio
import statistics

import pytest

from shoal.bench.latency_flow import Load, Pings, latencies, rates
from shoal.core import PeerLost
from shoal.core.virtual import run_virtual


class Pusher:
    """Takes so long for each batch in turn, and then always as long as for the last."""

    def __init__(self, *seconds, fails_at=None):
        self._seconds = list(seconds)
        self._fails_at = fails_at
        self.num_pushed = 0

    async def push(self):
        if self.num_pushed == self._fails_at:
            raise PeerLost("it is gone.")
        await asyncio.sleep(self._seconds[min(self.num_pushed, len(self._seconds) - 1)])
        self.num_pushed += 1


def test_the_first_batch_does_not_count_as_latency():
    assert run_virtual(latencies(Pusher(100.0, 1.0, 2.0, 3.0), 3)) == pytest.approx([1.0, 2.0, 3.0])


def test_throughput_leaves_the_first_batches_out_and_runs_follow_each_other():
    clients = [Pusher(50.0, 1.0) for _ in range(4)]
    found = run_virtual(rates(clients, Load(batch_size=8, num_batches=5, num_runs=3)))
    assert found == pytest.approx([8 * 4.0] * 3)


def test_nobody_waits_for_the_slowest_client():
    clients = [Pusher(1.0), Pusher(1e6)]
    found = run_virtual(rates(clients, Load(batch_size=1, num_batches=5, num_runs=2)), limit_s=100.0)
    assert found == pytest.approx([1.0, 1.0])


def test_a_failure_is_raised_and_ends_the_others():
    clients = [Pusher(1.0), Pusher(1.0, fails_at=2)]
    with pytest.raises(PeerLost):
        run_virtual(rates(clients, Load(batch_size=1, num_batches=5, num_runs=2)), limit_s=100.0)


def test_pings_are_exponential_and_each_clients_own():
    one, other = Pings(0.1, 7, "client 1"), Pings(0.1, 7, "client 2")
    drawn = [one.draw_s() for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(drawn) == pytest.approx(0.1, rel=0.1)
    assert drawn[:3] != [other.draw_s() for _ in range(3)]
    again = Pings(0.1, 7, "client 1")
    assert drawn[:3] == [again.draw_s() for _ in range(3)]
    assert Pings(0.0, 7, "client 1").draw_s() == 0.0
