"""`extra`: the recursion, its limit, parameters that are written meanwhile, and eigenvalues."""

import pytest
import torch

from shoal.core import UsageError
from shoal.strategies.extra import Extra
from shoal.topology import make_topology
from strategies.bowls import RATE, Bowl, Bowls, course, everywhere
from strategies.fakes import Wide

SIZE = 4


def extra(bowls, mixing, num_steps):
    """By the textbook: `x ← (I + W)x − (I + W)/2·x' − lr·(g − g')`."""
    rows = [torch.zeros_like(bowls.targets)]
    rows.append(mixing @ rows[0] - RATE * bowls.gradients(rows[0]))
    for _ in range(num_steps - 1):
        change = bowls.gradients(rows[-1]) - bowls.gradients(rows[-2])
        both = rows[-1] - rows[-2] / 2
        rows.append(both + mixing @ both - RATE * change)
    return torch.stack(rows[1:])


def test_the_recursion_and_its_limit():
    """A skipped step moves nobody who has arrived."""
    bowls = Bowls(SIZE)
    rows = course("extra", SIZE, 112, skips=[105], topology="ring")
    mixing = torch.from_numpy(make_topology("ring", SIZE).matrix())
    torch.testing.assert_close(rows[:10], extra(bowls, mixing, 10), rtol=0, atol=1e-12)
    assert bowls.distance(rows[-1]) < 1e-9


def test_parameters_that_are_written_meanwhile_win():
    bowls = Bowls(2)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = Extra(group)
        with strategy.attach(model, optimizer, stays=True):
            loss = model(bowls.hessians[group.rank], bowls.targets[group.rank])
            loss.backward()
            with torch.no_grad():
                model.tail.fill_(group.rank)
            optimizer.step()
            return model.tail.tolist(), strategy.state_dict()["kept"]["correction"]["tail"].tolist()

    assert everywhere(work, 2) == [([0, 0], [0, 0]), ([1, 1], [0, 0])]


def test_who_writes_its_parameters_once_comes_to_the_optimum_all_the_same():
    bowls = Bowls(3)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with Extra(group, topology="full").attach(model, optimizer, stays=True):
            for number in range(80):
                optimizer.zero_grad()
                bowls.backward(model, group.rank)
                if number == 5 and group.rank == 0:
                    with torch.no_grad():
                        model.tail.add_(1)
                optimizer.step()
        return model.x.detach()

    assert bowls.distance(torch.stack(everywhere(work, 3))) < 1e-6


def test_workers_that_swap_for_ever_are_refused():
    with pytest.raises(UsageError, match="eigenvalues above −1, and"):
        Extra(Wide(2), topology=[[0, 1], [1, 0]])
