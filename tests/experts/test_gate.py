import copy

import pytest
import torch

from shoal.core import UsageError
from shoal.experts.mixture import ProductKeyGate


def test_the_logit_of_an_expert_is_the_sum_over_axes():
    gate = ProductKeyGate(5, (3, 4))
    scores = gate(torch.randn(2, 5))
    first, second = gate.split(scores)
    assert (first.shape, second.shape) == ((2, 3), (2, 4))
    coordinates = torch.tensor([[[0, 3], [2, 1]], [[1, 1], [0, 0]]])
    logits = gate.logits(scores, coordinates)
    expected = [
        [first[0, 0] + second[0, 3], first[0, 2] + second[0, 1]],
        [first[1, 1] + second[1, 1], first[1, 0] + second[1, 0]],
    ]
    torch.testing.assert_close(logits, torch.stack([torch.stack(row) for row in expected]))
    logits[0, 0].backward()
    used = gate.projection.bias.grad.nonzero().flatten().tolist()
    assert used == [0, 3 + 3]


def test_dimensions_between_are_averaged():
    gate = ProductKeyGate(5, (3,))
    x = torch.randn(2, 7, 4, 5)
    torch.testing.assert_close(gate(x), gate.projection(x.mean((1, 2))))


def test_scores_are_wide_enough():
    gate = ProductKeyGate(5, (3,))
    assert gate(torch.randn(2, 5).bfloat16()).dtype == torch.float32
    assert gate.bfloat16()(torch.randn(2, 5).bfloat16()).dtype == torch.float32
    assert copy.deepcopy(gate).double()(torch.randn(2, 5)).dtype == torch.float64


def test_its_parameters_are_all_that_is_saved():
    assert list(ProductKeyGate(5, (3, 4)).state_dict()) == ["projection.weight", "projection.bias"]


@pytest.mark.parametrize("grid", [(), (3, 0)])
def test_what_is_no_grid_is_refused(grid):
    with pytest.raises(UsageError, match="no grid"):
        ProductKeyGate(5, grid)


@pytest.mark.parametrize("shape", [(5,), (2, 6)])
def test_what_does_not_fit_is_refused(shape):
    with pytest.raises(UsageError, match="The gate takes"):
        ProductKeyGate(5, (3,))(torch.zeros(shape))
