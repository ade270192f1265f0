"""Gradient noise scale and variance, against what one worker computes from all gradients."""

import pytest
import torch
from torch import nn

from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.monitors import Monitors
from strategies.fakes import Mirror


def expected(gradients, batch_size):
    """Of one step: a list of a worker's gradients, tensor by tensor, for each worker."""
    size = len(gradients)
    flat = torch.stack([torch.cat([part.flatten() for part in parts]).double() for parts in gradients])
    small, big = flat.square().sum(1).mean(), flat.mean(0).square().sum()
    b_small, b_big = batch_size, batch_size * size
    signal = (b_big * big - b_small * small) / (b_big - b_small)
    noise = (small - big) / (1 / b_small - 1 / b_big)
    variance = sum(
        torch.stack(parts).var(0, correction=0).norm().item() for parts in zip(*gradients, strict=True)
    )
    return noise.item(), signal.item(), variance


def test_the_running_ratio():
    monitors = Monitors(batch_size=4)
    assert monitors.values() == {}
    monitors.observe(small=3.0, big=2.0, variance=0.5, num_workers=2)
    assert monitors.values() == {"gradient_noise_scale": pytest.approx(8.0), "gradient_variance": 0.5}
    monitors.observe(small=5.0, big=3.0, variance=0.25, num_workers=2)
    noise, signal = 0.9 * 8 + 0.1 * 16, 0.9 * 1 + 0.1 * 1
    assert monitors.values()["gradient_noise_scale"] == pytest.approx(noise / signal)
    before = monitors.state_dict()
    monitors.observe(small=torch.inf, big=torch.nan, variance=torch.nan, num_workers=2)
    monitors.observe(small=1.0, big=1.0, variance=0.0, num_workers=1)
    assert monitors.state_dict() == before


def test_complex_parameters():
    """Two members with the same gradient have no variance, and noise of none."""
    for local_steps in (1, 2):
        weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        model = nn.ParameterList([weight])
        strategy = GradientAllReduce(Mirror(), monitor=True, local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with strategy.attach(model, optimizer):
            weight.abs().square().sum().backward()
            optimizer.step()
        assert strategy.monitors == {
            "gradient_noise_scale": pytest.approx(0, abs=1e-6),
            "gradient_variance": 0,
        }


def watch(group, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = GradientAllReduce(group, monitor=True, batch_size=8, **options)

    def loss(rank):
        return model(torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))).square().mean()

    gradients = [torch.autograd.grad(loss(rank), list(model.parameters())) for rank in range(group.size)]
    with strategy.attach(model, optimizer, stays=True):
        for _ in range(2):
            optimizer.zero_grad()
            loss(group.rank).backward()
            optimizer.step()
    noise, signal, variance = expected(gradients, 8)
    seen = strategy.monitors
    assert seen["gradient_noise_scale"] == pytest.approx(noise / signal, rel=1e-4)
    assert seen["gradient_variance"] == pytest.approx(variance, rel=1e-4)


def skip(group, arguments):
    """A step that one worker skips is left out by all, and nobody waits for it."""
    monitors = Monitors()
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3) * (1 + group.rank)
    monitors.observe_locally(group, [parameter])
    before = monitors.values()
    monitors.observe_locally(group, [parameter], is_skipped=group.rank == 1)
    assert before
    assert monitors.values() == before


def test_measured_inside_backward_and_before_a_local_step(workers):
    workers.run(watch, 3)
    workers.run(watch, 2, {"local_steps": 2})
    workers.run(skip, 2)
