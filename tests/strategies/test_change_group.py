"""A session that goes on in another group: the same steps, and what the strategy keeps moves along."""

import math

import pytest
import torch

from group.hosts import open_hosts, together
from shoal.group import Loss
from shoal.strategies import make_strategy
from strategies.fakes import Mirror

OPTIONS = {
    "local-sgd": {"local_steps": 2},
    "diloco": {"local_steps": 2, "outer_lr": 0.5, "outer_momentum": 0.0},
    "noloco": {"local_steps": 2},
    "sparse-loco": {"local_steps": 2, "density": 0.5},
    "choco": {"codec": "int8"},
}
NAMES = [
    "all-reduce", "neighbor", "sma", "pair", "local-sgd", "diloco", "push-sum", "window", "gradient-tracking",
    "exact-diffusion", "extra", "d2", "momentum", "choco", "sgp", "relay", "noloco", "sparse-loco",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_two_of_three_go_on_in_a_group_of_their_own(name):
    options = {"topology": "full"} if name in ("exact-diffusion", "extra", "d2", "choco") else {}
    with open_hosts(3) as old, open_hosts(2) as new:

        def work(group):
            model = torch.nn.Linear(3, 2)
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, 0.1)  # workers are threads, and would share a seed
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            strategy = make_strategy(group, name, **OPTIONS.get(name, {}), **options)
            losses = []

            def step():
                optimizer.zero_grad()
                loss = (model(torch.ones(1, 3)) - group.rank).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

            with strategy.attach(model, optimizer) as session:
                for _ in range(3):
                    step()
                if group.rank == 2:
                    return None
                session.change_group(new[group.rank])
                group.leave()
                assert strategy.group.size == 2
                for _ in range(5):
                    step()
                assert strategy.steps == 8
            return losses

        losses = together(old, work)
    assert losses[2] is None
    for each in losses[:2]:
        assert len(each) == 8
        assert all(map(math.isfinite, each))


def test_a_loss_in_the_new_group_counts_though_one_was_in_the_old(caplog):
    class Losing(Mirror):
        losses = None

        @property
        def lost(self):
            return self.losses or {}

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = Losing(), Losing()
    strategy = make_strategy(first, "neighbor", topology="full")
    caplog.set_level("INFO")
    with strategy.attach(model, optimizer, stays=True) as session:
        first.losses = {1: Loss(1, "it was the first")}
        session.check_lost_peers()
        session.change_group(second)
        second.losses = {1: Loss(1, "it was the second")}
        session.check_lost_peers()
        second.losses = {}
    assert "it was the first" in caplog.text
    assert "it was the second" in caplog.text
