"""The schema is what the module takes and gives, and finding it leaves no trace."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.experts.expert import Expert
from shoal.experts.schema import TensorSchema, discover_schema


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def row():
    return ((torch.randn(3, 4),), {})


def test_one_output():
    schema = discover_schema(nn.Linear(4, 2), row())
    assert schema.inputs == (TensorSchema("float32", (4,)),)
    assert schema.outputs == (TensorSchema("float32", (2,)),)
    assert schema.is_single
    assert schema.keyword_names == ()


def test_a_tuple_of_one_is_not_a_single_output():
    assert not discover_schema(Apply(lambda x: (x,)), row()).is_single


def test_several_inputs_and_outputs():
    module = Apply(lambda x, *, mask, shift: (x.half() + shift, mask.any(dim=1)))
    mask, shift = torch.zeros(3, 2, 5, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.int64)
    schema = discover_schema(module, ((torch.randn(3, 4),), {"mask": mask, "shift": shift}))
    assert schema.keyword_names == ("mask", "shift")
    assert [str(schema) for schema in schema.inputs] == [
        "float32[batch, 4]",
        "bool[batch, 2, 5]",
        "int64[batch, 1]",
    ]
    assert [str(schema) for schema in schema.outputs] == ["float16[batch, 4]", "bool[batch, 5]"]


def test_nothing_changes():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random_before = torch.get_rng_state()
    (x,), _ = example = row()
    random_before, x_before = torch.get_rng_state(), x.clone()
    discover_schema(module, example)
    assert [part.training for part in module] == [True, True, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_before)
    assert torch.equal(x, x_before)


def test_the_mode_comes_back_after_an_error():
    module = nn.Sequential(nn.Linear(5, 5))
    with pytest.raises(UsageError, match="The module fails"):
        discover_schema(module, row())
    assert module.training


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: x.t(), "For 3 samples the module gives 4"),
        (lambda x: x.sum(), "output"),
        (lambda x: {"y": x}, "output"),
        (lambda x: (x, None), "output"),
        (lambda x: (), "output"),
        (lambda x: (x, x[:2]), "3, 2 samples"),
        (lambda x: x.fill_(2.0) * 2, "changes its input 0"),
    ],
)
def test_what_cannot_be_an_expert(function, problem):
    with pytest.raises(UsageError, match=problem):
        discover_schema(Apply(function), row())


@pytest.mark.parametrize("args", [(), (torch.zeros(()),), (torch.zeros(0, 2),), (3,)])
def test_examples_that_are_no_batch(args):
    with pytest.raises(UsageError):
        discover_schema(Apply(lambda *args: torch.zeros(3)), (args, {}))


def test_an_example_that_is_not_a_number_is_fine():
    discover_schema(nn.Linear(4, 2), ((torch.full((3, 4), float("nan")),), {}))


@pytest.mark.parametrize(
    "example", [torch.zeros(3, 4), (torch.zeros(3, 4),), [torch.zeros(3, 4)], (torch.zeros(3, 4), {})]
)
def test_an_example_may_be_given_as_the_module_is_called(example):
    schema = Expert("a", nn.Linear(4, 2), example).schema
    assert [each.shape for each in schema.inputs] == [(4,)]


@pytest.mark.parametrize("example", [None, 3, (), (torch.zeros(3, 4), 3), ((1.0,), {}), ((), {"x": [1]})])
def test_a_wrong_example_is_told_what_was_expected(example):
    with pytest.raises(UsageError, match="The example of an expert is") as caught:
        Expert("a", nn.Linear(4, 2), example)
    assert "keyword arguments" in caught.value.next_step


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        (torch.zeros(3, 5), r"float32\[3, 5\]"),
        ((torch.zeros(3, 4), torch.zeros(3, 4)), r"float32\[3, 4\], float32\[3, 4\]"),
        ((torch.zeros(3, 4), {"mask": torch.zeros(3)}), r"float32\[3, 4\], mask=float32\[3\]"),
        (torch.zeros(3, 4, dtype=torch.int64), r"int64\[3, 4\]"),
    ],
)
def test_an_example_that_the_module_does_not_take_is_shown_beside_what_it_takes(example, shown):
    with pytest.raises(UsageError, match=f"given the example: {shown}") as caught:
        Expert("a", nn.Linear(4, 2), example)
    assert "Linear.forward(input" in caught.value.next_step
