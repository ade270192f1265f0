"""`momentum`: parameters and momentum buffers are mixed, and an optimizer without any is refused."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.strategies.neighbor_momentum import NeighborMomentum
from shoal.topology import make_topology
from strategies.bowls import RATE, Bowls, course
from strategies.fakes import Mirror


def test_the_recursion():
    """`m ← W(β m + g)`, `x ← W(x − lr·(β m + g))`, one peer a turn; a global average in the end."""
    size, beta = 4, 0.6
    bowls, topology = Bowls(size), make_topology("one-peer-exponential", size)
    rows = course("momentum", size, 7, momentum=beta, global_average_every=6)
    x = torch.zeros_like(bowls.targets)
    momentum = torch.zeros_like(x)
    for turn in range(7):
        momentum = beta * momentum + bowls.gradients(x)
        mixing = torch.from_numpy(topology.matrix(turn))
        x, momentum = mixing @ (x - RATE * momentum), mixing @ momentum
        if turn == 5:
            x, momentum = x.mean(0).expand_as(x), momentum.mean(0).expand_as(x)
        torch.testing.assert_close(rows[turn], x, rtol=0, atol=1e-12)


def test_who_skips_a_step_takes_part_with_the_momentum_it_has():
    size, beta, skipped = 4, 0.6, 2
    bowls, mixing = Bowls(size), torch.from_numpy(make_topology("ring", size).matrix(0))
    rows = course("momentum", size, 5, momentum=beta, topology="ring", skips=(skipped,))
    x = torch.zeros_like(bowls.targets)
    momentum = torch.zeros_like(x)
    for turn in range(5):
        is_stepping = torch.tensor([[rank > 0 or turn != skipped] for rank in range(size)])
        momentum = torch.where(is_stepping, beta * momentum + bowls.gradients(x), momentum)
        x, momentum = mixing @ (x - RATE * (is_stepping * momentum)), mixing @ momentum
        torch.testing.assert_close(rows[turn], x, rtol=0, atol=1e-12)


def test_first_moments_of_adam_are_momentum():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    class Halving(Mirror):
        def exchange(self, tensor, weights, *, out=None):
            done = super().exchange(tensor, weights, out=out)
            out.div_(2)
            return done

    with NeighborMomentum(Halving()).attach(model, optimizer, stays=True):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], torch.full((1, 2), 0.05))


def test_an_optimizer_without_momentum_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="this SGD has none"):
        NeighborMomentum(Mirror()).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
