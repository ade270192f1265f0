"""`hierarchical`: means of machines, mixed by a topology of machines; no topology need be set for it."""

import numpy as np
import pytest
import torch

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.neighbor import HierarchicalAverage
from shoal.topology import Weights
from strategies.quadratics import Point, close, step, targets

RATE = 0.3
LAZY = [[0.75, 0.25, 0], [0, 0.75, 0.25], [0.25, 0, 0.75]]


def train(group, arguments):
    goals = targets(group.size, 4)
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    order = arguments.get("order", "adapt-then-combine")
    options = {"topology": np.array(LAZY)} if group.num_machines == 3 else {}
    strategy = HierarchicalAverage(group, order=order, **options)
    matrix = {1: torch.ones(1, 1), 2: torch.full((2, 2), 0.5), 3: torch.tensor(LAZY)}[group.num_machines]
    matrix = matrix.double()
    values = torch.zeros_like(goals[0])
    with strategy.attach(model, optimizer, stays=True):
        for number, goal in enumerate(goals):
            if number == 3:
                matrix = torch.eye(len(matrix)).double()
                strategy.weights = Weights(1.0)
            step(model, optimizer, goal[group.rank])
            gradients = values - goal
            if order == "adapt-then-combine":
                values = values - RATE * gradients
            means = values.view(group.num_machines, -1, goal.shape[-1]).mean(1)
            values = (matrix @ means).repeat_interleave(group.size // group.num_machines, 0)
            if order != "adapt-then-combine":
                values = values - RATE * gradients
            close(model.x, values[group.rank])
    return group.num_machines


@pytest.mark.parametrize(("size", "per_machine"), [(3, None), (4, 2), (3, 1)])
def test_machines_average_inside_and_with_neighbours(workers, size, per_machine):
    settings = {"workers_per_machine": per_machine}
    num_machines = size // (per_machine or size)
    assert workers.run(train, size, settings=settings) == [num_machines] * size
    workers.run(train, size, {"order": "adapt-while-combine"}, settings=settings)


def test_unequal_machines_are_refused():
    class Five(SoloGroup):
        def __init__(self):
            super().__init__()
            self.size, self.num_machines = 5, 3
            self.machines = [0, 0, 1, 1, 2]

    with pytest.raises(UsageError, match=r"there are 2, 2, 1(.|\n)*--workers-per-machine"):
        HierarchicalAverage(Five())
