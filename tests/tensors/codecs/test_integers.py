"""Eight or four bits a value: how far off, how biased, and what happens at the edges of float32."""

import pytest
import torch

from shoal.core.errors import UsageError
from shoal.tensors import Int4, Int8, decode

both = pytest.mark.parametrize("kind", [Int8, Int4])


def example(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@both
@pytest.mark.parametrize("block_size", [1 << 20, 4096, 100, 64, None])
@pytest.mark.parametrize("count", [200_000, 4096, 101, 99])
def test_error_is_at_most_half_a_step(kind, block_size, count):
    values = example(count)
    values[: count // 2] *= 1000
    error = (decode(kind(block_size).encode(values)) - values).abs()
    width = block_size or count
    for start in range(0, count, width):
        block = slice(start, start + width)
        step = values[block].abs().max() / kind.num_steps
        assert error[block].max() <= step * 0.5001


def test_largest_magnitudes_are_exact_to_rounding():
    values = example(4096 * 3 + 5)
    result = decode(Int8().encode(values))
    for start in range(0, len(values), 4096):
        block = values[start : start + 4096]
        where = block.abs().argmax() + start
        assert torch.isclose(result[where], values[where], rtol=1e-6)


@both
def test_stochastic_rounding_is_right_on_average(kind):
    values = example(512)
    codec = kind(generator=torch.Generator().manual_seed(3))
    mean = torch.stack([decode(codec.encode(values)) for _ in range(600)]).mean(0)
    step = values.abs().max() / kind.num_steps
    # The error of one rounding has a deviation of at most half a step.
    assert (mean - values).abs().max() < step * 0.5 / 600**0.5 * 5


@both
def test_stochastic_rounding_never_wraps_around(kind):
    values = torch.full((100_000,), 3.3)
    codec = kind(generator=torch.Generator().manual_seed(0))
    assert torch.allclose(decode(codec.encode(values)), values)
    assert torch.allclose(decode(codec.encode(-values)), -values)


@both
def test_generator_state_is_kept(kind):
    values = example(512)
    first, second = (kind(generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    first.encode(values)
    second.load_state_dict(first.state_dict())
    assert torch.equal(decode(first.encode(values)), decode(second.encode(values)))
    with pytest.raises(UsageError):
        kind().load_state_dict(first.state_dict())


@both
def test_blocks_of_tiny_values_are_zeros_not_nan(kind):
    values = torch.full((32,), 1e-40)
    values[16:] = 1.0
    result = decode(kind(16).encode(values))
    assert result.tolist() == [0.0] * 16 + [1.0] * 16


@both
def test_float64_beyond_float32_is_sent_plain(kind):
    values = torch.tensor([1e300, 1.0] * 8, dtype=torch.float64)
    encoded = kind().encode(values)
    assert encoded.meta.codec == "none"
    assert torch.equal(decode(encoded), values)


@both
def test_block_size_is_positive(kind):
    with pytest.raises(UsageError):
        kind(0)


def test_four_bits_take_half_a_byte_and_a_scale_for_each_block():
    for count in (1, 2, 255, 256, 257):
        values = example(count)
        encoded = Int4(128).encode(values)
        if encoded.meta.codec == "int4":
            assert encoded.buffer_bytes == -(-count // 2) + 4 * -(-count // 128)
        assert decode(encoded).shape == values.shape


def test_all_that_four_bits_can_say_arrives():
    values = torch.arange(-7.0, 8.0).repeat(3)  # an odd number
    assert torch.equal(decode(Int4().encode(values)), values)
