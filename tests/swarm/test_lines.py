"""Lines: whose is faster averages more, as rounds have measured it, and limits are kept."""

import asyncio
import math

import pytest

from shoal.core import Deadline
from shoal.swarm.membership import LineMeter
from shoal.swarm.plan import make_plan, shares
from shoal.swarm.wire import Registration
from shoal.transport import Conditions, Profile
from shoal.transport.network.faults import FaultScript
from shoal.transport.throttle import Throttle
from swarm.swarms import World, gradient, virtual

NUM_ELEMENTS = 1 << 19
LINES = """
name = "lines"
[places.house]
up_mbit_s = 40
down_mbit_s = 200
[ways.default]
delay_ms = 10
"""
SLOW_DOWN = (
    LINES
    + """
[places.cellar]
up_mbit_s = 40
down_mbit_s = 10
[peers]
"p0:*" = "house"
"p1:*" = "cellar"
"p2:*" = "house"
"p3:*" = "house"
"""
)
SLOW_AT_S = 60.0
SLOW = f"""
[[fault]]
kind = "slow"
at_s = {SLOW_AT_S}
peers = ["p1:*"]
factor = 4
"""


async def a_round(world, key):
    """Makes a round, and gives each peer's share of its elements and what the round took."""
    loop, state = asyncio.get_running_loop(), world.runs[0].state
    began_s, steps = loop.time(), state.num_steps
    for number, run in world.runs.items():
        run.add(gradient(10 * key + number, world.num_elements), 5)
    await world.wait(lambda: all(run.state.num_steps > steps for run in world.runs.values()), 300)
    commit, members = max(world.commits.values(), key=lambda one: one[0].round)
    found = dict.fromkeys(sorted(world.runs), 0.0)
    for part, place in enumerate(commit.plan.reducers):
        found[int(members[place].host[1:])] += commit.plan.size(part) / world.num_elements
    return list(found.values()), loop.time() - began_s


def test_shares_follow_a_line_that_becomes_slow_within_three_rounds():
    async def main():
        conditions = Conditions(Profile.parse(LINES), FaultScript.parse(SLOW), seed=1)
        async with World(conditions, num_elements=NUM_ELEMENTS, target_samples=20) as world:
            await world.start_all(4)
            for key in range(3):
                before, _ = await a_round(world, key)
            assert max(before) - min(before) < 0.1
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, SLOW_AT_S + 1 - loop.time()))
            _, first_s = await a_round(world, 3)
            for key in range(4, 7):
                after, last_s = await a_round(world, key)
            right = shares([40, 10, 40, 40], 4)
            assert right[1] < 0.1
            assert after[1] <= right[1] + 0.05
            assert all(abs(mine - due) < 0.12 for mine, due in zip(after, right, strict=True))
            assert last_s < first_s
            world.check()

    virtual(main())


def test_shares_follow_a_slow_way_down_within_three_rounds():
    async def main():
        conditions = Conditions(Profile.parse(SLOW_DOWN), seed=1)
        async with World(conditions, num_elements=NUM_ELEMENTS, target_samples=20) as world:
            await world.start_all(4)
            first, first_s = await a_round(world, 0)
            assert max(first) - min(first) < 0.1
            for key in range(1, 4):
                after, last_s = await a_round(world, key)
            right = shares([40, 10, 40, 40], 4)
            assert after[1] <= right[1] + 0.05
            assert all(abs(mine - due) < 0.12 for mine, due in zip(after, right, strict=True))
            assert last_s < first_s
            world.check()

    virtual(main())


def test_on_slow_lines_all_that_is_contributed_goes_in():
    """Were many parts under way at once, they would come together and late, and be taken for lost."""

    async def main():
        profile = LINES.replace("= 40", "= 10").replace("= 200", "= 50")
        async with World(
            Conditions(Profile.parse(profile), seed=1), num_elements=4 * NUM_ELEMENTS, target_samples=20
        ) as world:
            await world.start_all(4, 600)
            for key in range(2):
                _, took_s = await a_round(world, key)
                assert (
                    took_s < 2 * 1.5 * 4 * 4 * NUM_ELEMENTS * 8 / 10e6
                )  # what the lines need, and half more
            for run in world.runs.values():
                assert run.ledger.num_committed >= 0.9 * 10
            world.check()

    virtual(main())


