import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.exact import run_exact
from shoal.simulate.world import Compute, StepCosts, World
from shoal.strategies import make_strategy
from shoal.transport import Profile
from shoal.transport.network.distributions import Exponential

SHAKY = Profile.parse(
    '[ways.default]\nmbit_s = 10\nloss = 0.01\n[ways.default.delay_ms]\nkind = "exponential"\nmean = 30'
)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def train(worker, strategy, num_steps=6):
    """Bits of the model, and the time."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(worker.rank)
    sharing = make_strategy(worker.group, strategy)
    with worker.charged(model), sharing.attach(model, optimizer, stays=True):
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return flat.numpy().tobytes(), worker.clock.now_s()


@pytest.mark.parametrize("strategy", ["all-reduce", "neighbor", "pair", "push-sum"])
def test_two_runs_are_equal_to_the_bit(strategy):
    def work(worker):
        return train(worker, strategy)

    world = World(num_workers=4, profile=SHAKY, compute=Compute(step_ms=Exponential(20.0)), seed=5)
    first, second = ([outcome.value for outcome in run_exact(world, work)] for _ in range(2))
    assert first == second
    other = World(num_workers=4, profile=SHAKY, compute=Compute(step_ms=Exponential(20.0)), seed=6)
    assert [outcome.value for outcome in run_exact(other, work)] != first


def test_a_step_costs_what_the_world_says():
    def work(worker):
        model = net()
        with worker.charged(model):
            model(torch.ones(1, 8)).sum().backward()
            forward_and_backward_s = worker.clock.now_s()
            with torch.no_grad():
                model(torch.ones(1, 8))
        model(torch.ones(1, 8)).sum().backward()
        return forward_and_backward_s, worker.clock.now_s()

    world = World(num_workers=2, compute=Compute(step_ms=40.0, factors={1: 2.5}))
    (plain, end), (slow, _) = (outcome.value for outcome in run_exact(world, work))
    assert plain == pytest.approx(0.04)
    assert end == plain
    assert slow == pytest.approx(0.1)


def test_gradients_of_the_last_layer_come_first():
    """So that what is shared of them is under way while the others are computed."""

    def work(worker):
        model = net()
        times_s = []
        with worker.charged(model):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: times_s.append(worker.clock.now_s()))
            model(torch.ones(1, 8)).sum().backward()
        return times_s

    (times_s,) = (outcome.value for outcome in run_exact(World(num_workers=1), work))
    assert times_s == sorted(times_s)
    assert 0.01 / 3 < times_s[0] < times_s[-1]
    assert times_s[-1] == pytest.approx(0.01)


def test_servers_and_workers_meet():
    def work(worker):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = make_strategy(worker.group, "parameter-server")
        if worker.group.role == "server":
            strategy.serve(model, optimizer)
            return None
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
        return worker.clock.now_s()

    outcomes = run_exact(World(num_workers=2, num_servers=1, profile=SHAKY), work)
    assert [(outcome.role, outcome.rank) for outcome in outcomes] == [
        ("worker", 0),
        ("worker", 1),
        ("server", 0),
    ]
    assert all(outcome.error is None for outcome in outcomes)
    assert outcomes[0].value > 0


def test_each_worker_draws_its_own_costs():
    world = World(num_workers=2, compute=Compute(step_ms=Exponential(10.0)))
    first, second = (StepCosts(world, rank) for rank in range(2))
    assert [first.next_s() for _ in range(3)] != [second.next_s() for _ in range(3)]


@pytest.mark.parametrize(
    "world", [{"num_workers": 0}, {"num_workers": 2, "compute": Compute(factors={2: 3.0})}]
)
def test_worlds_that_are_none(world):
    with pytest.raises(UsageError):
        World(**world)
