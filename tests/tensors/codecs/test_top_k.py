"""The largest values and no others, the first of equals, whichever way they were found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import TensorError
from shoal.tensors import Encoded, EncodedMeta, TensorSpec, TopK, decode
from shoal.tensors.codecs.top_k import _above_sampled_bound, _largest


def reference(values, k):
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    return sorted(order[:k])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.data())
def test_selection_with_many_ties(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert _largest(torch.tensor(values, dtype=torch.float32).abs(), k).tolist() == reference(values, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 200, 2_000, 50_000])
def test_sampled_bound_gives_the_exact_selection(dtype, k):
    magnitudes = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    places = _largest(magnitudes, k)
    # bfloat16 has thousands of ties; a stable sort puts the first of them first.
    wanted = magnitudes.sort(descending=True, stable=True).indices[:k].sort().values
    assert torch.equal(places, wanted)


def test_a_misleading_sample_is_noticed():
    magnitudes = torch.ones(262_144)
    magnitudes[::4] = 2
    assert _above_sampled_bound(magnitudes, 100_000) is None
    magnitudes = torch.arange(262_144.0).flip(0)
    magnitudes[::4] = 1e9
    assert _largest(magnitudes, 65_600).tolist() == reference(magnitudes.tolist(), 65_600)


@pytest.mark.parametrize("where", [0, 1, 131_071])
def test_one_nan_among_many_is_seen(where):
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    tensor[where] = float("nan")
    assert TopK(0.001).encode(tensor).meta.codec == "none"


@pytest.mark.parametrize(("fraction", "count", "k"), [(0.01, 1000, 10), (0.0001, 1000, 1), (0.25, 10, 2)])
def test_number_of_values(fraction, count, k):
    encoded = TopK(fraction).encode(torch.arange(1.0, count + 1))
    assert encoded.meta.options == (k,)
    result = decode(encoded)
    assert result.count_nonzero() == k
    assert result[-k:].tolist() == list(range(count - k + 1, count + 1))


def test_positions_are_wide_only_where_they_must_be():
    assert TopK.parts(TensorSpec("float32", (2**31,)), (1,))[0].dtype == "int32"
    assert TopK.parts(TensorSpec("float32", (2**31 + 1,)), (1,))[0].dtype == "int64"


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [-1, 1], [0, 10], [0, 2**31 - 1]])
def test_bad_positions_are_refused(positions):
    buffers = [torch.tensor(positions, dtype=torch.int32).numpy(), torch.ones(2).numpy()]
    with pytest.raises(TensorError, match="positions"):
        decode(Encoded(EncodedMeta("top-k", TensorSpec("float32", (10,)), (2,)), buffers))
