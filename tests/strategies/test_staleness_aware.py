"""`staleness-aware`: a parameter server with two options on; it needs servers wherever one asks by name."""

import pytest
import torch

from shoal.bench.contenders import is_free_running, needs_servers
from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from shoal.strategies.parameter_server import StalenessAwareSGD
from shoal.transport import Profile
from strategies.bowls import Bowl, Bowls, everywhere


def trained(name, **options):
    """What the servers come to with three workers, whose gradients are late, and how late they were."""
    profile = Profile.parse("[ways.default]\ndelay_ms = 30")
    world = World(num_workers=3, num_servers=1, profile=profile)
    bowls = Bowls(3)

    def work(worker):
        strategy, model = make_strategy(worker.group, name, **options), Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if worker.group.role == "server":
            while strategy.serve(model, optimizer):
                pass
            return strategy.stats["staleness"]["max_behind"], model.x.detach()
        with worker.charged(model), strategy.attach(model, optimizer, stays=True):
            for _ in range(6):
                optimizer.zero_grad()
                bowls.backward(model, worker.rank)
                optimizer.step()
        return strategy.name, model.x.detach()

    *workers, server = run_exact(world, work)
    assert all(outcome.error is None for outcome in (*workers, server))
    return server.value


def test_it_is_a_parameter_server_with_two_options_on():
    max_behind, values = trained("staleness-aware")
    assert max_behind > 1
    same = trained("parameter-server", staleness_lr=True, delay_compensation=0.04)
    assert torch.equal(values, same[1])
    for options in ({}, {"staleness_lr": True}, {"delay_compensation": 0.04}):
        assert not torch.equal(values, trained("parameter-server", **options)[1])


def test_it_is_known_to_need_servers():
    assert needs_servers("staleness-aware")
    assert needs_servers("dc-asgd")
    assert is_free_running("staleness-aware", {})
    assert not needs_servers("sgp")

    def work(group):
        StalenessAwareSGD(group).attach(Bowl(), torch.optim.SGD(Bowl().parameters(), lr=0.1))

    with pytest.raises(UsageError, match="staleness-aware has no server"):
        everywhere(work, 2)


def test_its_options_are_those_of_a_parameter_server():
    strategy = StalenessAwareSGD(SoloGroup(), mode="bounded", staleness=2, delay_compensation=0)
    assert strategy.options.staleness_lr
    assert strategy.options.staleness == 2
    with pytest.raises(UsageError, match="delay_compensation"):
        StalenessAwareSGD(SoloGroup(), mode="sync")
