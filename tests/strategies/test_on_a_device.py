"""What strategies do otherwise where the model is on a GPU, tried on the CPU by a group that pretends."""

import pytest
import torch
from torch import nn

from shoal.strategies import make_strategy, session
from strategies.fakes import Mirror
from strategies.test_nonfinite import lines_of


class Elsewhere(Mirror):
    """Memory of any device is memory of the CPU."""

    def empty(self, num_elements, dtype=torch.float32, *, device=None):
        return super().empty(num_elements, dtype)


@pytest.fixture(autouse=True)
def pretended_device(monkeypatch):
    monkeypatch.setattr(session, "device_of", lambda *_, **__: torch.device("meta"))


class Heads(nn.Module):
    """Two heads on one body, of which a forward may use one alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x, used=(0, 1)):
        return sum(self.heads[index](self.body(x)).sum() for index in used)


def learn(model, optimizer, used=(0, 1), *, is_skipped=False):
    optimizer.zero_grad()
    model(torch.ones(3, 4), used).backward()
    if not is_skipped:
        optimizer.step()


@pytest.mark.parametrize("name", ["local-sgd", "neighbor", "all-reduce"])
def test_steps_are_counted_whichever_parameters_a_pass_has_used(name):
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = make_strategy(Elsewhere(), name)
    with strategy.attach(model, optimizer):
        for _ in range(8):  # all of them come, in every pass
            learn(model, optimizer)
        assert strategy.steps == 8
        learn(model, optimizer, is_skipped=True)
        learn(model, optimizer)
        assert strategy.steps == 10
        for used in ((0,), (1,), (0,), (1,)):  # whichever was watched, one of the heads is without it
            learn(model, optimizer, used)
            learn(model, optimizer, used, is_skipped=True)
        learn(model, optimizer)
        assert strategy.steps == 19


def test_gradients_are_copied_at_once_and_flags_tell_of_unused_ones():
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group = Elsewhere()
    strategy = make_strategy(group, "all-reduce")
    with strategy.attach(model, optimizer):
        for used in ((0, 1), (0,), (0, 1), (1,)):
            optimizer.zero_grad()
            model(torch.ones(3, 4), used).backward()
            for index, head in enumerate(model.heads):
                assert (head.weight.grad is not None) == (index in used)
                if index in used:
                    assert torch.equal(head.bias.grad, torch.full((2,), 3.0))
            optimizer.step()
    assert group.calls.count("all_reduce") == 4


@pytest.mark.parametrize("name", ["local-sgd", "all-reduce"])
@pytest.mark.parametrize("num_steps", [12, 700])
def test_who_had_a_nan_first_is_told_with_its_step(name, num_steps):
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = make_strategy(Elsewhere(), name)
    with lines_of() as lines, strategy.attach(model, optimizer):
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4))
            (loss * float("nan") if step == 5 else loss).backward()
            optimizer.step()
        told = list(lines)
    assert bool(told) == (num_steps == 700)  # the steps of a while are looked at together
    assert [line for line in lines if line.startswith("rank 0 sent a value that is not finite in step 5 ")]


def test_gradients_that_are_zeroed_in_place_are_looked_at_in_every_step():
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = make_strategy(Elsewhere(), "local-sgd")
    with lines_of() as lines, strategy.attach(model, optimizer):
        for step in range(12):
            optimizer.zero_grad(set_to_none=False)
            loss = model(torch.ones(3, 4))
            (loss * float("nan") if step == 11 else loss).backward()
            optimizer.step()
    assert [line for line in lines if line.startswith("rank 0 sent a value that is not finite in step 11 ")]


def test_pair_averaging_keeps_the_model_before_the_last():
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = make_strategy(Elsewhere(), "pair")
    places = set()
    with strategy.attach(model, optimizer):
        for _ in range(6):
            learn(model, optimizer)
            places.add(model.body.weight.data_ptr())
    assert len(places) == 3
