"""Members that only average: they carry the others' bytes, and nothing depends on their votes."""

import asyncio

import msgspec

from shoal.core import Deadline
from shoal.swarm.wire import AUXILIARY
from swarm.swarms import World, gradient, virtual
from swarm.test_rounds import contribute

LARGE = 200_000
"""Elements: enough for parts of several reducers."""


async def lend(world, number, bandwidth=1.0):
    settings = msgspec.structs.replace(world.settings, bandwidth=bandwidth)
    helper = await world.start(number, kind=AUXILIARY, may_found=False, settings=settings)
    await world.wait(lambda: helper.is_member)
    return helper


async def contribute_without(world, key, helpers):
    """Has all but the helpers add a gradient, and waits until they have made a step."""
    trainers = [run for run in world.alive().values() if run not in helpers]
    steps = [run.state.num_steps for run in trainers]
    for place, run in enumerate(trainers):
        run.add(gradient(10 * key + place, world.num_elements), 5)
    await world.wait(lambda: all(run.state.num_steps > num for run, num in zip(trainers, steps, strict=True)))


def test_it_averages_for_the_others_and_brings_nothing_itself():
    async def main():
        async with World(num_elements=LARGE, bandwidth=1.0) as world:
            await world.start_all(3)
            await contribute(world, 1)
            helper = await lend(world, 3, bandwidth=10.0)
            before = helper.num_sent_bytes
            for key in range(3):
                await contribute_without(world, key, [helper])
            assert helper.num_sent_bytes - before > 3 * 4 * LARGE  # three members take what it has averaged
            assert helper.state.num_samples == world.runs[0].state.num_samples
            assert helper.state.num_steps == world.runs[0].state.num_steps
            assert helper.members[-1] == helper.context.me  # behind all who vote
            assert helper.ledger.num_added == 0
            world.check()

    virtual(main())


def test_it_has_no_vote_and_its_loss_costs_no_quorum():
    """Two trainers and four others: were these counted, nothing would go on without them."""

    async def main():
        async with World(num_elements=LARGE, minority_after_s=1000) as world:
            await world.start_all(2)
            helpers = [await lend(world, number) for number in range(2, 6)]
            for number in range(2, 6):
                world.kill(number)
            await contribute_without(world, 1, helpers)
            await world.wait(lambda: len(world.runs[0].members) == 2)
            world.check()

    virtual(main())


def test_one_that_dies_while_it_averages_has_a_backup():
    async def main():
        async with World(num_elements=LARGE, target_samples=15, bandwidth=1.0) as world:
            await world.start_all(3)
            helper = await lend(world, 3, bandwidth=10.0)

            def fault(message, number, method):
                if method == "swarm.part":
                    world.kill(3)

            world.fault = fault
            await contribute_without(world, 1, [helper])
            assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
            world.check()

    virtual(main())


def test_trainers_that_are_too_few_do_not_go_on_by_its_vote():
    async def main():
        async with World(target_samples=5, minority_after_s=50) as world:
            await world.start_all(3)
            helpers = [await lend(world, 3), await lend(world, 4)]
            fork = world.runs[0].state.fork
            world.kill(1)
            world.kill(2)
            world.runs[0].add(gradient(1), 5)
            await asyncio.sleep(30)
            assert world.runs[0].state.num_steps == 0
            await world.wait(lambda: world.runs[0].state.fork != fork, 200)
            await world.wait(
                lambda: all(helper.is_member and helper.state.fork != fork for helper in helpers)
            )
            await contribute_without(world, 1, helpers)
            world.check()

    virtual(main())


def test_it_leaves_in_order_and_outlives_the_last_trainer():
    async def main():
        async with World(target_samples=5) as world:
            await world.start_all(1)
            leaving, stays = await lend(world, 1), await lend(world, 2)
            await leaving.leave(Deadline.after(30))
            await contribute_without(world, 1, [leaving, stays])
            await world.runs[0].leave(Deadline.after(30))
            await world.wait(lambda: not stays.is_member)
            assert not stays.has_left

    virtual(main())