def test_a_way_down_counts_where_it_is_much_slower_than_that_of_most():
    async def main():
        async with World() as world:
            await world.start_all(4)
            members = world.runs[0].members

            def plan(*taken):
                found = [Registration(5, 1 << 20, 40.0, mbit_s) for mbit_s in taken]
                return make_plan(members, dict(enumerate(found)), 1 << 20)

            # nobody can take faster than the others send
            assert plan(30.0, 25.0, 30.0, 20.0) == plan(0.0, 0.0, 0.0, 0.0) == plan(0.0, 0.0, 0.0, 8.0)
            found = plan(30.0, 8.0, 30.0, 30.0)
            told = [Registration(5, 1 << 20, mbit_s) for mbit_s in (40.0, 8.0, 40.0, 40.0)]
            assert found == make_plan(members, dict(enumerate(told)), 1 << 20)
            assert plan(30.0, math.nan, 30.0, 30.0).contributors == (0, 2, 3)

    virtual(main())


def test_a_line_that_nobody_knows_counts_as_the_others():
    async def main():
        async with World() as world:
            await world.start_all(3)
            members = world.runs[0].members
            told = {0: 100.0, 1: 0.0, 2: 100.0}
            registered = {place: Registration(5, 1 << 20, mbit_s) for place, mbit_s in told.items()}
            alike = {place: Registration(5, 1 << 20) for place in told}
            assert make_plan(members, registered, 1 << 20) == make_plan(members, alike, 1 << 20)

    virtual(main())


def test_of_a_round_the_fastest_stretch_counts_that_had_most_of_the_bytes():
    """At its end a round waits for slow receivers, which says nothing of the sender's line."""
    meter, mbyte = LineMeter(), 1_000_000
    begun = [meter.begin(0.0) for _ in range(10)]
    for number in range(1, 10):
        meter.end(begun.pop(), number, mbyte)
    meter.end(begun.pop(), 30.0, mbyte)
    meter.finish_round()
    assert meter.mbit_s == pytest.approx(8.0)
    late = meter.begin(39.0)
    meter.end(meter.begin(40.0), 41.0, 4 * mbyte)
    meter.finish_round()
    assert meter.mbit_s == pytest.approx(12.0)
    meter.end(late, 49.0, 100 * mbyte)  # whoever took it is slow
    meter.end(meter.begin(50.0), 51.0, 1000)  # too little to say anything
    meter.finish_round()
    assert meter.mbit_s == pytest.approx(12.0)


@pytest.mark.parametrize("limit", ["upload_limit", "download_limit"])
def test_limits_are_kept_over_rounds_and_joins(limit):
    """All that members send each other is counted by the network's own pipes, not by the limiter."""
    mbit_s = 8.0

    async def main():
        limits = {limit: mbit_s}
        async with World(num_elements=NUM_ELEMENTS, target_samples=15, **limits) as world:
            await world.start_all(3, 600)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            num_bytes = {number: run.num_sent_bytes for number, run in world.runs.items()}
            for key in range(3):
                await a_round(world, key)
            seconds = loop.time() - began_s
            for number, run in world.runs.items():
                sent = run.num_sent_bytes - num_bytes[number]
                assert sent > 4 * NUM_ELEMENTS  # more than one vector
                assert sent <= mbit_s * 1e6 / 8 * seconds * 1.25 + 2e6
            began_s = loop.time()
            joiner = await world.start(9, may_found=False)
            await world.wait(lambda: joiner.is_member, 600)
            # four leaves of 1 MiB, from three donors or over the joiner's own line; the first of each waits
            # for nothing
            num_lines = 3 if limit == "upload_limit" else 1
            waited_s = (4 - num_lines) * (1 << 20) / (num_lines * mbit_s * 1e6 / 8)
            assert loop.time() - began_s > 0.9 * waited_s
            world.check()

    virtual(main())


def test_small_messages_do_not_wait_behind_large_ones():
    async def main():
        throttle, loop = Throttle(1e6), asyncio.get_running_loop()
        large = asyncio.create_task(throttle.pass_on(3_000_000, Deadline.after(60)))
        later = asyncio.create_task(throttle.pass_on(1_000_000, Deadline.after(60)))
        await asyncio.sleep(0.01)
        began_s = loop.time()
        await throttle.pass_on(100, Deadline.after(1))
        assert loop.time() == began_s
        await large
        await later
        assert loop.time() == pytest.approx(3.0, abs=0.2)
        began_s = loop.time()
        await throttle.pass_on(1_000_000, Deadline.after(0.2))  # its call is too late, and says so itself
        assert loop.time() - began_s == pytest.approx(0.2, abs=0.05)

    virtual(main())
