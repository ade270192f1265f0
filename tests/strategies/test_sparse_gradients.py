"""A table with sparse gradients trains as one with dense gradients does, under every strategy."""

import contextlib

import pytest
import torch
from torch import nn

from contracts.strategies import EVERY, flat, make
from strategies import servers
from strategies.bowls import everywhere

SIMULATED = [name for name, case in EVERY.items() if case.shares_through_group]
SIZE = 3


class Words(nn.Module):
    def __init__(self, *, is_sparse):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=is_sparse).double()
        self.head = nn.Linear(4, 3).double()
        numbers = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers))

    def forward(self, words):
        return self.head(self.table(words).mean(1)).square().mean()


def words_of(rank, step):
    return torch.randint(0, 9, (5, 2), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, optimizer, strategy, rank):
    """With a step that was skipped, and one of two backward passes."""
    for step in range(5):
        optimizer.zero_grad()
        if step == 3:
            with strategy.accumulate():
                model(words_of(rank, 100)).backward()
        model(words_of(rank, step)).backward()
        if step == 2 and not strategy.shares_gradients:
            optimizer.zero_grad()
        else:
            optimizer.step()
        strategy.settle()


def trained(case, make_optimizer, *, is_sparse, **options):
    def work(group):
        model = Words(is_sparse=is_sparse)
        optimizer = make_optimizer(model)
        strategy = make(group, case, **options)
        with strategy.attach(model, optimizer, stays=True):
            train(model, optimizer, strategy, group.rank)
            return flat(model)

    return torch.stack(everywhere(work, SIZE))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, nesterov=True)


def assert_equal(case, make_optimizer=sgd, **options):
    sparse, dense = (
        trained(case, make_optimizer, is_sparse=is_sparse, **options) for is_sparse in (True, False)
    )
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SIMULATED)
def test_as_dense_ones(name):
    assert_equal(EVERY[name])


@pytest.mark.parametrize("name", ["neighbor", "momentum"])
def test_with_monitors_averages_and_local_steps(name):
    options = {"monitor": True, "batch_size": 5, "global_average_every": 1, "local_steps": 2}
    assert_equal(EVERY[name], nesterov, **options)


def test_momentum_that_is_averaged():
    assert_equal(EVERY["local-sgd"], nesterov, average_momentum=True)


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}, {"compression": "fp16"}], ids=str)
def test_parameter_servers(options):
    results = []
    for is_sparse in (True, False):

        def make_model(rank=0, *, is_sparse=is_sparse):
            model = Words(is_sparse=is_sparse)
            return model, sgd(model)

        def work(strategy, model, optimizer, rank):
            with strategy.attach(model, optimizer, stays=True):
                train(model, optimizer, strategy, rank)
                return flat(model)

        (weights,), _ = servers.run(work, 1, make=make_model, **options)
        results.append(weights)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def ddp(group, _):
    """Train as one worker that has the batches of all, but with dense gradients."""
    ends = []
    for model in (Words(is_sparse=True), Words(is_sparse=False)):
        optimizer = sgd(model)
        strategy = make(group, EVERY["ddp"]) if not ends else None
        with strategy.attach(model, optimizer, stays=True) if strategy else contextlib.nullcontext():
            for step in range(3):
                optimizer.zero_grad()
                ranks = [group.rank] if strategy else range(group.size)
                (sum(model(words_of(rank, step)) for rank in ranks) / len(ranks)).backward()
                optimizer.step()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_ddp(workers):
    workers.run(ddp, 2)
