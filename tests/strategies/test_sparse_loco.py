"""`sparse-loco` against the algorithm, reckoned for all workers at once; its limits, what is kept."""

import statistics

import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.contest import run_job
from shoal.simulate.exact import run_exact
from shoal.simulate.job import TrainingJob
from shoal.simulate.world import World
from shoal.strategies.sparse_loco import SparseLoCo
from strategies.bowls import RATE, Bowl, Bowls, course, everywhere, step

PLACES = [0, 8, 9]
"""Where x lies among the 16 elements of its two parameters, each padded to 64 bytes."""
TWO_OF_SIXTEEN = 0.1
PERIOD = 3


def largest_two(rows):
    """In their places; two values have a magnitude each, in bfloat16."""
    places = rows.abs().topk(2, dim=1).indices
    return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places).bfloat16().double())


def reckoned(bowls, num_steps, *, decay, lr):
    """x of all workers after each step."""
    x = torch.zeros_like(bowls.targets)
    copy, kept = x[0], x
    for number in range(1, num_steps + 1):
        x = x - RATE * bowls.gradients(x)
        if number % PERIOD == 0:
            due = decay * kept + (copy - x)
            sent = largest_two(due)
            kept = due - sent
            copy = copy - lr * sent.mean(0)
            x = copy.expand_as(x)
        yield x


