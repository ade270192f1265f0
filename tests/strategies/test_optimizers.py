"""Optimizers at the start: a checkpoint on rank 0 alone, and optimizers that are built in other ways."""

import logging

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.strategies import make_strategy

OPTIMIZERS = {
    "momentum": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
    "adam": lambda model, lr: torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 2 * lr}], lr=lr
    ),
    "lbfgs": lambda model, lr: torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=2),
}


def make(kind, *, seed=0, lr=0.1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(3, 2)).to(torch.float64)
    return model, OPTIMIZERS[kind](model, lr)


def train(model, optimizer, num_steps):
    """The same on all workers."""
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(9)).double()

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(num_steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def checkpoint_on_rank_0(group, _):
    for name, kind in (("all-reduce", "momentum"), ("all-reduce", "adam"), ("ddp", "adam"), ("sma", "lbfgs")):
        plain, its_optimizer = make(kind)
        train(plain, its_optimizer, 5)
        model, optimizer = make(kind, seed=group.rank, lr=0.1 if group.rank == 0 else 0.5)
        if group.rank == 0:
            train(model, optimizer, 2)
        with make_strategy(group, name).attach(model, optimizer, stays=True):
            train(model, optimizer, 3)
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
        groups = [optimizer.param_groups, its_optimizer.param_groups]
        for mine, wanted in zip(*groups, strict=True):
            del mine["params"], wanted["params"]
            assert mine == wanted


def test_state_and_settings_of_rank_0_are_everybodys(workers):
    workers.run(checkpoint_on_rank_0, 2)


def refused(group, _):
    """What each worker is told; the same on all."""
    is_odd = group.rank == 1

    def attach(model, optimizer, name="all-reduce", **state):
        strategy = make_strategy(group, name)
        if state:
            strategy.load_state_dict({"strategy": name, **state})
        with strategy.attach(model, optimizer, stays=True):
            train(model, optimizer, 1)

    told = []
    odd_rate = make("adam", lr=0.5 if is_odd else 0.1)
    loaded = make("momentum")
    if is_odd:
        train(*loaded, 1)
    reversed_model, _ = make("momentum")
    parameters = list(reversed_model.parameters())
    odd_order = reversed_model, torch.optim.SGD(parameters[::-1] if is_odd else parameters)
    cases = [(odd_rate, {}), (loaded, {}), (odd_order, {"name": "neighbor"})]
    cases.append((make("momentum"), {"name": "neighbor", "steps": group.rank, "rounds": 0}))
    for (model, optimizer), options in cases:
        with pytest.raises(UsageError) as caught:
            attach(model, optimizer, **options)
        told.append(caught.value.what)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shoal.strategies").addHandler(handler)
    attach(*odd_rate, name="neighbor")
    logging.getLogger("shoal.strategies").removeHandler(handler)
    assert odd_rate[1].param_groups[0]["lr"] == (0.5 if is_odd else 0.1)
    return [told, lines]


def test_what_would_drift_apart_is_refused(workers):
    (told, lines), *others = workers.run(refused, 2)
    rate = "the optimizer of rank 1 has lr 0.5 in group 0, that of rank 0 0.1"
    assert told == [
        f"{rate}: the replicas would drift apart.",
        "the optimizer of rank 1 has state, that of rank 0 has none: the replicas would drift apart.",
        "the optimizer of rank 1 has other parameters, or others first, than that of rank 0.",
        "neighbor on rank 1 has done 1 steps and 0 rounds, on rank 0 0 and 0.",
    ]
    assert lines == [rate]
    assert others == [[told, []]]
