import itertools

import pytest
import torch

from shoal.core import UsageError
from shoal.group.kernels import (
    add_differences,
    check_reduction,
    mix_into,
    reduce_into,
    reduce_to_all,
    share_bounds,
)


@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 17, 1000, 1_000_003])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 5])
def test_shares_cover_everything_once_and_start_on_cache_lines(num_elements, num_shares):
    bounds = [share_bounds(index, num_shares, num_elements, 4) for index in range(num_shares)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(bounds))
    assert all(low % 16 == 0 or low == num_elements for low, _ in bounds)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_reductions_are_those_of_torch(op, dtype, count):
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(70_001, generator=generator).to(dtype) for _ in range(count)]
    stacked = torch.stack(parts).to(torch.float64)
    expected = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[op].to(dtype)
    out = torch.empty_like(parts[0])
    reduce_into(out, parts, op)
    torch.testing.assert_close(out, expected)
    reduce_to_all(parts, 16, 70_001, op)
    for part in parts:
        assert torch.equal(part[16:], out[16:])


def test_a_mean_of_infinity_is_infinite_and_not_nan():
    parts = [torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, 3.0])]
    reduce_to_all(parts, 0, 2, "mean")
    assert parts[1].tolist() == [float("inf"), 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_sources", [0, 1, 2, 4])
def test_weighted_averages(dtype, num_sources):
    own = torch.randn(300_000).to(dtype)
    sources = [(torch.randn(300_000).to(dtype), 0.1 * (index + 1)) for index in range(num_sources)]
    weight = 1 - sum(weight for _, weight in sources)
    expected = own.double() * weight + sum(source.double() * weight for source, weight in sources)
    out = torch.empty_like(own)
    mix_into(out, own, weight, sources)
    torch.testing.assert_close(
        out, expected.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
    )
    mix_into(own, own, weight, sources)
    assert torch.equal(own, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_sum_to_zero_are_those_of_differences(dtype):
    """Opposite on both ends, to the bit, and nothing between equals."""
    one, other = (10 + torch.randn(300_000)).to(dtype), (10 + torch.randn(300_000)).to(dtype)
    there, back = torch.empty_like(one), torch.empty_like(one)
    mix_into(there, one, -0.3, [(other, 0.1), (one, 0.2)])
    mix_into(back, other, -0.1, [(one, 0.1)])
    assert there.any()
    assert torch.equal(there, -back)
    moved = one.clone()
    add_differences(moved, moved, [(one, 0.3), (one, 0.5)])
    assert torch.equal(moved, one)
    mix_into(moved, moved, -0.1, [(other, 0.1)])
    assert torch.equal(moved, there)


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(UsageError, match="mean of"):
        check_reduction(torch.zeros(1, dtype=torch.int64), "mean")
    with pytest.raises(UsageError, match="no reduction 'product'"):
        check_reduction(torch.zeros(1), "product")
