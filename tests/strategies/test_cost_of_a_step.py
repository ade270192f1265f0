"""How many functions of Shoal's a training step calls: on a GPU a small model's step is bound by them.

Calls are counted and not timed, so that a loaded machine changes nothing. Each bound leaves some room.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies import make_strategy, session
from strategies.fakes import Mirror

HERE = str(Path(shoal.__file__).parent)


@pytest.fixture(autouse=True)
def pretended_device(monkeypatch):
    monkeypatch.setattr(session, "device_of", lambda *_, **__: torch.device("meta"))


def fewest_calls(group, name, num_layers=1, **options):
    """In the cheapest of some steps: one between two rounds, where the strategy has such steps."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_calls = 0

    def count(frame, event, _):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(HERE)

    counted = []
    with make_strategy(group, name, **options).attach(model, optimizer):
        for _ in range(24):
            num_calls = 0
            sys.setprofile(count)
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            sys.setprofile(None)
            counted.append(num_calls)
    return min(counted[12:])


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_a_step_between_two_rounds_calls_little(name):
    assert fewest_calls(Mirror(), name) <= 30


def test_it_calls_no_more_for_more_parameters():
    few, many = (fewest_calls(Mirror(), "local-sgd", num_layers) for num_layers in (1, 5))
    assert few == many


def test_a_gradient_costs_two_calls_where_gradients_are_shared():
    few, many = (fewest_calls(Mirror(), "all-reduce", num_layers) for num_layers in (1, 5))
    assert many - few <= 2 * 8
