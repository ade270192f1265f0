"""Parameters in one flat buffer: the same values, strides and objects, before and after."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.flats import Flats


def test_parameters_move_in_and_out():
    parameters = [
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        nn.Parameter(torch.randn(5)),
    ]
    before = [parameter.detach().clone() for parameter in parameters]
    strides = [parameter.stride() for parameter in parameters]
    flats = Flats(SoloGroup(), parameters)
    assert [flat.dtype for flat in flats.tensors] == [torch.float32] * 2
    for flat in flats.tensors:
        flat.mul_(2)
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, 2 * value)
    parameters[2].data = torch.ones(5)
    flats.adopt()
    for flat in flats.tensors:
        flat.mul_(3)
    assert torch.equal(parameters[2], torch.full((5,), 3.0))
    flats.close()
    assert [parameter.stride() for parameter in parameters] == strides
    assert torch.equal(parameters[0], 6 * before[0])
    flats.close()


def test_what_was_converted_is_refused():
    parameter = nn.Parameter(torch.randn(5))
    flats = Flats(SoloGroup(), [parameter])
    parameter.data = torch.ones(5, dtype=torch.float64)
    with pytest.raises(UsageError, match="does not fit the memory"):
        flats.adopt()
