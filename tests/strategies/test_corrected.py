"""The bias of plain averaging, local steps, states, and members that leave or are lost."""

import pytest
import torch
from torch import nn

from shoal.core import DeadlineExceeded, PeerLost
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from strategies.bowls import RATE, Bowl, Bowls, course, everywhere

SIZE = 4


def test_plain_averaging_stops_at_its_bias():
    bowls = Bowls(SIZE)
    before, after = course("neighbor", SIZE, 30, topology="ring")[[-5, -1]]
    assert bowls.distance(before) == pytest.approx(bowls.distance(after), rel=1e-3)
    assert bowls.distance(after) > 1e-3


@pytest.mark.parametrize("name", ["d2", pytest.param("extra", marks=pytest.mark.slow)])
def test_rounding_does_not_add_up(name):
    """In single precision, far from zero, where the sum of all corrections would grow with every round."""
    targets = 10 + torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def work(group):
        model = nn.Linear(8, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        strategy = make_strategy(group, name, topology="full")
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(3000):
                model.weight.grad = model.weight.detach() - targets[group.rank]
                optimizer.step()
            correction = strategy.state_dict()["kept"]["correction"]["weight"]
        return model.weight.detach()[0], correction

    ends, corrections = map(torch.stack, zip(*everywhere(work, 3), strict=True))
    assert corrections.abs().max() > 1e-3
    assert corrections.sum(0).abs().max() < 1e-6
    assert (ends - targets.mean(0)).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["exact-diffusion", "extra"])
def test_local_steps_have_the_same_limit(name):
    rows = course(name, 3, 40, local_steps=2, topology="full")
    assert Bowls(3).distance(rows[-1]) < 1e-3
    assert rows[4].std(0).max() > 1e-2  # a local step between rounds


@pytest.mark.parametrize("name", ["d2", "extra", "gradient-tracking"])
def test_resumed_from_a_state(name):
    whole, parts = course(name, 3, 8), course(name, 3, 8, resumes=[5])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("name", ["exact-diffusion", "extra", "gradient-tracking"])
def test_a_step_that_a_fused_optimizer_leaves_out(name):
    """A GradScaler has it called with an inf, where it skips the step of another optimizer itself."""

    def work(group):
        rows = []
        for fused in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            strategy = make_strategy(group, name, topology="full")
            with strategy.attach(model, optimizer, stays=True):
                for number in range(6):
                    optimizer.zero_grad()
                    loss = model(torch.ones(1, 2) * (1 + number + group.rank) / 4).square().sum()
                    scaler.scale(loss * (torch.inf if (number, group.rank) == (2, 0) else 1)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    strategy.settle()
            rows.append(model.weight.detach().clone())
        return torch.stack(rows)

    for skipped, left_out in everywhere(work, 2):
        assert skipped.isfinite().all()
        torch.testing.assert_close(skipped, left_out)


@pytest.mark.parametrize("name", ["d2", "extra"])
def test_a_global_average_puts_right_what_a_leaving_worker_takes_along(name):
    bowls = Bowls(SIZE)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = make_strategy(group, name, topology="ring", global_average_every=6)
        sums = []
        with strategy.attach(model, optimizer):
            for number in range(3 if group.rank == 3 else 6):
                optimizer.zero_grad()
                bowls.backward(model, group.rank)
                optimizer.step()
                sums.append(strategy.state_dict()["kept"]["correction"]["tail"])
                if number == 5:
                    assert strategy.consensus_distance() < 1e-12
        return sums

    courses = everywhere(work, SIZE)
    before, after = (sum(sums[number] for sums in courses[:3]) for number in (4, 5))
    assert before.abs().max() > 1e-3
    assert after.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "is_survived"), [("d2", False), ("gradient-tracking", False), ("momentum", True)]
)
def test_a_lost_peer(name, is_survived):
    bowls = Bowls(3)

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        strategy = make_strategy(worker.group, name)
        with strategy.attach(model, optimizer):
            for number in range(4):
                if worker.rank == 2 and number == 2:
                    raise DeadlineExceeded("the end of this worker")
                optimizer.zero_grad()
                bowls.backward(model, worker.rank)
                optimizer.step()
        return strategy.rounds

    *others, _ = run_exact(World(num_workers=3), work)
    for outcome in others:
        assert outcome.value == (4 if is_survived else None)
        assert is_survived or isinstance(outcome.error, PeerLost)
