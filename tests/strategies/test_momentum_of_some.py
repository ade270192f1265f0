"""Momentum of parameters that only some workers use is mixed among those, not with zeros of the others."""

import pytest
import torch
from torch import nn

from shoal.strategies import make_strategy
from shoal.topology import make_topology
from strategies.bowls import everywhere

RATE, BETA, STEPS = 0.04, 0.9, 60


class Optional(nn.Module):
    """`common` is used by everybody, `optional` by whom it is said; the loss falls by 1 for each unit."""

    def __init__(self):
        super().__init__()
        self.common = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optional = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, slope):
        return self.common.sum() if slope is None else self.common.sum() - slope * self.optional


def course(size, num_steps, slope_of, name, make_optimizer=None, **options):
    """`optional` and the optimizer's state of it, by worker, after some steps; a slope of None: not used."""

    def work(group):
        model = Optional()
        make = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=BETA))
        optimizer = make(model.parameters())
        strategy = make_strategy(group, name, **options)
        with strategy.attach(model, optimizer, stays=True):
            for number in range(num_steps):
                optimizer.zero_grad()
                model(slope_of(group.rank, number)).backward()
                optimizer.step()
        return model.optional.detach().clone(), dict(optimizer.state.get(model.optional, {}))

    values, states = zip(*everywhere(work, size), strict=True)
    return torch.stack(values), states


def momentum_after(num_steps):
    """Of a constant slope of 1."""
    return (1 - BETA**num_steps) / (1 - BETA)


WAYS = {
    "full": ("momentum", {"topology": "full"}),
    "ring": ("momentum", {"topology": "ring"}),
    "one peer": ("momentum", {"topology": "one-peer-exponential", "global_average_every": 7}),
    "mean": ("local-sgd", {"local_steps": 1, "average_momentum": True}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_one_of_the_workers_uses_it(way, size):
    """The mean moves by a part in `size` of the steps of that worker, as if it trained alone."""
    name, options = WAYS[way]
    values, states = course(size, STEPS, lambda rank, _: None if rank else 1.0, name, **options)
    wanted = RATE * sum(momentum_after(number) for number in range(1, STEPS + 1)) / size
    assert values.mean().item() == pytest.approx(wanted, rel=1e-12)
    if size == 4:
        assert wanted == pytest.approx(5.10, abs=0.005)
    assert states[0]["momentum_buffer"].item() == pytest.approx(-momentum_after(STEPS))
    assert not any(states[1:])


@pytest.mark.parametrize("way", ["full", "mean"])
def test_the_others_have_used_it_once(way):
    """Their momentum of long ago stays theirs, and does not slow down the one that goes on."""
    name, options = WAYS[way]
    slope_of = lambda rank, number: 1.0 if number == 0 or rank == 0 else None  # noqa: E731
    values, states = course(4, STEPS, slope_of, name, **options)
    wanted = RATE * (1 + sum(momentum_after(number) for number in range(2, STEPS + 1)) / 4)
    assert values.mean().item() == pytest.approx(wanted, rel=1e-12)
    assert [state["momentum_buffer"].item() for state in states[1:]] == pytest.approx([-1] * 3)


def slope_of_three(rank, number):
    """Rank 0 always, rank 1 often, rank 2 now and then, rank 3 never, each with slopes of its own."""
    is_used = (True, number % 3 != 1, number % 5 == 2, False)[rank]
    return 1.0 + rank + 0.1 * number if is_used else None


@pytest.mark.parametrize("topology", ["full", "ring", "one-peer-exponential", "star"])
def test_the_mix_of_those_that_use_it(topology):
    """The formula of the docstring, all workers at once; a global average after every fourth round."""
    size, num_steps = 4, 9
    x, momentum = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    turns = make_topology(topology, size)
    for number in range(num_steps):
        slopes = [slope_of_three(rank, number) for rank in range(size)]
        users = torch.tensor([slope is not None for slope in slopes])
        for rank in users.nonzero()[:, 0].tolist():
            momentum[rank] = BETA * momentum[rank] - slopes[rank]
            x[rank] -= RATE * momentum[rank]
        mixing = torch.from_numpy(turns.matrix(number))
        others = 1 - mixing @ users.double()
        x = mixing @ x
        momentum = torch.where(users, mixing @ (users * momentum) + others * momentum, momentum)
        if number % 4 == 3:
            x = x.mean().expand(size).clone()
            momentum = torch.where(users, momentum[users].mean(), momentum)
    values, states = course(
        size, num_steps, slope_of_three, "momentum", topology=topology, global_average_every=4
    )
    torch.testing.assert_close(values, x, rtol=0, atol=1e-12)
    got = [state["momentum_buffer"].item() if state else 0.0 for state in states]
    assert got == pytest.approx(momentum.tolist(), abs=1e-12)


def test_the_mean_of_those_that_use_it():
    """Of `local-sgd`: after each round those that have used it since the one before have equal momentum."""
    size, num_steps, num_local = 4, 10, 2
    x, momentum = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    users = torch.zeros(size, dtype=torch.bool)
    for number in range(num_steps):
        for rank in range(size):
            slope = slope_of_three(rank, number)
            if slope is not None:
                users[rank] = True
                momentum[rank] = BETA * momentum[rank] - slope
                x[rank] -= RATE * momentum[rank]
        if (number + 1) % num_local == 0:
            x = x.mean().expand(size).clone()
            momentum = torch.where(users, momentum[users].mean(), momentum)
            users.zero_()
    options = {"local_steps": num_local, "average_momentum": True}
    values, states = course(size, num_steps, slope_of_three, "local-sgd", **options)
    torch.testing.assert_close(values, x, rtol=0, atol=1e-12)
    got = [state["momentum_buffer"].item() if state else 0.0 for state in states]
    assert got == pytest.approx(momentum.tolist(), abs=1e-12)


def test_moments_and_counts_of_adam():
    """Those that use the parameter have equal moments and, with them, equal counts of the gradients there."""

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=RATE, betas=(0.5, 0.9))

    # rank 1 joins in the third round, rank 2 never does
    slope_of = lambda rank, number: 2.0 if number >= (0, 2, 99)[rank] else None  # noqa: E731
    options = {"local_steps": 1, "average_momentum": True}
    _, states = course(3, 6, slope_of, "local-sgd", adam, **options)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert states[0][key] == states[1][key]
    assert states[0]["step"].item() == (3 + 1) / 2 + 3  # the mean in round 3, and three rounds more
    assert not states[2]