@pytest.mark.parametrize(("decay", "lr"), [(0.95, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("size", [2, 5])
def test_it_is_the_algorithm(size, decay, lr):
    options = {"density": TWO_OF_SIXTEEN, "error_decay": decay, "outer_lr": lr, "local_steps": PERIOD}
    got = course("sparse-loco", size, 12, **options)
    wanted = torch.stack(list(reckoned(Bowls(size), 12, decay=decay, lr=lr)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def rounds(bowls, size, num_rounds, **options):
    """Of each worker: the common copy before each round, and what it has kept after it."""

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = SparseLoCo(group, local_steps=PERIOD, density=TWO_OF_SIXTEEN, **options)
        copies, kept = [model.x.detach()], []
        with strategy.attach(model, optimizer, stays=True):
            for number in range(1, num_rounds * PERIOD + 1):
                step(model, optimizer, bowls, group.rank)
                if number % PERIOD == 0:
                    copies.append(model.x.detach())
                    (residual,) = strategy.codec.residuals.values()
                    kept.append(residual[PLACES].clone())
        return torch.stack(copies), torch.stack(kept)

    results = everywhere(work, size)
    for copies, _ in results:
        assert torch.equal(copies, results[0][0])  # to the bit
    return results[0][0], torch.stack([kept for _, kept in results]).mean(0)


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_its_limit_is_that_of_local_sgd_but_for_what_decays(decay):
    """The mean of its copies over the rounds; a copy itself moves about it, as workers disagree.

    PERIOD local steps take y to y − A_i (y − t_i), A_i = 1 − (1 − rate · H_i)^PERIOD, so that local SGD comes
    to rest at the y* where the mean of these differences is 0. What is sent and kept in all rounds sums to
    Σ mean A_i (y − t_i) = y_0 − y_R + e_R + (1 − decay) Σ e, where e is the mean of what workers keep.
    """
    size, num_rounds = 4, 250
    bowls = Bowls(size)
    copies, kept = rounds(bowls, size, num_rounds, error_decay=decay)
    eye = torch.eye(3, dtype=torch.float64)
    turns = eye - torch.linalg.matrix_power(eye - RATE * bowls.hessians, PERIOD)
    pulls = (turns @ bowls.targets[:, :, None]).mean(0)[:, 0]
    limit = torch.linalg.solve(turns.mean(0), pulls)
    learned = copies[0] - copies[-1] + kept[-1]
    forgotten = (1 - decay) * kept[:-1].sum(0)
    wanted = limit + torch.linalg.solve(turns.mean(0), (learned + forgotten) / num_rounds)
    torch.testing.assert_close(copies[:-1].mean(0), wanted, rtol=0, atol=1e-9)
    far = (copies[:-1].mean(0) - limit).norm() / (bowls.targets - limit).norm(dim=1).max()
    assert far < (0.02 if decay == 1 else 0.2)


def test_workers_with_one_problem_reach_its_optimum():
    """There nothing is left to learn, and what was kept is sent or decays."""
    bowls = Bowls(1)
    bowls.hessians, bowls.targets = (
        each.expand(3, *each.shape[1:]) for each in (bowls.hessians, bowls.targets)
    )
    copies, kept = rounds(bowls, 3, 80)
    assert (copies[-1] - bowls.optimum).norm() < 1e-9 * bowls.optimum.norm()
    assert kept[-1].norm() < 1e-9


@pytest.mark.parametrize("density", [0.0001, 1.0])
def test_any_density_learns(density):
    """Of few values, and of all in two bits each, gaps between parameters included."""
    got = course("sparse-loco", 3, 240, density=density, local_steps=2)
    bowls = Bowls(3)
    copies = got[1::2]
    assert bowls.distance(copies[-60:].mean(0)) < 0.2 * bowls.optimum.norm()


@pytest.mark.slow
def test_it_learns_as_well_as_local_sgd_with_a_fiftieth_of_its_bytes():
    """Both as they are by default, each with the best of the learning rates 0.05, 0.1 and 0.2."""

    def end_of(strategy, seed, learning_rate):
        sizes = {"num_workers": 4, "steps": 480, "eval_every": 480, "seed": seed}
        job = TrainingJob(task="digits", strategy=strategy, learning_rate=learning_rate, **sizes)
        return run_job(job, World(num_workers=4, seed=seed)).moments[-1]

    dense = [end_of("local-sgd", seed, 0.2) for seed in range(3)]
    sparse = [end_of("sparse-loco", seed, 0.1) for seed in range(3)]
    for one, other in zip(dense, sparse, strict=True):
        assert other.moved_bytes <= one.moved_bytes / 50
    accuracy = statistics.mean(moment.value for moment in dense)
    assert statistics.mean(moment.value for moment in sparse) == pytest.approx(accuracy, abs=0.01)


def test_the_last_round_makes_models_equal_to_the_bit():
    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with SparseLoCo(group, local_steps=4).attach(model, optimizer):
            for _ in range(6):
                step(model, optimizer, Bowls(3), group.rank)
            before = model.x.detach()
        return before, model.x.detach()

    before, after = zip(*everywhere(work, 3), strict=True)
    assert not torch.equal(before[0], before[1])
    assert all(torch.equal(each, after[0]) for each in after)


def test_a_global_average_moves_the_copies_along():
    got = course("sparse-loco", 3, 8, local_steps=2, global_average_every=2)
    assert torch.equal(got, course("sparse-loco", 3, 8, local_steps=2))


def test_the_others_go_on_when_one_is_lost():
    bowls = Bowls(4)

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with SparseLoCo(worker.group, local_steps=2, density=TWO_OF_SIXTEEN).attach(model, optimizer):
            for number in range(60):
                if worker.rank == 2 and number == 3:
                    raise UsageError("enough")
                step(model, optimizer, bowls, worker.rank)
        return model.x.detach()

    outcomes = run_exact(World(num_workers=4), work)
    left = [0, 1, 3]
    assert [outcome.error is None for outcome in outcomes] == [rank in left for rank in range(4)]
    pulls = (bowls.hessians[left] @ bowls.targets[left, :, None]).sum(0)[:, 0]
    optimum = torch.linalg.solve(bowls.hessians[left].sum(0), pulls)
    for rank in left:
        assert torch.equal(outcomes[rank].value, outcomes[0].value)
        assert (outcomes[rank].value - optimum).norm() < 0.3 * optimum.norm()


def test_it_goes_on_from_its_state_in_the_middle_of_a_period():
    bowls, options = Bowls(3), {"local_steps": PERIOD, "density": TWO_OF_SIXTEEN}
    wanted = course("sparse-loco", 3, 12, **options)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        state = values = None
        for num_steps in (7, 5):
            strategy = SparseLoCo(group, **options)
            if state is not None:
                strategy.load_state_dict(state)
                model.load_state_dict(values)
            with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
                for _ in range(num_steps):
                    step(model, optimizer, bowls, group.rank)
                state = strategy.state_dict()
                values = {name: value.clone() for name, value in model.state_dict().items()}
        return model.x.detach()

    assert torch.equal(torch.stack(everywhere(work, 3)), wanted[-1])


@pytest.mark.parametrize(
    ("option", "value"), [("density", 0), ("density", 1.5), ("error_decay", -0.1), ("outer_lr", 0)]
)
def test_options_that_do_not_fit_are_refused(option, value):
    with pytest.raises(UsageError, match="does not fit"):
        SparseLoCo(**{option: value})
