"""`sgp`: the algorithm on a directed irregular graph, the mean that plain averaging misses, who is lost."""

import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from shoal.strategies.sgp import StochasticGradientPush
from shoal.topology import from_matrix, one_peer_exponential
from strategies.bowls import RATE, Bowl, Bowls, course, everywhere


def irregular(size):
    """Everybody sends to rank 0 and to the next one: edges[i, j] is 1 where j sends to i."""
    edges = torch.eye(size, dtype=torch.float64)
    edges[0] = 1
    for rank in range(size):
        edges[(rank + 1) % size, rank] = 1
    return edges


def topology(size):
    edges = irregular(size)
    return from_matrix((edges / edges.sum(1, keepdim=True)).numpy())


def start(rank):
    return torch.tensor([rank, 2.0 * rank, -1.0 * rank], dtype=torch.float64)


def put(model, values):
    with torch.no_grad():
        model.head.copy_(values[:1])
        model.tail.copy_(values[1:])


def step(model, optimizer, bowls, rank):
    optimizer.zero_grad()
    bowls.backward(model, rank)
    optimizer.step()


def matrices(kind, size):
    if kind == "irregular":
        columns = irregular(size)
        return lambda turn: columns / columns.sum(0)
    plan = one_peer_exponential(size)
    return lambda turn: torch.from_numpy(plan.matrix(turn))


@pytest.mark.parametrize(("kind", "size"), [("irregular", 4), ("one peer", 5)])
def test_it_is_the_algorithm(kind, size):
    options = {"topology": topology(size)} if kind == "irregular" else {}
    got = course("sgp", size, 7, **options)
    bowls, columns = Bowls(size), matrices(kind, size)
    sums = torch.zeros(size, 3, dtype=torch.float64)
    mass = torch.ones(size, 1, dtype=torch.float64)
    for number in range(7):
        sums = columns(number) @ (sums - RATE * bowls.gradients(sums / mass))
        mass = columns(number) @ mass
        torch.testing.assert_close(got[number], sums / mass, rtol=0, atol=1e-12)
    assert (mass.max() / mass.min() > 1.5) == (kind == "irregular")


def mixed(name, size, num_rounds):
    """What comes of unequal parameters when nothing is learned, on a directed irregular graph."""
    bowls, graph = Bowls(size), topology(size)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = make_strategy(group, name, topology=graph)
        with strategy.attach(model, optimizer, stays=True):
            put(model, start(group.rank))
            for _ in range(num_rounds):
                step(model, optimizer, bowls, group.rank)
        return model.x.detach()

    return torch.stack(everywhere(work, size))


def test_all_agree_on_the_mean_where_plain_averaging_does_not():
    mean = torch.stack([start(rank) for rank in range(5)]).mean(0)
    torch.testing.assert_close(mixed("sgp", 5, 45), mean.expand(5, -1), rtol=0, atol=1e-6)
    biased = mixed("neighbor", 5, 45)
    torch.testing.assert_close(biased, biased[:1].expand(5, -1), rtol=0, atol=1e-6)
    assert (biased[0] - mean).norm() > 0.5


def test_as_the_rate_falls_it_comes_to_the_optimum_and_plain_averaging_to_another_point():
    bowls = Bowls(4)

    def far(name):
        def work(group):
            model = Bowl()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number / 8))
            with make_strategy(group, name, topology=topology(4)).attach(model, optimizer, stays=True):
                for _ in range(60):
                    step(model, optimizer, bowls, group.rank)
                    rate.step()
            return model.x.detach()

        return (torch.stack(everywhere(work, 4)).mean(0) - bowls.optimum).norm().item()

    assert far("sgp") < 0.1 * far("neighbor")


def test_a_global_average_counts_by_weight():
    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = StochasticGradientPush(group, topology=topology(4), global_average_every=3)
        with strategy.attach(model, optimizer, stays=True):
            put(model, start(group.rank))
            for _ in range(3):
                step(model, optimizer, Bowls(4), group.rank)
            assert strategy.weight == strategy.stats["weight"] == 1
        return model.x.detach()

    mean = torch.stack([start(rank) for rank in range(4)]).mean(0)
    torch.testing.assert_close(torch.stack(everywhere(work, 4)), mean.expand(4, -1), rtol=0, atol=1e-12)


def test_the_others_go_on_when_one_is_lost():
    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = StochasticGradientPush(worker.group, topology=topology(4))
        with strategy.attach(model, optimizer, stays=True):
            put(model, start(worker.rank))
            for number in range(40):
                if worker.rank == 2 and number == 2:
                    raise UsageError("enough")
                step(model, optimizer, Bowls(4), worker.rank)
        return strategy.weight, model.x.detach()

    outcomes = run_exact(World(num_workers=4), work)
    weights, values = zip(*(outcomes[rank].value for rank in (0, 1, 3)), strict=True)
    assert 0.2 < min(weights) < max(weights) < 3
    assert (torch.stack(values)[:2] - values[0]).norm() < 0.1
    assert all(0 < value[0] < 3 for value in values)


def test_the_weight_is_part_of_the_state_and_the_common_model_is_the_mean_over_weights():
    bowls, wanted = Bowls(4), course("sgp", 4, 6, topology=topology(4))

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = StochasticGradientPush(group, topology=topology(4))
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
            state = strategy.state_dict()
            common = torch.cat([strategy.common_model(strategy.session)[name] for name in ("head", "tail")])
            parts = group.all_gather(torch.cat([model.x.detach() * strategy.weight])).wait()
            torch.testing.assert_close(common, torch.stack(parts).mean(0), rtol=0, atol=1e-12)
        resumed = StochasticGradientPush(group, topology=topology(4))
        resumed.load_state_dict(state)
        with resumed.attach(model, optimizer, stays=True, should_start_equal=False):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
        other = StochasticGradientPush(group, topology=topology(4))
        other.load_common_state(state)
        assert other.weight == 1
        assert other.rounds == 3
        return model.x.detach()

    assert torch.equal(torch.stack(everywhere(work, 4)), wanted[-1])
