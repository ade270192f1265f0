"""A quadratic for each worker, and what its strategy should make of it, reckoned for all workers at once."""

import torch
from torch import nn

DIM = 4


class Point(nn.Module):
    """`½‖x − target‖²`: the gradient is `x − target`."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, target):
        return (self.x - target).square().sum() / 2


def targets(size, num_steps):
    """By step and rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_steps, size, DIM, generator=generator, dtype=torch.float64)


def step(model, optimizer, *goals):
    """One step on the sum of the losses for some targets, each with a forward and backward of its own."""
    optimizer.zero_grad()
    for goal in goals:
        model(goal).backward()
    optimizer.step()


def close(got, wanted):
    torch.testing.assert_close(got.detach(), wanted, rtol=0, atol=1e-12)
