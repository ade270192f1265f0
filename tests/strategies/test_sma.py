"""`sma`: parameters move toward the mean by a factor, then by the local gradient."""

import torch

from shoal.strategies.sma import SynchronousModelAverage
from strategies.quadratics import Point, close, step, targets

RATE = 0.3


def train(group, _):
    goals = targets(group.size, 6)
    for alpha, local_steps in ((0.1, 1), (0.7, 3)):
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        options = {} if alpha == 0.1 else {"alpha": alpha}
        strategy = SynchronousModelAverage(group, local_steps=local_steps, **options)
        values = torch.zeros_like(goals[0])
        with strategy.attach(model, optimizer, stays=True):
            for number, goal in enumerate(goals):
                step(model, optimizer, goal[group.rank])
                gradients = values - goal
                if (number + 1) % local_steps == 0:
                    values = (1 - alpha) * values + alpha * values.mean(0)
                values = values - RATE * gradients
                close(model.x, values[group.rank])


def test_formula(workers):
    workers.run(train, 2)
    workers.run(train, 3)
