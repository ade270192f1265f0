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


def bits_of_positions(size, num_kept):
    """Low bits of each as they are, the rest as gaps in unary; with the best division between them."""
    return min(num_kept * low + num_kept + (size - 1 >> low) for low in range(13))


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
    sizes, num_bits = [], 0
    for chunk, result in zip(tensor.split(CHUNK), decode(encoded).split(CHUNK), strict=True):
        sizes.append(-(-num_kept * len(chunk) // CHUNK))
        num_bits += 2 * sizes[-1] + bits_of_positions(len(chunk), sizes[-1])
        places = chunk.abs().topk(sizes[-1]).indices.sort().values
        assert torch.equal(result.nonzero().view(-1), places)
        assert torch.equal(result[places].sign(), chunk[places].sign())
        assert len(result[places].abs().unique()) <= 2
    assert encoded.buffer_bytes == -(-num_bits // 8) + 4 * len(sizes)


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


def encoded_by_hand(*chunks):
    """Three values of a whole chunk, and one of a last one of 100: each one's gaps, low bits and codes."""
    bits = "".join(chunks).replace(" ", "")
    packed = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    levels = torch.tensor([[1.0, 2.0]] * 2, dtype=torch.bfloat16)
    meta = EncodedMeta("sparse-2bit", TensorSpec("float32", (CHUNK + 100,)), (3,))
    return Encoded(meta, [bytes(levels.view(torch.uint8).numpy()) + packed])


def whole(*positions, gaps=None):
    """A chunk of 4096 with three values: 10 low bits each, and their gaps in 3 + 3 bits."""
    low_bits, high_bits = 10, 3 + 3
    ones = {(position >> low_bits) + place for place, position in enumerate(positions)}
    gaps = gaps or "".join("1" if place in ones else "0" for place in range(high_bits))
    lows = "".join(f"{position % 2**low_bits:0{low_bits}b}"[::-1] for position in positions)
    return gaps + lows + "00 10 01"


def last(position):
    """A chunk of 100 with one value: 6 low bits, and its gap in 1 + 1."""
    return "10 01"[3 * (position >> 6) :][:2] + f"{position % 64:06b}"[::-1] + "11"


def test_the_format():
    result = decode(encoded_by_hand(whole(0, 1, 4095), last(99)))
    assert result[[0, 1, 4095, CHUNK + 99]].tolist() == [1.0, 2.0, -1.0, -2.0]
    assert result.count_nonzero() == 4


@pytest.mark.parametrize(
    "chunks",
    [
        (whole(1, 1, 2), last(5)),
        (whole(2, 1, 3), last(5)),
        (whole(0, 1, 2), last(100)),
        (whole(0, 1, 2), last(127)),
        (whole(0, 1, 2, gaps="000011"), last(5)),
        (whole(0, 1, 2, gaps="111100"), last(5)),
    ],
)
def test_bad_positions_are_refused(chunks):
    with pytest.raises(TensorError, match="positions"):
        decode(encoded_by_hand(*chunks))


@pytest.mark.parametrize("options", [(), (0,), (-1,), (CHUNK + 1,), (2**64,), (1, 1)])
def test_bad_options_are_refused(options):
    with pytest.raises(TensorError, match="one option"):
        decode(Encoded(EncodedMeta("sparse-2bit", TensorSpec("float32", (100,)), options), [b""]))


def test_a_short_message_cannot_stand_for_a_large_tensor():
    """Each chunk has bytes of its own."""
    meta = EncodedMeta("sparse-2bit", TensorSpec("float32", (2**28,)), (1,))
    with pytest.raises(TensorError):
        decode(Encoded(meta, [b"\0" * 80]))
