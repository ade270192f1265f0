"""`gradient-tracking`: the recursion, its limit, and gradients that are sparse or missing."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.strategies.gradient_tracking import GradientTracking
from shoal.topology import make_topology
from strategies.bowls import RATE, Bowls, course
from strategies.fakes import Mirror

SIZE = 4


def recursion(bowls, topology, num_steps, local_steps):
    """`y ← W(y + g − g')`, `x ← W(x − lr·y)`; W is I between rounds."""
    x = torch.zeros_like(bowls.targets)
    tracker = gradient = torch.zeros_like(x)
    rows = []
    for number in range(num_steps):
        turn, rest = divmod(number + 1, local_steps)
        mixing = torch.eye(SIZE, dtype=x.dtype) if rest else torch.from_numpy(topology.matrix(turn - 1))
        last, gradient = gradient, bowls.gradients(x)
        tracker = mixing @ (tracker + gradient - last)
        x = mixing @ (x - RATE * tracker)
        rows.append(x)
    return torch.stack(rows)


@pytest.mark.parametrize(("name", "local_steps"), [("exponential-2", 1), ("one-peer-exponential", 2)])
def test_the_recursion_and_its_limit(name, local_steps):
    bowls = Bowls(SIZE)
    is_long = local_steps == 1
    rows = course(
        "gradient-tracking",
        SIZE,
        90 if is_long else 10,
        skips=[85] if is_long else (),
        topology=name,
        local_steps=local_steps,
    )
    wanted = recursion(bowls, make_topology(name, SIZE), 10, local_steps)
    torch.testing.assert_close(rows[:10], wanted, rtol=0, atol=1e-12)
    if is_long:
        assert bowls.distance(rows[-1]) < 1e-9


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, word):
        return self.table(word).sum()


def test_a_global_average_makes_trackers_the_mean_of_the_last_gradients():
    rows = course("gradient-tracking", 3, 3, topology="ring:left", global_average_every=2)
    assert rows[1].std(0).max() < 1e-12
    # all step by the mean gradient of the average, and what has changed since then
    bowls = Bowls(3)
    mixing = torch.from_numpy(make_topology("ring:left", 3).matrix())
    tracker = bowls.gradients(rows[0]).mean(0) + bowls.gradients(rows[1]) - bowls.gradients(rows[0])
    wanted = mixing @ (rows[1] - RATE * mixing @ tracker)
    torch.testing.assert_close(rows[2], wanted, rtol=0, atol=1e-12)


def test_sparse_and_missing_gradients():
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.table.weight.detach().clone()
    with GradientTracking(Mirror()).attach(model, optimizer, stays=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor(2)).backward()
            optimizer.step()
        assert model.unused.grad is None
        assert not model.table.weight.grad.is_sparse
    before[2] -= 2 * 0.5
    torch.testing.assert_close(model.table.weight.detach(), before)


def test_gradients_that_are_not_finite_leave_the_last_one_in_force():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with GradientTracking(Mirror()).attach(model, optimizer, stays=True):
        begin = model.weight.item()
        for value in (1.0, torch.nan, 2.0):
            optimizer.zero_grad()
            (model(torch.ones(1)) * value).sum().backward()
            optimizer.step()
    assert model.weight.item() == pytest.approx(begin - 1 - 1 - 2)


def test_a_closure_is_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(UsageError, match="step\\(closure\\)"),
        GradientTracking(Mirror()).attach(model, optimizer, stays=True),
    ):
        optimizer.step(lambda: model(torch.ones(2)).sum())
