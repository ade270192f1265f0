import torch
from torch import nn

from shoal.models import mlp


def test_the_wide_one_has_ten_million_parameters():
    model = mlp()
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_020_874
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_widths_are_the_callers_and_the_last_layer_is_linear():
    model = mlp((6, 5, 4))
    assert [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)] == [(5, 6), (4, 5)]
    assert isinstance(model[-1], nn.Linear)
