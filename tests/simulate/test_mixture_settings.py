"""What a setting asks for, and whether it fits."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.mixture.model import MixtureModel
from shoal.simulate.mixture.settings import MixtureRunSettings
from simulate.plain_mixture import TINY


@pytest.mark.parametrize("model", ["dmoe", "large-ffn"])
def test_parameters_are_counted_as_they_are_made(model: str) -> None:
    settings = MixtureRunSettings(**TINY, model=model)
    made = MixtureModel(settings)
    experts = settings.num_layers * settings.experts_a_layer * made.bank.layout.expert_size
    trunk = sum(part.numel() for part in made.trunk)
    assert settings.parameter_bytes() == 4 * (experts + trunk)


def test_memory_grows_with_experts_and_has_a_limit() -> None:
    small, large = (MixtureRunSettings(num_experts=count, device="cuda") for count in (64, 256))
    assert 4 * large.parameter_bytes() < large.memory_bytes() < 1.1 * 4 * large.parameter_bytes()
    assert large.memory_bytes() > 3 * small.memory_bytes()
    assert large.fits(139 << 30)
    assert not large.fits(80 << 30)
    assert MixtureRunSettings(num_experts=16, layer_dim=128, num_trainers=16).fits(2 << 30)


def test_resolved_settings_say_all_numbers_and_mean_the_same() -> None:
    for settings in (MixtureRunSettings(), MixtureRunSettings(is_faithful=True, num_trainers=7)):
        resolved = settings.resolved()
        assert None not in (resolved.compute_ms, resolved.window_ms, resolved.update_every_inputs)
        assert resolved.compute_s == settings.compute_s
        assert resolved.inputs_an_update == settings.inputs_an_update
    assert MixtureRunSettings().resolved().window_s == pytest.approx(MixtureRunSettings().window_s)


def test_defaults_follow_the_model() -> None:
    mixture, dense = MixtureRunSettings(), MixtureRunSettings(model="large-ffn")
    assert (mixture.compute_s, dense.compute_s) == (14.2, 1.9)
    assert MixtureRunSettings(is_faithful=True).compute_s == 0.24
    assert mixture.window_s == pytest.approx(12 * 15.2 / 64)
    assert MixtureRunSettings(num_trainers=2).window_s == 14.2
    assert MixtureRunSettings(delay_ms=0.0).window_s == pytest.approx(3 * 14.2 / 64)
    assert (mixture.rows_a_layer, dense.rows_a_layer) == (16, 4)
    assert mixture.delivery_shares == [1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert dense.delivery_shares == []
    assert (mixture.inputs_an_update, dense.inputs_an_update) == (4, 1)
    assert torch.device(mixture.device).type == "cpu"


@pytest.mark.parametrize(
    "fields", [{"num_active": 6, "num_experts": 5}, {"model": "large-ffn", "failure_rate": 0.1}]
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        MixtureRunSettings(**fields)


def test_a_failure_rate_is_below_one() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"failure_rate": 1.0}, MixtureRunSettings)
