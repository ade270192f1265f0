"""Robust averages as functions: what fewer than half can do to them, and that all compute the same bits."""

import math

import numpy as np
import pytest

from shoal.swarm.plan import make_plan
from shoal.swarm.robust import (
    CENTERED_CLIP,
    KINDS,
    MEDIAN,
    average,
    capped,
    centered_clip,
    coordinate_median,
    squared_distance,
    squared_norm,
)
from shoal.swarm.wire import Registration, SwarmMember

NUM_ELEMENTS = 20_000  # more than a block


def rows_of(num, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(NUM_ELEMENTS).astype(np.float32) for _ in range(num)]


def averaged(kind, rows, weights=None):
    out = np.empty(len(rows[0]), np.float32)
    weights = [1.0] * len(rows) if weights is None else weights
    average(kind, [(w, row, squared_norm(row)) for w, row in zip(weights, rows, strict=True)], out)
    return out


@pytest.mark.parametrize("num", range(1, 34))
def test_the_median_is_that_of_each_element(num):
    rows = [row[:100] for row in rows_of(num, seed=num)]
    out = np.empty(100, np.float32)
    coordinate_median(rows, out)
    np.testing.assert_allclose(out, np.median(rows, axis=0), atol=1e-6)


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0], [-0.0, 0.0, -0.0], [-0.0]])
def test_a_median_that_is_zero_has_no_sign(zeros):
    out = np.ones(40, np.float32)
    coordinate_median([np.full(40, zero, np.float32) for zero in zeros], out)
    assert out.tobytes() == np.zeros(40, np.float32).tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 16_384, 16_385, 40_000])
def test_distances_are_right_and_the_same_wherever_vectors_lie_in_memory(size):
    values = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    center = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    expected = float(np.square(values.astype(float) - center).sum())
    assert math.isclose(squared_distance(values, center), expected, rel_tol=1e-12)
    for offset in range(1, 8):  # the processor adds up another way where memory is not aligned
        moved = np.empty(size + offset, np.float32)[offset:]
        moved[:] = values
        assert squared_distance(moved, center) == squared_distance(values, center)


def test_norms_tell_what_is_not_finite_from_what_is_large():
    assert math.isfinite(squared_norm(np.full(100, 3e38, np.float32)))
    assert not math.isfinite(squared_norm(np.array([1, np.nan], np.float32)))
    assert not math.isfinite(squared_norm(np.array([1, -np.inf], np.float32)))


@pytest.mark.parametrize("kind", [CENTERED_CLIP, MEDIAN])
@pytest.mark.parametrize("num_liars", [1, 4, 7])
@pytest.mark.parametrize("lie", [1e30, -1e6, 100.0, 3e38])
def test_fewer_than_half_move_the_average_by_a_few_honest_distances_at_most(kind, num_liars, lie):
    honest = rows_of(16 - num_liars)
    mean = np.mean(honest, axis=0)
    found = averaged(kind, [*honest, *[np.full(NUM_ELEMENTS, lie, np.float32)] * num_liars])
    distance = math.sqrt(NUM_ELEMENTS)  # of an honest one from the truth
    assert np.linalg.norm(found - mean) < 4 * distance
    if num_liars <= 4:
        assert np.linalg.norm(found - mean) < distance


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_vectors_the_average_is_that_vector(kind):
    row = rows_of(1)[0]
    np.testing.assert_allclose(averaged(kind, [row] * 5), row, rtol=1e-5, atol=1e-7)


def test_centered_clip_of_honest_members_is_near_their_mean():
    rows = rows_of(16)
    mean = np.mean(rows, axis=0)
    assert np.linalg.norm(averaged(CENTERED_CLIP, rows) - mean) < 0.1 * np.linalg.norm(mean)


def test_a_weight_counts_for_four_times_the_median_at_most():
    assert capped([10, 10, 1_000_000, 5]) == [10, 10, 40, 5]
    assert capped([0, 0, 0, 1000], floor=50) == [0, 0, 0, 200]
    rows = rows_of(4)
    honest, lying = capped([1, 1, 1, 1]), capped([1, 1, 1, 10**9])
    assert sum(honest) == 4
    out = np.empty(NUM_ELEMENTS, np.float32)
    centered_clip(rows, lying, out)
    assert np.linalg.norm(out - np.mean(rows, axis=0)) < math.sqrt(NUM_ELEMENTS)


def test_who_lies_about_its_line_reduces_four_times_the_median_at_most():
    members = [SwarmMember(bytes([number]) * 20, 0, f"p{number}", 1) for number in range(8)]
    registered = {place: Registration(10, 1 << 20, 1.0) for place in range(7)}
    registered[7] = Registration(10, 1 << 20, 1e12)
    shares = []
    for is_robust in (False, True):
        plan = make_plan(members, registered, 1 << 20, is_robust=is_robust)
        shares.append(sum(plan.size(part) for part in range(plan.num_parts) if plan.reducers[part] == 7))
    assert shares[0] == 1 << 20
    assert shares[1] <= (1 << 20) * 4 / 11 + 16


def test_who_lies_about_how_fast_averages_come_makes_nobody_else_look_slow():
    members = [SwarmMember(bytes([number]) * 20, 0, f"p{number}", 1) for number in range(8)]

    def plan(lie):
        taken = [30.0, 25.0, 40.0, 30.0, 30.0, lie, lie, lie]
        told = [Registration(10, 1 << 20, 40.0, mbit_s) for mbit_s in taken]
        return make_plan(members, dict(enumerate(told)), 1 << 20, is_robust=True)

    assert plan(1e12) == plan(30.0) == plan(0.0)


@pytest.mark.parametrize(
    "nonsense",
    [
        Registration(-5, 1 << 20),
        Registration(1 << 50, 1 << 20),
        Registration(5, 1 << 20, math.nan),
        Registration(5, 1 << 20, math.inf),
        Registration(5, 1 << 20, 10.0, -1.0),
        Registration(5, 1 << 20, 10.0, math.inf),
    ],
)
def test_a_plan_leaves_out_who_registers_nonsense(nonsense):
    members = [SwarmMember(bytes([number]) * 20, 0, f"p{number}", 1) for number in range(3)]
    registered = {0: Registration(10, 1 << 20), 1: Registration(10, 1 << 20), 2: nonsense}
    plan = make_plan(members, registered, 1 << 20)
    assert plan.contributors == (0, 1)
    assert 2 not in plan.reducers
