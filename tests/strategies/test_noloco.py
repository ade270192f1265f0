"""`noloco` against the algorithm, reckoned for all workers at once; its limit, odd numbers, losses."""

import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies.noloco import NoLoCo
from strategies.bowls import RATE, Bowl, Bowls, course, everywhere, step

PERIOD = 3


def mixing(size, round_number, seed=0, gone=()):
    """The mean of each pair as a matrix; who is left over, or has a partner that is gone, keeps its own."""
    generator = torch.Generator().manual_seed((seed << 32) + round_number)
    order = torch.randperm(size, generator=generator).tolist()
    matrix = torch.eye(size, dtype=torch.float64)
    for pair in zip(order[::2], order[1::2], strict=False):
        if not set(pair) & set(gone):
            for one in pair:
                matrix[one, list(pair)] = 0.5
    return matrix


def reckoned(bowls, num_steps, *, lr=0.7, momentum=0.5, pull=1.0, seed=0, gone=()):
    """x of all workers after each step."""
    size = len(bowls.targets)
    x = torch.zeros_like(bowls.targets)
    slow, velocity = x, x
    for number in range(1, num_steps + 1):
        x = x - RATE * bowls.gradients(x)
        if number % PERIOD == 0:
            mean = mixing(size, number // PERIOD - 1, seed, gone)
            velocity = momentum * velocity + lr * mean @ (x - slow) - pull * (slow - mean @ slow)
            slow = slow + velocity
            x = slow
        yield x


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, {}),
        (
            {"outer_lr": 0.5, "outer_momentum": 0.3, "pull": 0.6, "seed": 9},
            {"lr": 0.5, "momentum": 0.3, "pull": 0.6, "seed": 9},
        ),
    ],
)
def test_it_is_the_algorithm(size, options, rule):
    """With an odd number, too, where one is left over in each round."""
    num_steps = 14  # no last round comes before the rows are taken
    got = course("noloco", size, num_steps, local_steps=PERIOD, **options)
    wanted = torch.stack(list(reckoned(Bowls(size), num_steps, **rule)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def alike(size):
    """Bowls of one shape, whose targets differ: all of them together are least at the mean target."""
    bowls = Bowls(size)
    bowls.hessians = bowls.hessians[:1].expand(size, -1, -1)
    bowls.optimum = bowls.targets.mean(0)
    return bowls


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_of_all_goes_to_the_optimum_whoever_meets(size, seed):
    """In pairs what is learned is averaged, and what pulls one up pulls the other down.

    So the mean of the slow weights is that of one worker with the mean target: δ ← α δ + β A (t − φ),
    φ ← φ + δ, with A = 1 − (1 − rate · H)^PERIOD. Workers themselves stay apart, as each has its own target.
    """
    bowls, num_rounds = alike(size), 40

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = NoLoCo(group, local_steps=PERIOD, seed=seed)
        rows = []
        with strategy.attach(model, optimizer, stays=True):
            for number in range(1, num_rounds * PERIOD + 1):
                step(model, optimizer, bowls, group.rank)
                if number % PERIOD == 0:
                    rows.append(model.x.detach())
        return torch.stack(rows), model.x.detach()

    results = everywhere(work, size)
    rows = torch.stack([rows for rows, _ in results])
    eye = torch.eye(3, dtype=torch.float64)
    learned = eye - torch.linalg.matrix_power(eye - RATE * bowls.hessians[0], PERIOD)
    slow = velocity = torch.zeros(3, dtype=torch.float64)
    for row in rows.mean(0):
        velocity = 0.5 * velocity + 0.7 * learned @ (bowls.optimum - slow)
        slow = slow + velocity
        torch.testing.assert_close(row, slow, rtol=0, atol=1e-12)
    assert (slow - bowls.optimum).norm() < 1e-4
    apart = (rows[:, -1] - slow).norm(dim=1).max()
    assert 0 < apart < (bowls.targets - bowls.optimum).norm(dim=1).max()
    for _, model in results:  # the end makes all of them the mean
        torch.testing.assert_close(model, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [4, 7])
def test_workers_that_learn_nothing_come_together(size):
    """By pairs alone, and where they have their mean."""

    def work(group):
        model = Bowl()
        with torch.no_grad():
            model.head.fill_(group.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = NoLoCo(group, local_steps=1)
        with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
            for _ in range(120):
                step(model, optimizer, Bowls(size), group.rank)
            return model.head.item()

    assert everywhere(work, size) == pytest.approx([(size - 1) / 2] * size, abs=1e-4)


def test_who_finds_its_partner_lost_steps_alone():
    bowls, options = Bowls(4), {"local_steps": PERIOD}

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        rows = []
        with NoLoCo(worker.group, **options).attach(model, optimizer):
            for _ in range(10):
                if worker.rank == 2:
                    raise UsageError("enough")
                step(model, optimizer, bowls, worker.rank)
                rows.append(model.x.detach())
        return torch.stack(rows), model.x.detach()

    outcomes = run_exact(World(num_workers=4), work)
    left = [0, 1, 3]
    assert [outcome.error is None for outcome in outcomes] == [rank in left for rank in range(4)]
    got = torch.stack([outcomes[rank].value[0] for rank in left], 1)
    wanted = torch.stack(list(reckoned(bowls, 10, gone=[2])))[:, left]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    for rank in left:
        torch.testing.assert_close(outcomes[rank].value[1], wanted[-1].mean(0), rtol=0, atol=1e-12)


def test_a_global_average_moves_the_slow_weights_along():
    got = course("noloco", 4, 7, local_steps=PERIOD, global_average_every=2)
    assert not torch.allclose(got[2], got[2, :1].expand(4, -1))
    torch.testing.assert_close(got[5], got[5, :1].expand(4, -1), rtol=0, atol=1e-12)
    torch.testing.assert_close(got[6], got[5] - RATE * Bowls(4).gradients(got[5]), rtol=0, atol=1e-12)


def test_it_goes_on_from_its_state_in_the_middle_of_a_period():
    bowls, options = Bowls(3), {"local_steps": PERIOD}
    wanted = course("noloco", 3, 11, **options)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        state = values = None
        for num_steps in (7, 4):
            strategy = NoLoCo(group, **options)
            if state is not None:
                strategy.load_state_dict(state)
                model.load_state_dict(values)
            with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
                for _ in range(num_steps):
                    step(model, optimizer, bowls, group.rank)
                state = strategy.state_dict()
                values = {name: value.clone() for name, value in model.state_dict().items()}
        return values["head"], values["tail"]

    assert torch.equal(torch.stack([torch.cat(each) for each in everywhere(work, 3)]), wanted[-1])


def test_a_second_training_of_the_model_begins_where_the_first_has_ended():
    """The end has made models and slow weights the mean, so nothing pulls them back."""

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = NoLoCo(group, local_steps=PERIOD)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(4):
                step(model, optimizer, Bowls(3), group.rank)
        with strategy.attach(model, optimizer, stays=True):
            slow = {name: value.clone() for name, value in strategy.slow.items()}
        return (torch.cat([slow["head"], slow["tail"]]) - model.x.detach()).abs().max().item()

    assert max(everywhere(work, 3)) < 1e-12
