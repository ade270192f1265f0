"""`relay` against the algorithm with its counters, reckoned for all at once; its limit; who leaves."""

import logging

import pytest
import torch

from shoal.core import PeerLost, UsageError
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies.relay import RelaySGD
from shoal.topology.graphs import branches
from strategies.bowls import RATE, Bowl, Bowls, after_a_step, course, everywhere, step


def reckoned(tree, size, num_steps, restarts=()):
    """By messages and counters; what has not come is the model of the start."""
    bowls, neighbors = Bowls(size), [[branch.partner for branch in own] for own in branches(tree, size)]
    x = torch.zeros(size, 3, dtype=torch.float64)
    start, sums, counts = x[0], {}, {}
    rows = []
    for number in range(num_steps):
        half = x - RATE * bowls.gradients(x)
        edges = [(i, j) for i in range(size) for j in neighbors[i]]
        rest = {(i, j): [(k, i) for k in neighbors[i] if k != j and (k, i) in sums] for i, j in edges}
        sums, counts = (
            {(i, j): half[i] + sum(sums[edge] for edge in rest[i, j]) for i, j in edges},
            {(i, j): 1 + sum(counts[edge] for edge in rest[i, j]) for i, j in edges},
        )
        num_there = [1 + sum(counts[j, i] for j in neighbors[i]) for i in range(size)]
        x = torch.stack(
            [
                (half[i] + sum(sums[j, i] for j in neighbors[i]) + (size - num_there[i]) * start) / size
                for i in range(size)
            ]
        )
        if number in restarts:
            start = x.mean(0)
            x, sums, counts = start.expand(size, -1), {}, {}
        rows.append(x)
    return torch.stack(rows)


@pytest.mark.parametrize("tree", ["binary", "chain"])
def test_it_is_the_algorithm(tree):
    got = course("relay", 6, 7, tree=tree)
    torch.testing.assert_close(got, reckoned(tree, 6, 7), rtol=0, atol=1e-12)


def test_after_a_global_average_nothing_older_counts():
    got = course("relay", 4, 6, tree="chain", global_average_every=3)
    torch.testing.assert_close(got, reckoned("chain", 4, 6, restarts=(2, 5)), rtol=0, atol=1e-12)


def test_it_reaches_the_optimum_of_workers_that_differ():
    assert Bowls(4).distance(course("relay", 4, 120)[-1]) < 1e-9
    assert Bowls(4).distance(course("neighbor", 4, 60, topology="ring")[-1]) > 1e-2


def test_the_parts_of_a_tree_go_on_when_a_worker_leaves(caplog):
    bowls = Bowls(4)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with RelaySGD(group, tree="chain").attach(model, optimizer):
            for _ in range(3 if group.rank == 2 else 80):
                step(model, optimizer, bowls, group.rank)
        return model.x.detach()

    with caplog.at_level(logging.WARNING):
        first, second, _, last = everywhere(work, 4)
    pulls = (bowls.hessians[:2] @ bowls.targets[:2, :, None]).sum(0)[:, 0]
    optimum = torch.linalg.solve(bowls.hessians[:2].sum(0), pulls)
    torch.testing.assert_close(torch.stack([first, second]), optimum.expand(2, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(last, bowls.targets[3], rtol=0, atol=1e-2)
    told = [record for record in caplog.records if "rank 2 has left" in record.getMessage()]
    assert len(told) == 2


def test_a_lost_peer_ends_it():
    bowls = Bowls(3)

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with RelaySGD(worker.group).attach(model, optimizer):
            for number in range(6):
                if worker.rank == 2 and number == 2:
                    raise UsageError("enough")
                step(model, optimizer, bowls, worker.rank)

    first, second, _ = run_exact(World(num_workers=3), work)
    assert isinstance(first.error, PeerLost)
    assert "rank 2" in str(first.error)
    assert isinstance(second.error, PeerLost)


def test_it_goes_on_from_its_state():
    bowls, wanted = Bowls(5), course("relay", 5, 6)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = RelaySGD(group)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
        state = strategy.state_dict()
        resumed = RelaySGD(group)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["relayed"] is state["relayed"]
        with resumed.attach(model, optimizer, stays=True, should_start_equal=False):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
        return model.x.detach()

    assert torch.equal(torch.stack(everywhere(work, 5)), wanted[-1])


def test_a_state_of_another_place_does_not_count():
    def work(group):
        model, optimizer, state = after_a_step(RelaySGD(group))
        relayed = state["relayed"]
        for place in ({"rank": 3 - group.rank, "counts": [], "means": []}, {"tree": "chain"}, {"size": 5}):
            resumed = RelaySGD(group)
            resumed.load_state_dict({**state, "relayed": {**relayed, **place}})
            with resumed.attach(model, optimizer, stays=True, should_start_equal=False):
                begun = resumed.state_dict()["relayed"]
            assert begun["counts"] == relayed["counts"]
            assert all(torch.equal(mean["tail"], model.tail) for mean in begun["means"])
        return True

    assert all(everywhere(work, 4))
