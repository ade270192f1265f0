"""Seconds and rows; that bytes are those of the formula is in `contracts/test_group.py`."""

import pytest
import torch

from group.pretender import Pending, Pretender, ones
from shoal.core import DeadlineExceeded, ManualClock, PeerLost
from shoal.group.wrappers import Metered, Traffic
from shoal.topology import Weights


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def group(clock):
    return Metered(Pretender(), clock)


def test_seconds_from_call_to_end_and_those_spent_waiting(group, clock):
    pending = group.inner.pending = Pending()
    handle = group.all_reduce(ones())
    clock.advance(2)
    assert not handle.is_done()
    with pytest.raises(DeadlineExceeded):
        handle.wait()
    assert group.totals()["all_reduce"].lasted_s == 0
    clock.advance(3)
    pending.is_over = True
    assert handle.is_done()
    clock.advance(10)  # its end was noticed before
    handle.wait()
    assert group.totals() == {"all_reduce": Traffic(1, 5333, 5333, blocked_s=0, lasted_s=5)}


def test_an_operation_that_fails_has_lasted_too(group, clock):
    pending = group.inner.pending = Pending()
    handle = group.barrier()
    clock.advance(1)
    pending.is_over, pending.error = True, PeerLost("rank 2 is lost.", peer=2)
    with pytest.raises(PeerLost):
        handle.wait()
    assert group.totals()["barrier"].lasted_s == 1


def test_sizes_that_only_the_result_tells_count_once(group):
    handle = group.all_gather(ones(10))
    assert group.totals()["all_gather"].received_bytes == 0
    for _ in range(2):
        handle.wait()
    assert group.totals()["all_gather"].received_bytes == 80
    window = group.window("x", 10, sources=())
    window.publish(ones(10), 1)
    window.fetch(0).wait()  # one's own crosses no link
    window.fetch(1).wait()
    assert group.totals()["fetch"].received_bytes == 40


def test_peers_that_are_gone_do_not_count(group):
    group.inner.size = 2
    group.exchange(ones(10), Weights.uniform([1, 2])).wait()
    assert group.totals()["exchange"].sent_bytes == 40


def test_rows_and_reset(group):
    group.broadcast(ones(10)).wait()
    assert group.rows() == [
        {
            "op": "broadcast",
            "num_calls": 1,
            "sent_bytes": 80,
            "received_bytes": 0,
            "blocked_s": 0.0,
            "lasted_s": 0.0,
        }
    ]
    group.reset()
    assert group.rows() == []
    group.all_reduce(torch.ones(3)).wait()
    assert list(group.totals()) == ["all_reduce"]
