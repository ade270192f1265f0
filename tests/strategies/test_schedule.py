"""Warm-up and decay."""

import pytest

from shoal.strategies.options import StrategyOptions


def test_nothing_by_default():
    assert {StrategyOptions().rate_factor(step) for step in range(1000)} == {1.0}


def test_warm_up_rises_linearly_to_the_full_rate():
    options = StrategyOptions(warmup_steps=4, warmup_factor=0.2)
    assert [options.rate_factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_decay_after_every_so_many_steps():
    options = StrategyOptions(decay_every=3, decay_factor=0.5, warmup_steps=1, warmup_factor=0)
    assert [options.rate_factor(step) for step in range(8)] == [0, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
