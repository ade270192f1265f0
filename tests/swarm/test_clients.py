"""Members that nobody can dial: they train, vote and send, and never coordinate or reduce."""

import asyncio

import pytest

from shoal.core import Address, Deadline
from swarm.swarms import World, gradient, virtual
from swarm.test_rounds import contribute

LARGE = 13_000
"""Elements: enough for three reducers."""


def listed(world, number):
    """Gives a member as the newest list that anybody has describes it; None where it is not there."""
    run = max(world.alive().values(), key=lambda run: run.state.round)
    return next((one for one in run.members if one.host == f"p{number}"), None)


def record_plans(world):
    """Gives the reducers of every round from now on, by the host's name."""
    found = []
    for run in world.alive().values():
        apply = run._apply  # as the world does: what is committed is what counts

        def recorded(commit, held, place, apply=apply, run=run):
            if place >= 0 and commit.plan is not None:
                places = dict.fromkeys([*commit.plan.reducers, *commit.plan.backups])
                found.append({run.round.members[one].host for one in places if one >= 0})
            apply(commit, held, place)

        run._apply = recorded
    return found


def test_clients_train_with_the_one_that_can_be_dialed():
    async def main():
        async with World(num_elements=LARGE) as world:
            await world.start_all(5, clients=[1, 2, 3, 4])
            plans = record_plans(world)
            for key in range(25):  # more than a coordinator's turn
                await contribute(world, key)
                assert world.runs[0].members[0].host == "p0"
            assert plans == [{"p0"}] * len(plans)
            assert len(plans) >= 100
            for run in world.runs.values():
                assert run.ledger.num_committed == 125
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            world.check()
            world.check_samples()

    virtual(main())


def test_a_client_joins_a_run_in_progress_leaves_it_and_is_lost():
    async def main():
        async with World() as world:
            await world.start_all(3, clients=[1])
            for key in range(4):
                await contribute(world, key)
            joiner = await world.start(3, may_found=False, is_client=True)
            await world.wait(lambda: joiner.is_member)
            await contribute(world, 5)
            assert joiner.state.num_samples == world.runs[0].state.num_samples
            assert not listed(world, 3).is_reachable
            await joiner.leave(Deadline.after(30))
            world.kill(3)
            world.kill(1)
            await world.wait(lambda: len(world.runs[0].members) == 2)
            world.runs.pop(3)
            world.runs.pop(1)
            await contribute(world, 6)
            world.check()

    virtual(main())


def test_the_only_one_that_can_be_dialed_is_lost_and_another_one_is_there():
    async def main():
        async with World() as world:
            await world.start_all(4, clients=[1, 2, 3])
            await contribute(world, 1)
            await world.start(4, may_found=False)
            await world.wait(lambda: all(len(run.members) == 5 for run in world.runs.values()))
            await contribute(world, 2)
            fork = world.runs[4].state.fork
            world.kill(0)
            await contribute(world, 3)
            assert world.runs[4].state.fork == fork
            assert world.runs[4].members[0].host == "p4"
            assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
            world.check()
            world.check_samples()

    virtual(main())


def test_clients_that_are_left_alone_go_on_each_by_itself():
    async def main():
        async with World(target_samples=5) as world:
            await world.start_all(3, clients=[1, 2])
            world.kill(0)
            for number in (1, 2):
                world.runs[number].add(gradient(number), 5)
            await world.wait(lambda: all(run.state.num_steps for run in world.alive().values()), 200)
            assert world.runs[1].state.fork != world.runs[2].state.fork
            world.check()

    virtual(main())


@pytest.mark.parametrize("is_silent", [False, True])
def test_one_that_takes_itself_for_reachable_is_dialed_before_it_is_listed(is_silent):
    async def main():
        async with World(num_elements=LARGE) as world:
            await world.start_all(3)
            plans = record_plans(world)
            if is_silent:
                world.cut = lambda caller, host: host == "p3" and caller != 3
            wrong = await world.start(3, may_found=False, is_client=True)
            wrong.be_at(Address("p3", 5000), is_reachable=True)  # nobody listens there
            await world.wait(lambda: wrong.is_member)
            assert not wrong.context.me.is_reachable
            for key in range(25):
                await contribute(world, key)
            assert all("p3" not in reducers for reducers in plans)
            assert wrong.num_failed == 0
            world.check()
            world.check_samples()

    virtual(main())


@pytest.mark.parametrize("number", [0, 2])
def test_who_cannot_be_dialed_any_more_is_a_client_and_comes_back(number):
    """Also where it coordinates: then another one takes over."""

    async def main():
        async with World(num_elements=LARGE) as world:
            await world.start_all(5)
            world.cut = lambda caller, host: host == f"p{number}" and caller != number
            run = world.runs[number]

            async def train():
                for key in range(100_000):
                    for one, other in world.runs.items():
                        other.add(gradient(7 * key + one, LARGE), 5)
                    await asyncio.sleep(2.0)

            training = asyncio.ensure_future(train())
            await world.wait(lambda: run.is_member and not listed(world, number).is_reachable, 60)
            assert world.runs[1].members[0].host != f"p{number}"
            committed, failed = run.ledger.num_committed, run.num_failed
            await asyncio.sleep(30)
            assert run.ledger.num_committed > committed + 25
            assert run.num_failed == failed
            world.cut = None
            await world.wait(lambda: listed(world, number).is_reachable, 120)
            assert run.context.me.is_reachable
            training.cancel()
            world.check()

    virtual(main())
