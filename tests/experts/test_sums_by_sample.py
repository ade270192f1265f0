import pytest
import torch

from experts.fake_client import peer_at
from shoal.experts.client.batch import ExpertPart, is_finite, sum_by_sample
from shoal.experts.names import ExpertAddress, ExpertUid


def test_sums_of_several_dimensions_and_of_none():
    expert = ExpertAddress(ExpertUid("ffn", (1,)), (peer_at(1),), 0.0)
    first = ExpertPart(expert, torch.tensor([0, 2]), torch.tensor([0, 5]))
    second = ExpertPart(expert, torch.tensor([2]), torch.tensor([4]))
    ones, twos = torch.ones(2, 3, 4), 2 * torch.ones(1, 3, 4)
    total = sum_by_sample([first, second], [ones, twos], (3, 2))
    assert total[:, 0, 0].tolist() == [1, 0, 3]
    assert total.shape == (3, 3, 4)
    total = sum_by_sample([first, second], [ones[:, 0, 0], twos[:, 0, 0]], (3, 2))
    assert total.tolist() == [1, 0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_finite(dtype):
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    for value in (torch.nan, torch.inf, -torch.inf):
        largest[17] = value
        assert not is_finite(largest)
    largest[3], largest[17] = -torch.inf, torch.inf
    assert not is_finite(largest)
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0, dtype=dtype))
