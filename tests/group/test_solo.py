"""What is special about the group of one; `contracts/test_group.py` has the rest."""

import pytest
import torch

from shoal.core import DeadlineExceeded, TensorError, UsageError
from shoal.group import GroupStats, Mutex, pair_gossip
from shoal.group.solo import SoloGroup
from shoal.topology import Weights


@pytest.fixture
def group():
    with SoloGroup() as group:
        yield group


def test_it_is_alone(group):
    assert (group.rank, group.size, group.machine, group.num_machines) == (0, 1, 0, 1)
    assert list(group.members) == [0]
    assert group.lost == {}
    assert group.stats == GroupStats(0, 0, (0.0,), (0,), (0,))
    assert list(group.machines) == [0]


def test_operations_are_over_at_once_and_change_no_bit(group):
    tensor = torch.randn(101)
    before = tensor.clone()
    for handle in (group.all_reduce(tensor), group.broadcast(tensor), group.exchange(tensor, Weights(1.0))):
        assert handle.is_done()
        assert handle.wait() is tensor
    assert torch.equal(tensor, before)
    (copy,) = group.all_gather(tensor).wait()
    copy.zero_()
    assert torch.equal(tensor, before)


def test_an_exchange_is_own_times_x(group):
    tensor, out = torch.full((3,), 8.0), torch.zeros(3)
    assert group.exchange(tensor, Weights(0.25), out=out).wait() is out
    assert out.tolist() == [2.0] * 3
    assert tensor.tolist() == [8.0] * 3
    parameter = torch.nn.Parameter(tensor)
    group.exchange(parameter, Weights(0.5)).wait()
    assert parameter.tolist() == [4.0] * 3
    with pytest.raises(TensorError, match="fit"):
        group.exchange(tensor, Weights(1.0), out=torch.zeros(4))
    with pytest.raises(UsageError, match="rank 1"):
        pair_gossip(group, tensor, 1)


def test_the_newest_version_cannot_be_reclaimed(group):
    window = group.window("model", 1, sources=())
    window.publish(torch.zeros(1), 3)
    with pytest.raises(UsageError, match="newest"):
        window.reclaim(3)
    assert window.fetch(0).wait().is_intact()


def test_a_window_publishes_what_fits_until_it_is_closed(group):
    window = group.window("model", 2, sources=())
    for tensor in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(TensorError, match="fit"):
            window.publish(tensor, 0)
    window.publish(torch.ones(2), 0)
    window.close()
    again = group.window("model", 2, sources=())
    assert again.fetch(0).wait() is None
    with pytest.raises(UsageError, match="closed"):
        window.fetch(0)


def test_who_waits_for_itself_is_told(group):
    window, into = group.window("model", 2, sources=[0]), torch.zeros(2)
    sent, read = (
        [window.send(0, torch.full((2,), 1.0 + turn)) for turn in range(2)],
        window.read(0, into, version=1),
    )
    assert sent[0].is_done()
    for handle in (sent[1], read):
        with pytest.raises(DeadlineExceeded, match="nobody else"):
            handle.wait()
    with window.slot(0) as slot:
        assert slot.tensor.tolist() == [1.0, 1.0]
        slot.clear()
    sent[1].wait()
    window.publish(torch.full((2,), 5.0), 0)
    with window.changing(1):
        assert not read.is_done()
    assert read.wait() == 1
    assert into.tolist() == [5.0, 5.0]


def test_a_mutex_that_one_holds_cannot_be_waited_for(group):
    mutex = Mutex(group, "m")
    for _ in range(2):
        with mutex, pytest.raises(UsageError, match="holds itself"), mutex:
            pass
    mutex.close()


def test_after_leaving_nothing_is_possible(group):
    group.leave()
    group.leave()
    assert list(group.members) == []
    for operation in (lambda: group.all_reduce(torch.ones(1)), group.barrier, lambda: group.empty(3)):
        with pytest.raises(UsageError, match="left"):
            operation()
