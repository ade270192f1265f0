"""`local-sgd`: the mean after some steps, with buffers, momentum and codecs."""

import torch
from torch import nn

from shoal.strategies.local_sgd import LocalSGD
from strategies.quadratics import Point, close, step, targets

RATE, MOMENTUM = 0.3, 0.5


def optimize(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def reckon(goals, num_local, *, averages_momentum):
    """What all workers have after each step."""
    values = torch.zeros_like(goals[0])
    velocity = torch.zeros_like(values)
    for number, goal in enumerate(goals):
        velocity = MOMENTUM * velocity + values - goal
        values = values - RATE * velocity
        if (number + 1) % num_local == 0:
            values = values.mean(0).expand_as(values)
            velocity = velocity.mean(0).expand_as(values) if averages_momentum else velocity
        yield values


def formula(group, _):
    goals = targets(group.size, 7)
    for averages_momentum in (False, True):
        model = Point()
        optimizer = optimize(model)
        strategy = LocalSGD(group, local_steps=3, average_momentum=averages_momentum)
        wanted = reckon(goals, 3, averages_momentum=averages_momentum)
        with strategy.attach(model, optimizer, stays=True):
            for goal, values in zip(goals, wanted, strict=True):
                step(model, optimizer, goal[group.rank])
                close(model.x, values[group.rank])
        assert strategy.rounds == 3  # the last one at the end of training


def momentum_of_some(group, _):
    """What one worker alone has state for is left as it is."""
    model = nn.ModuleDict({"one": Point(), "two": Point()})
    optimizer = optimize(model)
    strategy = LocalSGD(group, local_steps=1, average_momentum=True)
    with strategy.attach(model, optimizer, stays=True):
        optimizer.zero_grad()
        goal = torch.full((4,), 1.0 + group.rank, dtype=torch.float64)
        model["one"](goal).backward()
        if group.rank == 0:
            model["two"](goal).backward()
        optimizer.step()
        velocity = optimizer.state[model["one"].x]["momentum_buffer"]
        close(velocity, torch.full_like(goal, -(group.size + 1) / 2))
        if group.rank == 0:
            close(optimizer.state[model["two"].x]["momentum_buffer"], -goal)


def buffers(group, _):
    torch.manual_seed(group.rank)
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = LocalSGD(group, local_steps=2)
    with strategy.attach(model, optimizer, stays=True):
        for number in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).sum().backward()
            optimizer.step()
            means = group.all_gather(model.running_mean).wait()
            assert torch.allclose(means[0], means[1]) == (number == 1)


def coded(group, _):
    """Near the mean at once, with equal bits; error feedback sends what is left out later."""
    for codec, tolerance in (("bf16", 2e-2), ("int8", 3e-2), ("top-k:0.5", 10)):
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = LocalSGD(group, local_steps=1, codec=codec)
        own = torch.linspace(-1, 1, 4, dtype=torch.float64) * (1 + group.rank)
        mean = torch.linspace(-1, 1, 4, dtype=torch.float64) * (1 + (group.size - 1) / 2)
        with strategy.attach(model, optimizer, stays=True):
            with torch.no_grad():
                model.x.add_(own)
            for _ in range(8):
                step(model, optimizer, own)
                parts = group.all_gather(model.x.detach()).wait()
                assert all(torch.equal(part, parts[0]) for part in parts)
                assert (model.x - mean).abs().max() < tolerance, codec
            assert (model.x - mean).abs().max() < 2e-3, codec
            state = strategy.state_dict()
        again = LocalSGD(group, local_steps=1, codec=codec)
        again.load_state_dict(state)
        with again.attach(model, optimizer, stays=True):
            step(model, optimizer, own)
            assert (model.x - mean).abs().max() < 2e-3, codec


def everything(group, _):
    for check in (formula, momentum_of_some, buffers, coded):
        check(group, None)


def test_formulas(workers):
    workers.run(everything, 2)
    workers.run(everything, 3)


def left_out(group, keeps):
    """Rank 1 leaves a step out; the others wait no longer than until then, and rounds stay in step."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = LocalSGD(group, local_steps=2)
    with strategy.attach(model, optimizer, stays=True):
        for number, goal in enumerate(targets(group.size, 6)):
            model(goal[group.rank]).backward()
            if number == 3 and group.rank == 1:
                if not keeps:
                    optimizer.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
            if number == 3:
                assert strategy.consensus_distance() < 1e-12  # collective: rank 1's round comes before
            assert strategy.steps == number + 1 or number == 3
        assert strategy.consensus_distance() < 1e-12
    return [strategy.steps, strategy.rounds]


def test_a_step_that_one_worker_leaves_out(workers):
    for keeps in (False, True):
        assert workers.run(left_out, 2, keeps) == [[6, 3], [6, 3]]


def lost(group, _):
    """The others take the mean among themselves."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = LocalSGD(group, local_steps=1)
    strategy.attach(model, optimizer)
    if group.rank == 2:
        group.close(ConnectionAbortedError())
        return None
    while 2 in group.members:
        group.progress()
    with torch.no_grad():
        model.x.fill_(group.rank)
    step(model, optimizer, torch.zeros(4))
    return model.x.mean().item()


def test_a_lost_peer_is_left_out(workers):
    assert workers.run(lost, 3) == [0.5, 0.5, None]
