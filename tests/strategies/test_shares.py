import itertools

import pytest
import torch

from shoal.strategies.shares import ALONE_BYTES, CHUNK_BYTES, plan_chunks

BIG = ALONE_BYTES // 4


def sizes(*num_elements, dtype=torch.float32):
    return [torch.empty(count, dtype=dtype) for count in num_elements]


def indices(chunks):
    return sorted(itertools.chain.from_iterable(chunk.layout.indices for chunk in chunks))


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_parameter_is_in_one_chunk_and_servers_hold_equally_much(num_servers):
    parameters = sizes(*[7, 3 * BIG, 100, BIG, 2 * BIG, 5, BIG, BIG + 1, 30_000] * 3)
    chunks = plan_chunks(parameters, num_servers)
    assert indices(chunks) == list(range(27))
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    loads = [0] * num_servers
    for chunk in chunks:
        loads[chunk.server] += sum(parameters[index].numel() for index in chunk.layout.indices)
    assert max(loads) - min(loads) <= 3 * BIG
    assert chunks == plan_chunks(parameters, num_servers)


def test_large_ones_are_alone_and_small_ones_together():
    chunks = plan_chunks(sizes(10, BIG, 20, 30), 1)
    assert [chunk.layout.indices for chunk in chunks] == [(1,), (0, 2, 3)]
    assert [chunk.is_alone for chunk in chunks] == [True, False]
    assert chunks[0].num_elements == BIG
    small = plan_chunks(sizes(*[1000] * 5000), 1)
    assert all(chunk.num_elements * 4 <= CHUNK_BYTES for chunk in small)


@pytest.mark.parametrize("max_chunks", [3, 16, 64])
def test_there_are_never_more_chunks_than_names(max_chunks):
    for parameters in (sizes(*[BIG] * 300), sizes(*[BIG - 1] * 300), sizes(*[BIG, 50 * BIG] * 20, 1)):
        assert len(plan_chunks(parameters, 1, max_chunks)) <= max_chunks


def test_a_server_without_parameters_has_a_chunk_of_nothing():
    chunks = plan_chunks(sizes(3), 3)
    assert [chunk.server for chunk in chunks] == [0, 1, 2]
    assert [len(chunk.layout.slots) for chunk in chunks] == [1, 0, 0]
    assert chunks[1].views(torch.zeros(chunks[1].num_elements)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_views_are_the_parameters_in_the_chunks_memory(dtype):
    parameters = [torch.randn(3, 5).to(dtype), torch.randn(2, 4, 3, 3).to(dtype)]
    parameters[1] = parameters[1].to(memory_format=torch.channels_last)
    (chunk,) = plan_chunks(parameters, 1)
    flat = torch.zeros(chunk.num_elements, dtype=chunk.dtype)
    assert not flat.is_complex()
    for view, tensor, parameter in zip(chunk.views(flat), chunk.tensors(flat), parameters, strict=True):
        view.copy_(parameter)
        assert torch.equal(tensor, parameter)
        assert tensor.stride() == view.stride() == parameter.stride()
        assert tensor.untyped_storage().nbytes() == parameter.untyped_storage().nbytes()
