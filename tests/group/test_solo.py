"""What is special about the group of one; `contracts/test_group.py` has the rest."""

import pytest
import torch

from shoal.core import TensorError, UsageError
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
    assert list(group.waited_s) == [0.0]
    with pytest.raises(UsageError, match="rank 1"):
        group.machine_of(1)


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
        group.pair_gossip(tensor, 1)


def test_the_newest_version_cannot_be_reclaimed(group):
    group.publish("model", torch.zeros(1), 3)
    with pytest.raises(UsageError, match="newest"):
        group.reclaim("model", 3)
    assert group.fetch("model", 0).wait().is_intact()


def test_after_leaving_nothing_is_possible(group):
    group.leave()
    group.leave()
    assert list(group.members) == []
    for operation in (lambda: group.all_reduce(torch.ones(1)), group.barrier, lambda: group.empty(3)):
        with pytest.raises(UsageError, match="left"):
            operation()
