"""Quadratics with different Hessians and targets, and workers on them, all in one process in virtual time."""

import torch
from torch import nn

from shoal.strategies import make_strategy
from shoal.testing import run_workers as everywhere

DIM = 3
RATE = 0.4


class Bowl(nn.Module):
    """`½ (x − target)ᵀ H (x − target)`: the gradient is `H (x − target)`; x lies in two tensors."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.tail = nn.Parameter(torch.zeros(DIM - 1, dtype=torch.float64))

    @property
    def x(self):
        return torch.cat([self.head, self.tail])

    def forward(self, hessian, target):
        rest = self.x - target
        return rest @ hessian @ rest / 2


class Bowls:
    """One for each worker; all of them together are least at `optimum`."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        turned, _ = torch.linalg.qr(torch.randn(size, DIM, DIM, generator=generator, dtype=torch.float64))
        curvatures = 0.5 + torch.rand(size, DIM, generator=generator, dtype=torch.float64)
        self.hessians = turned @ curvatures.diag_embed() @ turned.mT
        self.targets = 3 * torch.randn(size, DIM, generator=generator, dtype=torch.float64)
        pulls = (self.hessians @ self.targets[:, :, None]).sum(0)[:, 0]
        self.optimum = torch.linalg.solve(self.hessians.sum(0), pulls)

    def gradients(self, x):
        """Of all workers at their rows of x."""
        return (self.hessians @ (x - self.targets)[:, :, None])[:, :, 0]

    def distance(self, x):
        """Of the worst worker from the optimum."""
        return (x - self.optimum).norm(dim=1).max().item()

    def backward(self, model, rank):
        model(self.hessians[rank], self.targets[rank]).backward()


def step(model, optimizer, bowls, rank):
    optimizer.zero_grad()
    bowls.backward(model, rank)
    optimizer.step()


def after_a_step(strategy):
    """A model and its optimizer after one step of four workers, and the strategy's state."""
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with strategy.attach(model, optimizer, stays=True):
        step(model, optimizer, Bowls(4), strategy.group.rank)
    return model, optimizer, strategy.state_dict()


def course(name, size, num_steps, *, momentum=0.0, skips=(), resumes=(), **options):
    """x of all workers after each step: a row for each step and worker.

    Rank 0 skips some steps, as a GradScaler does; before some all go on with new strategies, from their
    states.
    """
    bowls = Bowls(size)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
        strategy, rows = None, []
        for begin, end in zip([0, *resumes], [*resumes, num_steps], strict=True):
            state = strategy and strategy.state_dict()
            strategy = make_strategy(group, name, **options)
            if state is not None:
                strategy.load_state_dict(state)
            with strategy.attach(model, optimizer, stays=True, should_start_equal=state is None):
                for number in range(begin, end):
                    optimizer.zero_grad()
                    bowls.backward(model, group.rank)
                    if number in skips and group.rank == 0:
                        optimizer.zero_grad()
                        strategy.settle()
                    else:
                        optimizer.step()
                    rows.append(model.x.detach())
        return torch.stack(rows)

    return torch.stack(everywhere(work, size), dim=1)


def diffusion(bowls, mixing, num_steps):
    """`x ← W(2x − x' − lr·(g − g'))`, by the textbook, all workers at once."""
    rows = [torch.zeros_like(bowls.targets)]
    rows.append(mixing @ (rows[0] - RATE * bowls.gradients(rows[0])))
    for _ in range(num_steps - 1):
        change = bowls.gradients(rows[-1]) - bowls.gradients(rows[-2])
        rows.append(mixing @ (2 * rows[-1] - rows[-2] - RATE * change))
    return torch.stack(rows[1:])
