"""Two optimizers, each for a half of one model: nothing is mixed before the step of its own optimizer."""

import logging

import pytest
import torch
from torch import nn

from shoal.strategies import make_strategy
from strategies.loops import LogLines
from strategies.quadratics import Point, close, targets

RATES = {"one": 0.1, "two": 0.3}


def halves():
    model = nn.ModuleDict({name: Point() for name in RATES})
    model.forward = lambda goal: sum(model[name](goal) for name in RATES)
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=rate) for name, rate in RATES.items()]
    return model, *optimizers


def step(model, goal, first, second):
    first.zero_grad()
    second.zero_grad()
    model(goal).backward()
    first.step()
    second.step()


def each_with_its_own(group, arguments):
    """The halves are what each would be as a model of its own."""
    name, options = arguments["strategy"], arguments["options"]
    goals = targets(group.size, 6)
    model, first, second = halves()
    one, two = (make_strategy(group, name, **options) for _ in range(2))
    told = LogLines()
    logging.getLogger("shoal.strategies").addHandler(told)
    with one.attach(model, first, stays=True), two.attach(model, second, stays=True):
        for goal in goals:
            step(model, goal[group.rank], first, second)
    logging.getLogger("shoal.strategies").removeHandler(told)
    assert (one.steps, two.steps) == (6, 6)
    for half, rate in RATES.items():
        alone = Point()
        optimizer = torch.optim.SGD(alone.parameters(), lr=rate)
        with make_strategy(group, name, **options).attach(alone, optimizer, stays=True):
            for goal in goals:
                optimizer.zero_grad()
                alone(goal[group.rank]).backward()
                optimizer.step()
        close(model[half].x, alone.x.detach())
    return told.lines


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("all-reduce", {}),
        pytest.param("ddp", {}, marks=pytest.mark.slow),
        ("neighbor", {}),
        ("neighbor", {"order": "adapt-while-combine"}),
        ("local-sgd", {"local_steps": 2}),
        ("diloco", {"local_steps": 2}),
    ],
)
def test_each_optimizer_has_a_strategy_of_its_own(workers, strategy, options):
    told = workers.run(each_with_its_own, 2, {"strategy": strategy, "options": options})
    assert told == [[], []]


def only_one_is_attached(group, arguments):
    goals = targets(group.size, 4)
    model, first, second = halves()
    strategy = make_strategy(group, arguments["strategy"], **arguments["options"])
    told = LogLines()
    logging.getLogger("shoal.strategies.start").addHandler(told)
    with strategy.attach(model, first, stays=True):
        for goal in goals:
            step(model, goal[group.rank], first, second)
    logging.getLogger("shoal.strategies.start").removeHandler(told)
    x = torch.zeros_like(goals[0])
    for goal in goals:
        gradient = x - goal
        if strategy.shares_gradients:
            gradient = gradient.mean(0).expand_as(goal)
        x = x - RATES["two"] * gradient
    close(model["two"].x, x[group.rank])
    return told.lines


@pytest.mark.parametrize("strategy", ["neighbor", "local-sgd"])
def test_what_another_optimizer_trains_is_not_mixed_and_is_named(workers, strategy):
    arguments = {"strategy": strategy, "options": {}}
    for told in workers.run(only_one_is_attached, 2, arguments):
        (said,) = [line for line in told if "not by this optimizer" in line]
        assert said.startswith(f"{strategy}: two.x is trained, and not by this optimizer")
        assert "attach(model, second_optimizer)" in said


def test_all_reduce_shares_the_gradients_of_both(workers):
    assert workers.run(only_one_is_attached, 2, {"strategy": "all-reduce", "options": {}}) == [[], []]
