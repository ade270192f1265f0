"""Plans: every element has one reducer, and no line is busy longer than the others."""

import random

import pytest

from shoal.swarm.plan import LARGEST_PART_BYTES, make_plan, shares
from shoal.swarm.wire import Registration, SwarmMember


def members(num):
    return [SwarmMember(bytes([number]) * 20, 0, f"p{number}", 1) for number in range(num)]


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_busy_equally_long(seed):
    choice = random.Random(seed)
    num = choice.randint(3, 12)
    bandwidths = [choice.choice([1, 2, 10, 100]) * choice.uniform(0.5, 2) for _ in range(num)]
    found = shares(bandwidths, num)
    assert sum(found) == pytest.approx(1)
    times = [(1 + (num - 2) * share) / b for share, b in zip(found, bandwidths, strict=True)]
    level = max(time for time, share in zip(times, found, strict=True) if share > 0)
    for time, share in zip(times, found, strict=True):
        assert time == pytest.approx(level) if share > 0 else time >= level * (1 - 1e-9)


@pytest.mark.parametrize("num_elements", [1, 63, 64, 5_000, 100_000, 3_000_001])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_plan_covers_every_element_once(num_elements, num):
    registered = {place: Registration(place + 1, num_elements, 1.0 + place) for place in range(num)}
    plan = make_plan(members(num), registered, num_elements)
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == num_elements
    assert all(plan.size(part) > 0 for part in range(plan.num_parts))
    assert len(plan.bounds) == plan.num_parts + 1 == len(plan.backups) + 1
    assert max(map(plan.size, range(plan.num_parts))) * 4 <= LARGEST_PART_BYTES * 1.01 + 64
    for reducer, backup in zip(plan.reducers, plan.backups, strict=True):
        assert backup != reducer
        assert (backup == -1) == (num == 1)


def test_who_brings_nothing_may_still_reduce():
    plan = make_plan(members(3), {0: Registration(5, 10**6), 1: Registration(0, 10**6)}, 10**6)
    assert plan.contributors == (0,)
    assert set(plan.reducers) == {0, 1}


def test_those_left_out_or_of_another_model_do_not_take_part():
    registered = {0: Registration(5, 100), 1: Registration(5, 99), 2: Registration(5, 100)}
    plan = make_plan(members(3), registered, 100, left_out=[2])
    assert plan.contributors == (0,)
    assert set(plan.reducers) == {0}


def test_no_samples_no_plan():
    assert make_plan(members(2), {0: Registration(0, 100), 1: Registration(0, 100)}, 100) is None
