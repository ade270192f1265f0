"""The experiment's events: who is how stale, when it ends, and that it is the same each time."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shoal.simulate.mixture.experiment import Data, MixtureResult, run_mixture
from shoal.simulate.mixture.settings import MixtureRunSettings
from simulate.plain_mixture import TINY

DENSE = {"model": "large-ffn", "num_layers": 1, "layer_dim": 2}


@pytest.fixture(scope="module")
def data() -> Data:
    """Ten classes that a linear layer tells apart."""
    generator = torch.Generator().manual_seed(2)
    centres = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.arange(400) % 10
    images = (centres[labels] + 0.1 * torch.randn(400, 1, 28, 28, generator=generator)).clamp(0, 1)
    return images[:300], labels[:300], images[300:], labels[300:]


def run(data: Data, **changes: object) -> MixtureResult:
    return run_mixture(MixtureRunSettings(**{**TINY, "eval_every": 5, **changes}), data)


def test_it_stops_at_exactly_its_updates_and_evaluates_at_the_end(data: Data) -> None:
    told: list[tuple[int, int]] = []
    settings = MixtureRunSettings(**TINY, eval_every=5)
    result = run_mixture(settings, data, lambda done, total: told.append((done, total)))
    assert [one.num_updates for one in result.evaluations] == [5, 10, 12]
    assert told[-1] == (12, 12)
    assert sum(result.staleness.values()) == 12
    assert result.train_loss[-1].num_updates == 12
    assert result.evaluations[-1].virtual_s == result.virtual_s > 0


@pytest.mark.parametrize("is_faithful", [False, True])
def test_the_same_settings_give_the_same_bits_and_another_seed_others(data: Data, is_faithful: bool) -> None:
    changes = {"is_faithful": is_faithful, "failure_rate": 0.2}
    first, second, other = (run(data, seed=seed, **changes) for seed in (1, 1, 2))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert first.evaluations != other.evaluations


@pytest.mark.parametrize("model", ["dmoe", "large-ffn"])
def test_one_trainer_is_never_stale(data: Data, model: str) -> None:
    result = run(data, model=model, num_trainers=1)
    assert result.staleness == {0: 12}
    assert result.mean_staleness == 0
    assert set(result.expert_staleness) <= {0, 1}


def test_without_a_delay_nothing_is_stale(data: Data) -> None:
    """Trainers come one after another, and those of one window together."""
    assert run(data, delay_ms=0.0, window_ms=0.0, eval_every=6).staleness == {0: 12}
    assert run(data, delay_ms=0.0, eval_every=6).mean_staleness <= 1


def test_updates_are_as_stale_as_the_share_of_time_that_is_delay(data: Data) -> None:
    """In windows a little less, for those who compute in one see all that came in it."""
    changes = {**DENSE, "num_trainers": 8, "steps": 320, "eval_every": 320, "compute_ms": 1000.0}
    exact = run(data, **changes, window_ms=0.0)
    assert exact.mean_staleness == pytest.approx(8 / 2, abs=0.6)
    assert max(exact.staleness) > 12
    assert exact.virtual_s == pytest.approx(320 / 8 * 2, rel=0.15)
    windows = run(data, **changes)
    assert windows.mean_staleness == pytest.approx(exact.mean_staleness, rel=0.25)
    assert windows.virtual_s == pytest.approx(exact.virtual_s, rel=0.02)


def test_a_lock_takes_as_long_as_all_steps_one_after_another(data: Data) -> None:
    """And a gradient is then about half as stale as there are trainers: it waits in one of two queues."""
    changes = {"num_trainers": 16, "steps": 240, "eval_every": 240, "compute_ms": 240.0, "delay_ms": 100.0}
    result = run(data, **DENSE, **changes, is_faithful=True)
    assert result.virtual_s == pytest.approx(240 * 0.24, rel=0.1)
    assert 6 < result.mean_staleness < 10


def test_what_it_learns_can_be_told_apart(data: Data) -> None:
    result = run(data, layer_dim=8, num_layers=1, steps=256, eval_every=256, learning_rate=1e-2)
    assert result.evaluations[-1].accuracy > 0.9
    assert result.train_loss[-1].loss < 0.5 * result.train_loss[0].loss


def test_experts_wait_for_the_network_unless_faithful(data: Data) -> None:
    changes = {"steps": 96, "num_trainers": 8, "eval_every": 96}
    corrected = run(data, **changes, compute_ms=1000.0, window_ms=0.0)
    faithful = run(data, **changes, is_faithful=True)
    assert corrected.mean_expert_staleness > 2 * faithful.mean_expert_staleness


def test_gradients_that_failed_experts_lose_are_counted(data: Data) -> None:
    result = run(data, backward_failure_rate=0.5)
    assert 0.3 < result.num_lost / (12 * 2 * 4 * 2) < 0.7
    assert run(data).num_lost == 0
