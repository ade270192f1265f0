"""What is remembered of parameters goes with a checkpoint, and begins anew with another number of workers."""

import pytest
import torch

from shoal.core import UsageError
from shoal.strategies import make_strategy
from strategies.bowls import RATE, Bowl, Bowls, everywhere
from strategies.fakes import Mirror


def train(name, size, num_steps, folder, *, should_load=False, saves_after=None):
    bowls = Bowls(size)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = make_strategy(group, name, topology="full")
        if should_load:
            strategy.load(folder)
        with strategy.attach(model, optimizer, stays=True):
            kept = strategy.state_dict()["kept"]
            while strategy.steps < num_steps:
                optimizer.zero_grad()
                bowls.backward(model, group.rank)
                optimizer.step()
                if strategy.steps == saves_after:
                    strategy.save(folder)
        return model.x.detach(), kept

    return everywhere(work, size)


@pytest.mark.parametrize("name", ["gradient-tracking", "exact-diffusion"])
def test_checkpoints(tmp_path, name):
    whole = train(name, 3, 6, tmp_path, saves_after=4)
    resumed = train(name, 3, 6, tmp_path, should_load=True)
    for (wanted, _), (got, kept) in zip(whole, resumed, strict=True):
        assert torch.equal(wanted, got)
        assert all(tensors["tail"].any() for tensors in kept.values())
    for _, kept in train(name, 2, 4, tmp_path, should_load=True):
        assert kept
        assert not any(tensor.any() for tensors in kept.values() for tensor in tensors.values())


def test_a_state_of_another_model():
    """Parameters that it does not know begin with zeros; another shape is an error."""
    strategy = make_strategy(Mirror(), "d2")
    known = {"strategy": "d2", "steps": 3, "rounds": 3}
    strategy.load_state_dict(
        {**known, "kept": {"correction": {"head": torch.ones(1), "gone": torch.ones(7)}}}
    )
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with strategy.attach(model, optimizer, stays=True):
        kept = strategy.state_dict()["kept"]["correction"]
    assert kept["head"].tolist() == [1]
    assert kept["tail"].tolist() == [0, 0]
    strategy.load_state_dict({**known, "kept": {"correction": {"tail": torch.ones(7)}}})
    with pytest.raises(UsageError, match=r"\[7\] for tail, whose shape is \[2\]"):
        strategy.attach(model, optimizer)
    assert strategy.state_dict()["kept"]["correction"]["tail"].tolist() == [1] * 7


def test_what_is_remembered_is_of_one_model():
    def work(group):
        strategy = make_strategy(group, "d2")
        told = []

        def train(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with strategy.attach(model, optimizer, stays=True):
                told.append(strategy.state_dict()["kept"]["correction"]["weight"].clone())
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.full((1, model.in_features), float(group.rank))).sum().backward()
                    optimizer.step()
            told.append(strategy.state_dict()["kept"]["correction"]["weight"])

        first = torch.nn.Linear(3, 1)
        for model in (first, first, torch.nn.Linear(4, 1)):
            train(model)
        return told

    for begun, ended, again, _, other, _ in everywhere(work, 2):
        assert not begun.any()
        assert ended.any()
        assert torch.equal(ended, again)
        assert other.shape == (1, 4)
        assert not other.any()


def test_after_the_end_a_state_is_that_of_the_end_and_not_one_that_was_loaded():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = make_strategy(Mirror(), "gradient-tracking", topology="full")

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    with strategy.attach(model, optimizer, stays=True):
        step()
        strategy.load_state_dict(strategy.state_dict())
        step()
        last = strategy.state_dict()["kept"]["tracker"]
    ended = strategy.state_dict()["kept"]["tracker"]
    assert all(torch.equal(ended[name], last[name]) for name in last)
