"""Optimizers and schedules by name: the numbers that they promise, and names that are not known."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.experts.classes import OPTIMIZERS, TrainingSettings, make_optimizer, make_scheduler


def rates(num_steps, **options):
    settings = TrainingSettings(optimizer="sgd", lr=2.0, scheduler="linear", **options)
    optimizer = make_optimizer(nn.Linear(1, 1), settings)
    scheduler = make_scheduler(optimizer, settings)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_up_to_the_full_rate_and_down_to_nothing():
    assert rates(8, num_warmup_steps=2, num_training_steps=6) == pytest.approx(
        [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    )


def test_without_warm_up_it_begins_at_the_full_rate():
    assert rates(3, num_training_steps=4) == pytest.approx([2.0, 1.5, 1.0])


def test_warm_up_to_the_end():
    assert rates(4, num_warmup_steps=2, num_training_steps=2) == pytest.approx([0.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_every_optimizer_learns(name):
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    optimizer = make_optimizer(module, TrainingSettings(optimizer=name, lr=0.1, weight_decay=0.25))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert optimizer.param_groups[0]["fused"]
    losses = []
    for _ in range(5):
        loss = (module(torch.ones(4, 2)) - 3).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)


def test_what_has_no_fused_kernel_learns_too():
    module = nn.Linear(2, 1, dtype=torch.complex64)
    optimizer = make_optimizer(module, TrainingSettings())
    before = module.weight.detach().clone()
    module(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)


def test_nothing_to_train():
    frozen = nn.Linear(2, 1).requires_grad_(False)
    assert make_optimizer(nn.Identity(), TrainingSettings()) is None
    assert make_optimizer(frozen, TrainingSettings()) is None
    assert make_optimizer(nn.Linear(2, 1), TrainingSettings(optimizer="none")) is None


def test_no_schedule():
    optimizer = make_optimizer(nn.Linear(2, 1), TrainingSettings())
    assert make_scheduler(optimizer, TrainingSettings()) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"optimizer": "adamm"}, "Did you mean 'adam'"),
        ({"scheduler": "liner"}, "Did you mean 'linear'"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"clip_gradients": 0.5}, "clip_gradients"),
        ({"clip_gradients": float("nan")}, "clip_gradients"),
        ({"scheduler": "linear"}, "num_training_steps"),
        ({"scheduler": "linear", "num_warmup_steps": 3, "num_training_steps": 2}, "3 warm-up steps"),
    ],
)
def test_settings_that_make_no_sense(options, problem):
    with pytest.raises(UsageError, match=problem):
        TrainingSettings(**options)
