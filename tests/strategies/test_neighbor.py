"""`neighbor`: both orders against the formula, reckoned from the mixing matrix for all workers at once."""

import pytest
import torch

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.neighbor import NeighborAverage
from shoal.topology import Weights, make_topology, one_peer_exponential
from strategies.quadratics import Point, close, step, targets

RATE, DECAY = 0.3, 0.1


def optimize(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)


def mixed(topology, turn, values):
    return torch.from_numpy(topology.matrix(turn)) @ values


def then_combine(group, _):
    """Local steps, two micro-batches a step, a time-varying topology given as a function."""
    goals = targets(group.size, 16)
    topology = one_peer_exponential(group.size)
    model = Point()
    optimizer = optimize(model)
    strategy = NeighborAverage(group, topology=one_peer_exponential, local_steps=2)
    values = torch.zeros_like(goals[0])
    with strategy.attach(model, optimizer, stays=True):
        for number in range(8):
            step(model, optimizer, *goals[2 * number : 2 * number + 2, group.rank])
            gradients = 2 * values - goals[2 * number : 2 * number + 2].sum(0)
            values = values - RATE * (gradients + DECAY * values)
            if number % 2:
                values = mixed(topology, number // 2, values)
            close(model.x, values[group.rank])
        assert strategy.rounds == 4


def while_combine(group, _):
    """The gradient is that of the old parameters, weight decay and momentum see the mixed ones."""
    goals = targets(group.size, 6)
    topology = make_topology("ring", group.size)
    model = Point()
    optimizer = optimize(model)
    strategy = NeighborAverage(group, topology="ring", order="adapt-while-combine")
    values = torch.zeros_like(goals[0])
    with strategy.attach(model, optimizer, stays=True):
        for number, goal in enumerate(goals):
            if number == 3:
                # more forwards than one, and one whose loss nobody needs
                with strategy.accumulate():
                    model(goal[group.rank])
                model(goal[group.rank])
            step(model, optimizer, goal[group.rank])
            gradients = values - goal
            values = mixed(topology, number, values)
            values = values - RATE * (gradients + DECAY * values)
            close(model.x, values[group.rank])
        # a forward without a step leaves an exchange under way, which ends with the attachment
        model(goals[0, group.rank])
    close(model.x, values[group.rank])


def written_in_between(group, _):
    """Parameters that are loaded or replaced after a forward stay; the next round is one as ever."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = NeighborAverage(group, topology="full", order="adapt-while-combine")
    own = torch.full_like(model.x, group.rank)
    with strategy.attach(model, optimizer, stays=True):
        for way in ("loaded", "replaced"):
            model(own)
            if way == "loaded":
                model.load_state_dict({"x": own})
            elif group.rank == 0:
                model.x.data = own.clone()
            else:
                model.load_state_dict({"x": own})
            step(model, optimizer, own)
            assert torch.equal(model.x, own)
            step(model, optimizer, own)
            close(model.x, torch.full_like(own, (group.size - 1) / 2))


def closure(group, _):
    """A step that calls forward and backward itself: the exchange comes before it, and only once."""
    goals = targets(group.size, 4)
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = NeighborAverage(group, topology="full", order="adapt-while-combine")
    values = torch.zeros_like(goals[0])
    with strategy.attach(model, optimizer, stays=True):
        for goal in goals:

            def loss(goal=goal):
                optimizer.zero_grad()
                value = model(goal[group.rank])
                value.backward()
                return value

            optimizer.step(loss)
            values = values.mean(0) - RATE * (values.mean(0) - goal)
            close(model.x, values[group.rank])
        assert strategy.rounds == 4


def given_weights(group, _):
    """Weights for the next rounds, as they are and as a function of the round; a step that is skipped."""
    goals = targets(group.size, 5)
    n, rank = group.size, group.rank
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = NeighborAverage(group, topology="full")
    values = torch.zeros_like(goals[0])
    with strategy.attach(model, optimizer, stays=True):
        step(model, optimizer, goals[0, rank])
        values = (values - RATE * (values - goals[0])).mean(0).expand(n, -1)
        close(model.x, values[rank])

        strategy.weights = Weights(0.75, {(rank + 1) % n: 0.25})
        step(model, optimizer, goals[1, rank])
        values = values - RATE * (values - goals[1])
        values = 0.75 * values + 0.25 * values.roll(-1, 0)
        close(model.x, values[rank])

        strategy.weights = lambda turn: Weights(0.5, {(rank + turn) % n: 0.5})
        for number in (2, 3):
            optimizer.zero_grad()
            model(goals[number, rank]).backward()
            skips = number == 2 and rank == 0
            if skips:
                optimizer.zero_grad()  # as a GradScaler's loop does, whose step() was none
                model(goals[number, rank])
            else:
                optimizer.step()
            gradients = values - goals[number]
            gradients[0] *= number != 2
            values = values - RATE * gradients
            values = (values + values.roll(-number, 0)) / 2
            close(model.x, values[rank])
        assert strategy.rounds == strategy.steps == 4

        with pytest.raises(UsageError, match=f"cannot exchange with rank {n}"):
            strategy.weights = Weights(0.5, {n: 0.5})


def resumed(group, _):
    """State taken in the middle of a period, put into a new strategy."""
    goals = targets(group.size, 7)
    results = []
    for stops_at in (7, 3):
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        strategy = NeighborAverage(group, topology="one-peer-exponential", global_average_every=4)
        with strategy.attach(model, optimizer, stays=True):
            for goal in goals[:stops_at]:
                step(model, optimizer, goal[group.rank])
        if stops_at < 7:
            state = strategy.state_dict()
            strategy = NeighborAverage(group, topology="one-peer-exponential", global_average_every=4)
            strategy.load_state_dict(state)
            with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
                for goal in goals[stops_at:]:
                    step(model, optimizer, goal[group.rank])
        results.append(model.x.detach())
    close(*results)


def global_average(group, _):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = NeighborAverage(group, topology="ring:left", global_average_every=2)
    with strategy.attach(model, optimizer, stays=True):
        for number in range(4):
            step(model, optimizer, targets(group.size, 4)[number, group.rank])
            is_equal = strategy.consensus_distance() < 1e-12
            assert is_equal == (number % 2 == 1)


def everything(group, _):
    for check in (
        then_combine,
        while_combine,
        written_in_between,
        closure,
        given_weights,
        resumed,
        global_average,
    ):
        check(group, None)


def test_formulas(workers):
    workers.run(everything, 4)
    workers.run(everything, 5)


def test_topologies_are_checked_at_once():
    with SoloGroup() as group, pytest.raises(UsageError, match="no topology 'rung'"):
        NeighborAverage(group, topology="rung")
