"""How a model is divided, and tensors that do not fill one flat buffer of floats."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.outer_step import OuterRule, OuterStep, split
from shoal.tensors import private_memory


def named(*sizes, dtype=torch.float32):
    return {f"p{number}": nn.Parameter(torch.ones(size, dtype=dtype)) for number, size in enumerate(sizes)}


def test_parts_are_consecutive_and_about_equal():
    parts = split(named(10, 30, 40, 20, 50, 50), 4)
    assert [list(part) for part in parts] == [["p0", "p1"], ["p2", "p3"], ["p4"], ["p5"]]


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_every_parameter_is_in_one_part(num_parts):
    parameters = named(3, 1000, 0, 5)
    parts = split(parameters, num_parts)
    assert all(parts)
    assert [name for part in parts for name in part] == list(parameters)


def test_an_outer_step_of_mixed_dtypes_and_strides():
    parameters = {
        "complex": nn.Parameter(torch.tensor([1 + 2j, 3.0])),
        "half": nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
        "last": nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "scalar": nn.Parameter(torch.tensor(2.0)),
    }
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    strides = [parameter.stride() for parameter in parameters.values()]
    fragment = OuterStep(0, parameters, private_memory(), has_momentum=True)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(2)
    with SoloGroup() as group:
        fragment.send(group, None)
        fragment.step(OuterRule(lr=0.5, momentum=0.5))
    for name, parameter in parameters.items():
        # d = −before; m = d; copy − ½(d + ½m)
        assert torch.equal(parameter, before[name] * 1.75)
    assert [parameter.stride() for parameter in parameters.values()] == strides


def test_a_state_of_other_parameters_is_refused():
    state = OuterStep(0, named(3), private_memory(), has_momentum=False).state_dict()
    other = OuterStep(0, named(3, 4), private_memory(), has_momentum=False)
    with pytest.raises(UsageError, match="other parameters"):
        other.load_state_dict(state)


class Mean(SoloGroup):
    """Where everything is so much on average."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def all_reduce(self, tensor, op="mean"):
        return super().all_reduce(tensor.fill_(self.value), op)


def outer_step(fragment, value):
    with Mean(value) as group:
        fragment.send(group, None)
        fragment.step(OuterRule(lr=0.7, momentum=0.9))


def test_copies_that_differ_come_together_again():
    parameters = [named(4), named(4)]
    fragments = [OuterStep(0, each, private_memory(), has_momentum=True) for each in parameters]
    for fragment, value in zip(fragments, (2.0, 3.0), strict=True):
        outer_step(fragment, value)
    assert not torch.allclose(parameters[0]["p0"], parameters[1]["p0"])
    for _ in range(60):
        for fragment in fragments:
            outer_step(fragment, 5.0)
    assert torch.allclose(parameters[0]["p0"], parameters[1]["p0"], atol=1e-3)
