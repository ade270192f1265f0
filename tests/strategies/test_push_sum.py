"""`push-sum`: the total that stays, the limit on a directed graph, and that nobody waits."""

import contextlib
import json
import os

import pytest
import torch
from torch import nn

from shoal.core.run_options import VARIABLE, RunOptions
from shoal.group.operations import GroupWrapper
from shoal.strategies.window import PushSum
from shoal.topology import from_matrix
from strategies.quadratics import Point, close, step, targets

RATE = 0.2


@contextlib.contextmanager
def attached(group, model=None, *, lr=RATE, **options):
    model = Point() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    strategy = PushSum(group, **options)
    with strategy.attach(model, optimizer, stays=True):
        yield model, optimizer, strategy


def total(group, model, strategy):
    """Of all members: the mass, and the sum."""
    mass = torch.tensor([strategy.weight], dtype=torch.float64)
    parts = group.all_gather(torch.cat([model.x.detach() * mass, mass])).wait()
    return torch.stack(parts).sum(0)


def conserved(group, _):
    """However unevenly they push: workers do different numbers of rounds, nobody waiting."""
    own = torch.randn(4, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64)
    for min_weight in (0.0, 1.0):
        with attached(group, lr=0.0, min_weight=min_weight, topology="exponential-2") as parts:
            model, optimizer, strategy = parts
            with torch.no_grad():
                model.x.copy_(own)
            before = total(group, model, strategy)
            for _ in range(20 * (1 + group.rank)):
                step(model, optimizer, torch.zeros(4))
            strategy.settle()
            after = total(group, model, strategy)
            torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
            assert after[-1] == pytest.approx(group.size)
            counts = strategy.stats
            assert counts["num_pushed"] + counts["num_held"] == strategy.rounds == 20 * (1 + group.rank)
            if min_weight:
                assert 1 / strategy.weight < 10


def lockstep(group, _):
    """The synchronous rule, where all have pushed before any adds: mass and sums by the same matrix."""
    goals = targets(group.size, 6)
    edges = torch.eye(group.size, dtype=torch.float64)
    edges[0] = 1  # all push to rank 0, and each to the next one
    for rank in range(group.size):
        edges[(rank + 1) % group.size, rank] = 1
    columns = edges / edges.sum(0)
    sums, mass = torch.zeros_like(goals[0]), torch.ones(group.size, 1, dtype=torch.float64)
    topology = from_matrix((edges / edges.sum(1, keepdim=True)).numpy())
    with attached(Meeting(group), topology=topology, min_weight=0) as (model, optimizer, strategy):
        for goal in goals:
            step(model, optimizer, goal[group.rank])
            sums = columns @ (sums - RATE * (sums / mass - goal))
            mass = columns @ mass
            torch.testing.assert_close(strategy.weight, mass[group.rank].item(), rtol=1e-12, atol=0)
            close(model.x, (sums / mass)[group.rank])
            group.barrier().wait()
        assert (mass.max() / mass.min()) > 1.5


class Meeting(GroupWrapper):
    """All meet between pushing and adding: who looks for what has come waits for all."""

    def window(self, *arguments, **named):
        window = super().window(*arguments, **named)
        look = window.filled

        def filled():
            self.barrier().wait()
            return look()

        window.filled = filled
        return window


def limits(group, _):
    """The minimiser of the mean, though the graph gives its ranks unequal masses."""
    goals = targets(group.size, 1)[0]
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number / 10))
    strategy = PushSum(group, topology="star")
    with strategy.attach(model, optimizer, stays=True):
        for number in range(100):
            step(model, optimizer, goals[group.rank])
            rate.step()
            if number % 4 == 0:
                group.barrier().wait()  # equally many steps of each: else the faster one's target weighs more
        strategy.settle()
        state = total(group, model, strategy)
    mean = state[:-1] / state[-1]
    assert (mean - goals.mean(0)).norm() < 0.1 * (goals - goals.mean(0)).norm(dim=1).max()


class Two(nn.Module):
    """Two dtypes: two windows, one mass."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.y = nn.Parameter(torch.zeros(7))

    def forward(self, target):
        return (self.x - target).square().sum() + (self.y - target.sum().float()).square().sum()


def dtypes(group, _):
    with attached(group, Two(), lr=0.0) as (model, optimizer, strategy):
        with torch.no_grad():
            model.x.fill_(group.rank)
            model.y.fill_(group.rank)
        for _ in range(30):
            step(model, optimizer, torch.zeros(4))
        strategy.settle()
        assert model.x[0].item() == pytest.approx(model.y[0].item(), abs=1e-5)


def averaged(group, _):
    """Over the weights, after which all are alike and have a weight of 1."""
    with attached(group, global_average_every=3, topology="star") as (model, optimizer, strategy):
        for number, goal in enumerate(targets(group.size, 6)):
            step(model, optimizer, goal[group.rank])
            if number % 3 == 2:
                assert strategy.weight == 1
                assert strategy.consensus_distance() < 1e-12


def saved(group, _):
    """The common model is the mean over the weights; the weight is part of the state."""
    with attached(group, lr=0.0, topology="star", min_weight=0) as (model, optimizer, strategy):
        with torch.no_grad():
            model.x.fill_(group.rank)
        for _ in range(1 + 2 * group.rank):
            step(model, optimizer, torch.zeros(4))
        strategy.before_saving(strategy.session)
        mean = strategy.common_model(strategy.session)["x"]
        close(mean, torch.full((4,), (group.size - 1) / 2, dtype=torch.float64))
        state = strategy.state_dict()
        assert state["weight"] == strategy.weight
    again = PushSum(group)
    again.load_state_dict(state)
    assert again.weight == state["weight"]
    again.load_common_state(state)
    assert again.weight == 1


def ended(group, folder):
    """Leave, while much is under way."""
    os.environ.update(RunOptions(checkpoint=folder).to_environment())
    try:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with PushSum(group, topology="star", min_weight=0).attach(model, optimizer):
            for _ in range(3):
                step(model, optimizer, torch.zeros(4))
    finally:
        del os.environ[VARIABLE]


def everything(group, _):
    for check in (conserved, lockstep, limits, dtypes, averaged, saved):
        check(group, None)
        group.barrier().wait()


def test_rounds(workers):
    workers.run(everything, 3)
    workers.run(conserved, 2)


def test_the_mass_is_whole_again_after_the_end(workers, tmp_path):
    workers.run(ended, 3, str(tmp_path))
    parts = sorted(tmp_path.glob("step-00000003/workers/*.json"))
    assert [json.loads(part.read_text())["strategy"]["weight"] for part in parts] == [1.0] * 3


def lost(group, _):
    """The others start anew with a weight of 1 each, and agree."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = PushSum(group, topology="full")
    strategy.attach(model, optimizer)
    with torch.no_grad():
        model.x.fill_(group.rank)
    for _ in range(3):
        step(model, optimizer, torch.zeros(4))
    if group.rank == 0:
        group.close(ConnectionAbortedError())
        return None
    while 0 in group.members:
        group.progress()
    for _ in range(20):
        step(model, optimizer, torch.zeros(4))
        group.barrier().wait()
    strategy.settle()
    return [strategy.consensus_distance(), total(group, model, strategy)[-1].item()]


def test_a_lost_peer_takes_its_mass_along(workers):
    first, *others = workers.run(lost, 3)
    assert first is None
    for distance, mass in others:
        assert distance < 1e-3
        # what the lost one had pushed before came besides
        assert mass > 2 - 1e-9
