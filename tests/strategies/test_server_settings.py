import pytest
import torch
from torch import nn

from shoal.strategies.parameter_server.channel import OptimizerNumbers


def optimizer(kind=torch.optim.SGD, **settings):
    parameters = list(nn.Linear(2, 2).parameters())
    return kind([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], **settings)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_numbers_travel_and_nothing_else_does(kind):
    here, there = optimizer(kind, lr=0.1), optimizer(kind, lr=0.1)
    groups = here.param_groups
    groups[1]["lr"], groups[0]["weight_decay"] = 0.1 / 3, 1e-4
    if "betas" in groups[0]:
        groups[0]["betas"] = (0.8, 0.99)
    numbers = OptimizerNumbers(there)
    assert numbers.names == OptimizerNumbers(here).names
    numbers.write(OptimizerNumbers(here).read())
    for mine, theirs in zip(groups, there.param_groups, strict=True):
        for name in mine:
            if name != "params":
                assert theirs[name] == mine[name]
                assert type(theirs[name]) is type(mine[name])


def test_rates_are_scaled_on_either_side_and_not_for_good():
    here, there = optimizer(lr=0.1, momentum=0.9), optimizer(lr=0.1, momentum=0.9)
    numbers = OptimizerNumbers(there)
    numbers.write(OptimizerNumbers(here).read(0.5), 0.1)
    assert [group["lr"] for group in there.param_groups] == pytest.approx([0.025, 0.005])
    assert there.param_groups[0]["momentum"] == 0.9
    numbers.write(OptimizerNumbers(here).read())
    assert [group["lr"] for group in there.param_groups] == [0.5, 0.1]
    assert [group["lr"] for group in here.param_groups] == [0.5, 0.1]


def test_a_rate_that_is_a_tensor_or_a_whole_number_stays_one_while_it_can():
    there = optimizer(lr=1)
    there.param_groups[0]["lr"] = torch.tensor(0.5)
    numbers = OptimizerNumbers(there)
    values = numbers.read()
    numbers.write(
        [
            value * 0.5 if name == "lr" else value
            for value, (_, name, _) in zip(values, numbers.names, strict=True)
        ]
    )
    assert torch.equal(there.param_groups[0]["lr"], torch.tensor(0.25))
    assert there.param_groups[1]["lr"] == 0.5
