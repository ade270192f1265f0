"""The largest values of each chunk, as the two magnitudes that lose least."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import TensorError
from shoal.tensors import Encoded, EncodedMeta, SparseTwoBit, TensorSpec, decode

CHUNK = 4096


def example(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 5, 50, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 700])
@pytest.mark.parametrize("density", [0.0001, 0.02, 0.3, 1.0])
def test_of_each_chunk_the_largest_are_sent_with_their_signs(count, density):
    tensor = example(count)
    encoded = SparseTwoBit(density).encode(tensor)
    if encoded.meta.codec == "none":
        assert count == 1
        return
    (num_kept,) = encoded.meta.options
    assert num_kept == max(1, round(density * CHUNK))
    sizes = []
    for chunk, result in zip(tensor.split(CHUNK), decode(encoded).split(CHUNK), strict=True):
        sizes.append(-(-num_kept * len(chunk) // CHUNK))
        places = chunk.abs().topk(sizes[-1]).indices.sort().values
        assert torch.equal(result.nonzero().view(-1), places)
        assert torch.equal(result[places].sign(), chunk[places].sign())
        assert len(result[places].abs().unique()) <= 2
    total = sum(sizes)
    assert encoded.buffer_bytes == -(-3 * total // 2) + -(-total // 4) + 4 * len(sizes)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(-100, 100), min_size=8, max_size=12))
def test_no_other_two_magnitudes_lose_less(values):
    """All values are sent; the least error is that of the best division of the sorted magnitudes."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = (decode(SparseTwoBit(1.0).encode(tensor)) - tensor).square().sum().item()
    ordered = tensor.abs().sort().values
    divisions = [(ordered[:cut], ordered[cut:]) for cut in range(1, len(values))]
    least = min(
        sum((part - part.mean()).square().sum().item() for part in division) for division in divisions
    )
    # magnitudes are rounded to bfloat16
    assert error <= least * (1 + 1e-9) + len(values) * (100 * 2**-8) ** 2 / 4


@pytest.mark.parametrize("scale", [1e-36, 1e-12, 1e12, 1e30])
def test_sizes_that_have_no_squares_are_as_exact_as_others(scale):
    tensor = torch.tensor([1.0, -3.0] * 32) * scale
    torch.testing.assert_close(decode(SparseTwoBit(1.0).encode(tensor)), tensor, rtol=2**-8, atol=0)


def test_two_magnitudes_that_fit_come_back_exactly():
    tensor = torch.zeros(2 * CHUNK)
    tensor[[7, 8, 4000, CHUNK, CHUNK + 1, 2 * CHUNK - 1]] = torch.tensor([0.5, -0.25, -0.5, 3.0, -3.0, 8.0])
    assert torch.equal(decode(SparseTwoBit(3 / CHUNK).encode(tensor)), tensor)


def pack(*positions):
    """Positions as one number, the first in its lowest bits."""
    number = sum(position << 12 * place for place, position in enumerate(positions))
    return number.to_bytes(-(-3 * len(positions) // 2), "little")


def encoded_by_hand(count, num_kept, positions, codes):
    codes = bytes(sum(code << 2 * place for place, code in enumerate(four)) for four in codes)
    num_chunks = -(-count // CHUNK)
    levels = torch.tensor([[1.0, 2.0]] * num_chunks, dtype=torch.bfloat16)
    meta = EncodedMeta("sparse-2bit", TensorSpec("float32", (count,)), (num_kept,))
    return Encoded(meta, [bytes(levels.view(torch.uint8).numpy()) + pack(*positions) + codes])


def test_the_format():
    result = decode(encoded_by_hand(CHUNK + 100, 3, [0, 1, 4095, 99], [[0, 1, 2, 3]]))
    assert result[[0, 1, 4095, CHUNK + 99]].tolist() == [1.0, 2.0, -1.0, -2.0]
    assert result.count_nonzero() == 4


@pytest.mark.parametrize("positions", [[1, 1, 2, 5], [2, 1, 3, 5], [0, 1, 2, 100], [0, 1, 2, 4095]])
def test_bad_positions_are_refused(positions):
    with pytest.raises(TensorError, match="positions"):
        decode(encoded_by_hand(CHUNK + 100, 3, positions, [[0, 1, 2, 3]]))


@pytest.mark.parametrize("options", [(), (0,), (-1,), (CHUNK + 1,), (2**64,), (1, 1)])
def test_bad_options_are_refused(options):
    with pytest.raises(TensorError, match="one option"):
        decode(Encoded(EncodedMeta("sparse-2bit", TensorSpec("float32", (100,)), options), [b""]))


def test_a_short_message_cannot_stand_for_a_large_tensor():
    """Each chunk has bytes of its own."""
    meta = EncodedMeta("sparse-2bit", TensorSpec("float32", (2**28,)), (1,))
    with pytest.raises(TensorError):
        decode(Encoded(meta, [b"\0" * 80]))
