"""`window`: what is put and what is mixed, how old that is, and that it is `neighbor` with a barrier."""

import contextlib

import torch

from shoal.strategies.window import WindowAverage
from shoal.topology import make_topology
from strategies.quadratics import Point, close, step, targets

RATE = 0.3


@contextlib.contextmanager
def attached(group, **options):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = WindowAverage(group, **options)
    with strategy.attach(model, optimizer, stays=True):
        yield model, optimizer, strategy


def with_barrier(group, _):
    """As `neighbor`, whatever the topology; local steps in between."""
    for name in ("exponential-2", "one-peer-exponential", "star"):
        goals = targets(group.size, 6)
        topology = make_topology(name, group.size)
        values = torch.zeros_like(goals[0])
        with attached(group, topology=name, force_barrier=True, local_steps=2) as (
            model,
            optimizer,
            strategy,
        ):
            for number, goal in enumerate(goals):
                step(model, optimizer, goal[group.rank])
                values = values - RATE * (values - goal)
                if number % 2:
                    values = torch.from_numpy(topology.matrix(number // 2)) @ values
                close(model.x, values[group.rank])
            assert strategy.stats["num_mixed"] == strategy.rounds == 3
            assert strategy.stats["max_behind"] == 0


def takes_turns(group, _):
    """One runs ahead while the other stands still: it mixes with the newest that was put, again and again."""
    goals = targets(2, 5)
    values = torch.zeros(2, goals.shape[-1], dtype=torch.float64)
    put = [None, None]
    with attached(group) as (model, optimizer, strategy):
        for turn in range(2):
            for goal in goals:
                if group.rank == turn:
                    step(model, optimizer, goal[turn])
                values[turn] -= RATE * (values[turn] - goal[turn])
                put[turn] = values[turn].clone()
                if put[1 - turn] is not None:
                    values[turn] = (values[turn] + put[1 - turn]) / 2
            if group.rank == turn:
                close(model.x, values[turn])
            group.barrier().wait()
        if group.rank == 0:
            assert strategy.stats["num_unmixed"] == 5
        else:
            assert strategy.stats["behind"] == {-1: 4, 0: 1}


def skipped(group, _):
    """A skipped step is a round: parameters are put, and what has come is mixed."""
    with attached(group, force_barrier=True) as (model, optimizer, strategy):
        with torch.no_grad():
            model.x.fill_(group.rank)
        goal = torch.zeros(4)
        optimizer.zero_grad()
        model(goal).backward()
        optimizer.zero_grad()
        strategy.settle()
        assert strategy.steps == strategy.rounds == 1
        close(model.x, torch.full((4,), 0.5, dtype=torch.float64))


def coded(group, _):
    with attached(group, force_barrier=True, codec="fp16") as (model, optimizer, _):
        with torch.no_grad():
            model.x.fill_(1 / 3 + group.rank)
        optimizer.param_groups[0]["lr"] = 0.0
        step(model, optimizer, torch.zeros(4))
        error = (model.x.detach() - 5 / 6).abs().max()
        assert 0 < error < 1e-3


def averaged(group, _):
    """After a global average nothing older is mixed."""
    with attached(group, global_average_every=2) as (model, optimizer, strategy):
        for goal in targets(2, 2):
            step(model, optimizer, goal[group.rank])
        assert strategy.consensus_distance() < 1e-12
        before = model.x.detach().clone()
        group.barrier().wait()
        if group.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.0
            step(model, optimizer, torch.zeros(4))
            assert torch.equal(model.x, before)
        group.barrier().wait()


def side_by_side(group, _):
    """Two models in one group, and one after another."""
    with attached(group) as (one, first, _), attached(group) as (two, second, _):
        for _ in range(4):
            step(one, first, torch.full((4,), 1.0))
            step(two, second, torch.full((4,), -1.0))
        group.barrier().wait()
        assert one.x.min() > 0 > two.x.max()


def two_workers(group, _):
    for check in (with_barrier, takes_turns, skipped, coded, averaged, side_by_side):
        check(group, None)
        group.barrier().wait()


def test_rounds(workers):
    workers.run(two_workers, 2)
    workers.run(with_barrier, 5)


def lost(group, _):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = WindowAverage(group, topology="full", force_barrier=True)
    strategy.attach(model, optimizer)
    with torch.no_grad():
        model.x.fill_(group.rank)
    step(model, optimizer, torch.zeros(4))
    if group.rank == 0:
        group.close(ConnectionAbortedError())
        return None
    with torch.no_grad():
        model.x.fill_(group.rank)
    step(model, optimizer, torch.zeros(4))
    return model.x.mean().item()


def test_what_a_lost_peer_has_put_is_left_out(workers):
    first, *others = workers.run(lost, 3)
    assert first is None
    # each keeps the lost one's third
    assert [round(value, 6) for value in others] == [round(4 / 3, 6), round(5 / 3, 6)]
