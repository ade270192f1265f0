"""Encoded tensors as one piece of bytes, and their means."""

import pytest
import torch

from shoal.core import UsageError
from shoal.strategies.averaging import make_codec, start_coded_mean
from shoal.tensors.codecs import ErrorFeedback, Int8, Plain, TopK, decode
from shoal.tensors.codecs.formats import from_bytes, to_bytes


@pytest.mark.parametrize("codec", [Plain(), Int8(64), TopK(0.1)])
@pytest.mark.parametrize("count", [1, 1000])
def test_bytes_and_back(codec, count):
    encoded = codec.encode(torch.randn(count, generator=torch.Generator().manual_seed(0)))
    got = from_bytes(to_bytes(encoded))
    assert got.meta == encoded.meta
    assert torch.equal(decode(got), decode(encoded))


def test_names():
    assert make_codec("none", 0) is None
    assert isinstance(make_codec("int8", 0), ErrorFeedback)
    assert isinstance(make_codec("int8", 0, has_feedback=False), Int8)
    with pytest.raises(UsageError, match="unknown codec"):
        make_codec("int9", 0)


def means(group, _):
    """Equal on all; an inf goes through as it is."""
    codec = make_codec("int8", 0)
    tensor = torch.linspace(-1, 1, 5000) * (1 + group.rank)
    handle = start_coded_mean(group, tensor, codec, "a")
    assert handle.wait() is tensor
    assert handle.is_done()
    parts = group.all_gather(tensor).wait()
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert (tensor - torch.linspace(-1, 1, 5000) * (group.size + 1) / 2).abs().max() < 0.02
    tensor = torch.full((5000,), torch.inf if group.rank == 0 else 1.0)
    assert start_coded_mean(group, tensor, codec, "b").wait().isinf().all()


def test_means(workers):
    workers.run(means, 3)
