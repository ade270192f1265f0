"""Plans: every element has one reducer, and no line is busy longer than the others."""

import random

import pytest

from shoal.swarm.membership import lengthen, next_order, shorten
from shoal.swarm.plan import LARGEST_PART_BYTES, make_plan, shares
from shoal.swarm.wire import Commit, Registration, SwarmMember


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


def test_many_contributors_average_in_groups():
    registered = {place: Registration(1, 2**20) for place in range(100)}
    plan = make_plan(members(100), registered, 2**20)
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == 2**20
    assert len(plan.leaders) == 4
    for group, leaders in enumerate(plan.leaders):
        assert len(leaders) == plan.num_parts == len(plan.backups)
        assert all(leader % 4 == group for leader in leaders)
        assert len(set(leaders)) == 25  # all of a group share its work
    assert 0 not in plan.reducers
    assert all(backup not in (-1, owner) for owner, backup in zip(plan.reducers, plan.backups, strict=True))


def test_a_commit_travels_as_a_difference():
    *before, joiner = members(21)
    before = tuple(before)
    for coordinator, tenure in ((3, 1), (3, 20), (19, 1)):
        kept = [one for place, one in enumerate(before) if place not in (5, 7)]
        after, _ = next_order(b"state", [*kept, joiner], before[coordinator], tenure)
        commit = Commit(b"fork", 4, b"state", "abort", after)
        short = shorten(commit, before, None)
        assert short.added == (joiner,)
        assert lengthen(short, before, None) == commit
        assert lengthen(short, before, None).digest == commit.digest
