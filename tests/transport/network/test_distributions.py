"""Delay distributions: their statistics, their limits, and numbers that are the same everywhere."""

import math
import os
import statistics
import subprocess
import sys

import msgspec
import pytest

from shoal.transport.network.distributions import (
    Constant,
    Draws,
    Exponential,
    Normal,
    Pareto,
    Recorded,
    digest_of,
    sampler_of,
)

NUM_SAMPLES = 20_000


def samples_ms(delay, seed=0):
    sample, draws = sampler_of(delay), Draws(seed, "test")
    return sorted(1000 * sample(draws.uniform()) for _ in range(NUM_SAMPLES))


def quantile(values, share):
    return values[int(share * len(values))]


@pytest.mark.parametrize("delay", [7, 7.0, Constant(7)])
def test_constant(delay):
    assert samples_ms(delay) == [pytest.approx(7)] * NUM_SAMPLES


def test_normal():
    values = samples_ms(Normal(40, 5))
    assert statistics.fmean(values) == pytest.approx(40, rel=0.01)
    assert statistics.pstdev(values) == pytest.approx(5, rel=0.03)
    assert quantile(values, 0.975) == pytest.approx(40 + 1.96 * 5, rel=0.02)


def test_normal_is_cut_off_at_its_floor_and_not_heaped_up_there():
    values = samples_ms(Normal(10, 10, floor=5))
    assert min(values) >= 5
    # of the curve, what lies above 5; its median lies where half of that is left
    curve = statistics.NormalDist(10, 10)
    kept = 1 - curve.cdf(5)
    assert statistics.median(values) == pytest.approx(curve.inv_cdf(1 - kept / 2), rel=0.03)
    assert len([value for value in values if value < 5.01]) < NUM_SAMPLES / 100


def test_normal_never_goes_below_zero():
    assert min(samples_ms(Normal(1, 5))) >= 0


def test_exponential():
    values = samples_ms(Exponential(100))
    assert statistics.fmean(values) == pytest.approx(100, rel=0.03)
    assert statistics.median(values) == pytest.approx(100 * math.log(2), rel=0.03)


def test_pareto():
    values = samples_ms(Pareto(15, 4, cap=60))
    assert min(values) >= 15
    assert max(values) <= 60
    assert statistics.median(values) == pytest.approx(15 * 2 ** (1 / 4), rel=0.01)
    assert quantile(values, 0.99) == pytest.approx(15 * 100 ** (1 / 4), rel=0.05)


def test_a_heavy_tail_ends_somewhere():
    assert max(samples_ms(Pareto(1, 0.01))) == pytest.approx(100)


def test_recorded_is_drawn_or_replayed():
    values = samples_ms(Recorded([1, 2, 3, 4]))
    assert [values.count(pytest.approx(each)) for each in (1, 2, 3, 4)] == [
        pytest.approx(NUM_SAMPLES / 4, rel=0.05)
    ] * 4
    delay = Recorded([3, 1, 2], in_order=True)
    sample, other = sampler_of(delay), sampler_of(delay)
    assert [sample(0.5) for _ in range(4)] == [pytest.approx(each) for each in (0.003, 0.001, 0.002, 0.003)]
    assert other(0.5) == pytest.approx(0.003)  # each link keeps its own place


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "normal", "mean": 5, "deviation": 1, "floor": 6},
        {"kind": "normal", "mean": -5, "deviation": 1},
        {"kind": "normal", "mean": 5, "deviation": 0},
        {"kind": "exponential", "mean": 0},
        {"kind": "pareto", "floor": 5, "shape": 1, "cap": 4},
        {"kind": "pareto", "floor": 0, "shape": 1},
        {"kind": "recorded", "samples": []},
        {"kind": "recorded", "samples": [1, -1]},
        {"kind": "constant", "value": -1},
    ],
)
def test_impossible_distributions_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Constant | Normal | Exponential | Pareto | Recorded)


def test_draws_are_uniform_and_never_reach_the_ends():
    draws = Draws(1, "a", "b")
    values = sorted(draws.uniform() for _ in range(NUM_SAMPLES))
    assert values[0] > 0
    assert values[-1] < 1
    assert max(abs(value - index / NUM_SAMPLES) for index, value in enumerate(values)) < 0.015


def test_draws_depend_on_seed_and_names_only():
    def first(*about):
        return [Draws(*about).uniform() for _ in range(2)]

    assert len({first(0, "a", "b")[0], first(1, "a", "b")[0], first(0, "b", "a")[0], first(0, "ab")[0]}) == 4
    assert digest_of(0, "a", "bc") != digest_of(0, "ab", "c")
    program = "from shoal.transport.network.distributions import Draws; print(Draws(0, 'a', 'b').uniform())"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] == f"{first(0, 'a', 'b')[0]}\n".encode()
