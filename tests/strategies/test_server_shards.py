import itertools

import pytest
import torch

from shoal.strategies.parameter_server.channel import LARGE_BYTES, SHARD_BYTES, plan_shards
from shoal.tensors.flat import views_over

BIG = LARGE_BYTES // 4


def sizes(*num_elements, dtype=torch.float32):
    return [torch.empty(count, dtype=dtype) for count in num_elements]


def indices(shards):
    return sorted(itertools.chain.from_iterable(shard.layout.indices for shard in shards))


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_parameter_is_in_one_shard_and_servers_hold_equally_much(num_servers):
    parameters = sizes(*[7, 3 * BIG, 100, BIG, 2 * BIG, 5, BIG, BIG + 1, 30_000] * 3)
    shards = plan_shards(parameters, num_servers)
    assert indices(shards) == list(range(27))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    loads = [0] * num_servers
    for shard in shards:
        loads[shard.server] += sum(parameters[index].numel() for index in shard.layout.indices)
    assert max(loads) - min(loads) <= 3 * BIG
    assert shards == plan_shards(parameters, num_servers)


def test_large_ones_are_alone_and_small_ones_together():
    shards = plan_shards(sizes(10, BIG, 20, 30), 1)
    assert [shard.layout.indices for shard in shards] == [(1,), (0, 2, 3)]
    assert shards[0].num_elements == BIG
    small = plan_shards(sizes(*[1000] * 5000), 1)
    assert all(shard.num_elements * 4 <= SHARD_BYTES for shard in small)


@pytest.mark.parametrize("max_shards", [3, 16, 64])
def test_there_are_never_more_shards_than_names(max_shards):
    for parameters in (sizes(*[BIG] * 300), sizes(*[BIG - 1] * 300), sizes(*[BIG, 50 * BIG] * 20, 1)):
        assert len(plan_shards(parameters, 1, max_shards)) <= max_shards


def test_a_server_without_parameters_has_a_shard_of_nothing():
    shards = plan_shards(sizes(3), 3)
    assert [shard.server for shard in shards] == [0, 1, 2]
    assert [len(shard.layout.slots) for shard in shards] == [1, 0, 0]
    assert views_over(shards[1].layout, torch.zeros(shards[1].num_elements)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_views_are_the_parameters_in_the_shards_memory(dtype):
    parameters = [torch.randn(3, 5).to(dtype), torch.randn(2, 4, 3, 3).to(dtype)]
    parameters[1] = parameters[1].to(memory_format=torch.channels_last)
    (shard,) = plan_shards(parameters, 1)
    flat = torch.zeros(shard.num_elements, dtype=shard.dtype)
    assert not flat.is_complex()
    moved = shard.move([torch.nn.Parameter(each) for each in parameters], flat)
    for view, (_, tensor), parameter in zip(views_over(shard.layout, flat), moved, parameters, strict=True):
        assert torch.equal(view, parameter)
        assert torch.equal(tensor, parameter)
        assert tensor.stride() == view.stride() == parameter.stride()
        assert tensor.untyped_storage().nbytes() == parameter.untyped_storage().nbytes()
