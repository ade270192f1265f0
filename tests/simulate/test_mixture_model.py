"""The vectorised network against plain modules: losses, gradients as factors, evaluation, failures."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shoal.simulate.mixture.experts import ExpertBank
from shoal.simulate.mixture.model import MixtureModel, StepGradients
from shoal.simulate.mixture.settings import NUM_CLASSES, NUM_FEATURES, MixtureRunSettings
from simulate.plain_mixture import TINY, PlainMixture, flat_gradient

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def batch(size: int = 4, num_trainers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_trainers, size, NUM_FEATURES, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (num_trainers, size), generator=generator)


def model_of(settings: MixtureRunSettings, *, is_gathered: bool) -> MixtureModel:
    """The one that an accelerator has, where weights and gradients of many experts are gathered."""
    model = MixtureModel(settings)
    if is_gathered:
        model.gathered_rows = 1000
        model.bank = ExpertBank(settings, torch.Generator().manual_seed(settings.seed), is_one_by_one=False)
    return model


def taken_in(model: MixtureModel, step: StepGradients) -> dict[int, torch.Tensor]:
    """The gradient of each expert that the step's rows make."""
    rows: dict[int, list[int]] = {}
    for row, expert in zip(step.rows, step.experts.tolist(), strict=True):
        rows.setdefault(expert, []).append(row)
    return {expert: model.bank.gradients([numbers])[0].clone() for expert, numbers in rows.items()}


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kind", ["dmoe", "faithful", "large-ffn"])
def test_losses_and_gradients_of_each_trainer_are_those_of_plain_modules(
    kind: str, is_gathered: bool
) -> None:
    fields = {"model": "large-ffn"} if kind == "large-ffn" else {"is_faithful": kind == "faithful"}
    model = model_of(MixtureRunSettings(**TINY, **fields), is_gathered=is_gathered)
    x, labels = batch(num_trainers=3)
    steps = model.gradients(x, labels)
    for trainer, step in enumerate(steps):
        plain = PlainMixture(model)
        loss = functional.cross_entropy(plain(x[trainer]), labels[trainer])
        loss.backward()
        torch.testing.assert_close(step.loss, loss.detach(), **CLOSE)
        for ours, parameter in zip(step.trunk, plain.trunk, strict=True):
            torch.testing.assert_close(ours, parameter.grad, **CLOSE)
        gradients = taken_in(model, step)
        for number, expert in enumerate(plain.experts):
            assert (number in gradients) == (expert.layers[0].weight.grad is not None)
            if number in gradients:
                torch.testing.assert_close(gradients[number], flat_gradient(expert), **CLOSE)


def test_the_trunk_is_updated_by_adam() -> None:
    model = MixtureModel(MixtureRunSettings(**TINY))
    plain = PlainMixture(model)
    optimizer = torch.optim.Adam(plain.trunk.parameters(), lr=1e-3, amsgrad=True)
    for step in model.gradients(*batch(num_trainers=3)):
        for parameter, gradient in zip(plain.trunk, step.trunk, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        model.update_trunk(step.trunk)
    for ours, parameter in zip(model.trunk, plain.trunk, strict=True):
        torch.testing.assert_close(ours, parameter.detach())


@pytest.mark.parametrize("kind", ["dmoe", "large-ffn"])
def test_evaluation_is_that_of_plain_modules(kind: str) -> None:
    model = MixtureModel(MixtureRunSettings(**{**TINY, "model": kind}))
    (x,), (labels,) = batch(40)
    logits = PlainMixture(model)(x)
    loss, accuracy = model.evaluate(x, labels)
    assert loss == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-4)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_the_next_best_experts_stand_in_for_those_that_fail() -> None:
    healthy, faulty = (
        MixtureModel(MixtureRunSettings(**TINY, batch_size=64, failure_rate=rate))
        .gradients(*batch(64))[0]
        .experts
        for rate in (0.0, 0.3)
    )
    assert (healthy >= 0).all()
    used = [set(experts[:128].tolist()) for experts in (healthy, faulty)]
    assert len(used[1] - {-1}) >= len(used[0])
    assert (faulty >= 0).sum() > 0.9 * faulty.numel()  # both experts of a sample are rarely out of five


def test_a_sample_without_any_expert_stays_finite() -> None:
    model = MixtureModel(MixtureRunSettings(**{**TINY, "num_experts": 2}, batch_size=32, failure_rate=0.9))
    (step,) = model.gradients(*batch(32))
    assert (step.experts < 0).float().mean() > 0.5
    assert torch.isfinite(step.loss)
    assert all(torch.isfinite(part).all() for part in step.trunk)


def test_failures_are_kept_out_of_evaluation_unless_faithful() -> None:
    (x,), (labels,) = batch(200)
    for is_faithful in (False, True):
        rates = (0.0, 0.5)
        runs = [MixtureRunSettings(**TINY, failure_rate=rate, is_faithful=is_faithful) for rate in rates]
        healthy, faulty = (MixtureModel(settings).evaluate(x, labels) for settings in runs)
        assert (healthy != faulty) == is_faithful


def test_a_gradient_that_is_lost_moves_neither_expert_nor_what_came_before() -> None:
    model = MixtureModel(MixtureRunSettings(**{**TINY, "num_layers": 1}, backward_failure_rate=0.999))
    (step,) = model.gradients(*batch())
    (healthy,) = MixtureModel(MixtureRunSettings(**{**TINY, "num_layers": 1})).gradients(*batch())
    assert (step.experts < 0).all()
    torch.testing.assert_close(step.loss, healthy.loss)
    assert step.trunk[0].abs().sum() < healthy.trunk[0].abs().sum()
    torch.testing.assert_close(step.trunk[4], healthy.trunk[4])
