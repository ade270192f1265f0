"""Two thin factors: exact where the rank suffices, better from round to round where it does not."""

import pytest
import torch

from shoal.core.errors import UsageError
from shoal.tensors import LowRank, decode


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("true_rank", [0, 1, 2, 4])
def test_matrices_of_low_rank_are_sent_whole(dtype, true_rank):
    matrix = (gaussian(50, true_rank) @ gaussian(true_rank, 40, seed=1)).to(dtype)
    codec = LowRank(4)
    # the first start is drawn, and its image may be badly conditioned: that multiplies what is rounded
    for most in (1e-3, 5e-5, 5e-5):
        assert torch.allclose(decode(codec.encode(matrix)), matrix, atol=most, rtol=0)


def test_warm_start_approaches_the_best_approximation():
    matrix = gaussian(60, 40) * torch.linspace(1, 10, 40)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = (matrix - u[:, :4] @ torch.diag(s[:4]) @ v[:4]).norm().item()
    codec = LowRank(4)
    errors = [(matrix - decode(codec.encode(matrix, "w"))).norm().item() for _ in range(60)]
    assert errors[-1] < errors[0]
    assert errors[-1] < best * 1.01
    assert decode(LowRank(4).encode(matrix)).sub(matrix).norm().item() == errors[0]


def test_slots_and_shapes_do_not_mix():
    codec = LowRank(2)
    first, second = gaussian(30, 20), gaussian(30, 20, seed=1)
    codec.encode(first, "a")
    assert torch.equal(decode(codec.encode(second, "b")), decode(LowRank(2).encode(second)))
    assert decode(codec.encode(gaussian(10, 50), "a")).shape == (10, 50)


def test_dead_columns_come_back_to_life():
    codec = LowRank(2)
    codec.encode(torch.zeros(30, 20), "w")
    matrix = gaussian(30, 20)
    assert torch.equal(decode(codec.encode(matrix, "w")), decode(LowRank(2).encode(matrix)))


def test_state_goes_on_where_it_was():
    matrix = gaussian(30, 20)
    first, second = LowRank(2), LowRank(2)
    first.encode(matrix, "w")
    state = first.state_dict()
    assert list(state) == ["warm/w"]
    second.load_state_dict(state)
    assert torch.equal(decode(first.encode(matrix, "w")), decode(second.encode(matrix, "w")))
    with pytest.raises(UsageError):
        first.load_state_dict({"residual/w": matrix})


@pytest.mark.parametrize("shape", [(), (100,), (1, 100), (100, 1, 1), (5, 4)])
def test_what_has_no_smaller_factors_is_sent_plain(shape):
    assert LowRank(4).encode(gaussian(*shape)).meta.codec == "none"


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (gaussian(64, 64, 3, 3), 64),
        (gaussian(1, 50, 60), 50),
        (gaussian(4, 30, 100), 120),
        (gaussian(64, 32, 3, 3).to(memory_format=torch.channels_last), 64 * 3),
        (gaussian(90, 70).T, 90),
    ],
)
def test_tensors_are_cut_near_the_square(tensor, rows):
    assert LowRank(2).encode(tensor).meta.options == (rows, 2)


def test_values_that_overflow_the_factors_are_sent_plain():
    tensor = torch.full((40, 30), 3e38)
    encoded = LowRank(2).encode(tensor)
    assert encoded.meta.codec == "none"
    assert LowRank(2).encode(torch.full((40, 30), 60000.0, dtype=torch.float16)).meta.codec == "none"


def test_rank_is_positive():
    with pytest.raises(UsageError):
        LowRank(0)
