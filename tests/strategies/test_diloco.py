"""`diloco`: the outer step against its formula, fragments that take turns, overlap, mixing and codecs."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.diloco import DiLoCo
from strategies.quadratics import Point, close, step, targets

RATE = 0.1


def reckon(goals, *, period, overlap=0, mixing=0.0, lr=0.7, momentum=0.9, turn=None):
    """What all workers have after each step, for a fragment that is sent after step `turn` of each period."""
    turn = period if turn is None else turn
    values = torch.zeros_like(goals[0])
    copy, velocity = values[0], values[0]
    sent = {}
    for now, goal in enumerate(goals, 1):
        values = values - RATE * (values - goal)
        if now % period == turn % period:
            sent[now + overlap] = (copy - values).mean(0)
        if now in sent:
            mean = sent.pop(now)
            velocity = momentum * velocity + mean
            copy = copy - lr * (mean + momentum * velocity)
            values = mixing * values + (1 - mixing) * copy
        yield values


class Points(nn.Module):
    """Equal problems, one for each fragment."""

    def __init__(self, count):
        super().__init__()
        self.points = nn.ModuleList(Point() for _ in range(count))

    def forward(self, target):
        return sum(point(target) for point in self.points)


def train(group, goals, strategy, wanted):
    model = Points(len(wanted))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with strategy.attach(model, optimizer, stays=True):
        for goal, *values in zip(goals, *wanted, strict=True):
            step(model, optimizer, goal[group.rank])
            for point, value in zip(model.points, values, strict=True):
                close(point.x, value[group.rank])
    return model


def formula(group, _):
    goals = targets(group.size, 9)
    train(group, goals, DiLoCo(group, local_steps=4), [reckon(goals, period=4)])
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    train(group, goals, DiLoCo(group, local_steps=2, **plain), [reckon(goals, period=2, lr=1, momentum=0)])


def streaming(group, _):
    """Three fragments, each four steps under way, and mixed."""
    goals = targets(group.size, 20)
    options = {"local_steps": 6, "fragments": 3, "overlap_steps": 4, "mixing": 0.5}
    wanted = [reckon(goals, period=6, overlap=4, mixing=0.5, turn=turn) for turn in (2, 4, 6)]
    train(group, goals, DiLoCo(group, **options), wanted)


def resumed(group, _):
    """In the middle of a period, with a fragment under way."""
    goals = targets(group.size, 14)
    options = {"local_steps": 5, "overlap_steps": 3, "mixing": 0.25}
    wanted = list(reckon(goals, period=5, overlap=3, mixing=0.25))
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    state = values = None
    for part in (slice(0, 6), slice(6, 14)):
        strategy = DiLoCo(group, **options)
        if state is not None:
            strategy.load_state_dict(state)
            model.x.data.copy_(values)
        with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
            for goal, value in zip(goals[part], wanted[part], strict=True):
                step(model, optimizer, goal[group.rank])
                close(model.x, value[group.rank])
            state = strategy.state_dict()
            values = model.x.detach().clone()


def coded(group, _):
    """All stay equal to the bit, and near the outer step in full precision."""
    goals = targets(group.size, 8)
    wanted = list(reckon(goals, period=2, momentum=0.5))[-1]
    for codec, tolerance in (("fp16", 1e-3), ("int8", 3e-2)):
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = DiLoCo(group, local_steps=2, outer_momentum=0.5, codec=codec, error_feedback=False)
        with strategy.attach(model, optimizer, stays=True):
            for goal in goals:
                step(model, optimizer, goal[group.rank])
            parts = group.all_gather(model.x.detach()).wait()
        assert all(torch.equal(part, parts[0]) for part in parts)
        assert (model.x - wanted[group.rank]).abs().max() < tolerance, codec


def others(group, _):
    """Optimizer state stays; the end applies what is under way; a global average."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    strategy = DiLoCo(group, local_steps=3, overlap_steps=2, outer_lr=1.0, outer_momentum=0)
    goals = targets(group.size, 3)
    with strategy.attach(model, optimizer, stays=True):
        for goal in goals:
            step(model, optimizer, goal[group.rank])
        assert optimizer.state[model.x]["momentum_buffer"].any()
        assert strategy.consensus_distance() > 1e-3
    parts = group.all_gather(model.x.detach()).wait()
    assert all(torch.equal(part, parts[0]) for part in parts)
    strategy = DiLoCo(group, local_steps=1, mixing=0.5, global_average_every=2)
    with strategy.attach(model, optimizer, stays=True):
        for number, goal in enumerate(goals):
            step(model, optimizer, goal[group.rank])
            assert (strategy.consensus_distance() < 1e-12) == (number == 1)


def everything(group, _):
    for check in (formula, streaming, resumed, coded, others):
        check(group, None)


def test_formulas(workers):
    workers.run(everything, 2)
    workers.run(everything, 3)


def test_alone_it_takes_the_outer_step_too():
    goals = targets(1, 10)
    with SoloGroup() as group:
        train(group, goals, DiLoCo(group, local_steps=3, monitor=True), [reckon(goals, period=3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 4, "local_steps": 3}, "cannot take turns"),
        ({"overlap_steps": 3, "local_steps": 3}, "not back when it is sent"),
        ({"codec": "int9"}, "unknown codec"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with SoloGroup() as group, pytest.raises(UsageError, match=message):
        DiLoCo(group, **options)


def test_a_state_of_other_fragments_is_refused():
    with SoloGroup() as group:
        model = Points(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = DiLoCo(group, fragments=2)
        with strategy.attach(model, optimizer, stays=True):
            state = strategy.state_dict()
        other = DiLoCo(group)
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="2 fragments, not 1"):
            other.attach(model, optimizer)


def lost(group, _):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = DiLoCo(group, local_steps=1, outer_lr=1.0, outer_momentum=0)
    strategy.attach(model, optimizer)
    if group.rank == 0:
        group.close(ConnectionAbortedError())
        return None
    with torch.no_grad():
        model.x.fill_(group.rank)
    step(model, optimizer, torch.zeros(4))
    return model.x.mean().item()


def test_a_lost_peer_is_left_out(workers):
    assert workers.run(lost, 3) == [None, 1.5, 1.5]
