"""Cuts: the majority goes on, a minority forks after a while, and forks that meet become one."""

import asyncio

import pytest

from shoal.swarm.forks import ForkKeeper
from shoal.swarm.round import SwarmRound
from swarm.swarms import World, gradient, virtual
from swarm.test_faults import suffer


def cut(world, *islands):
    """Loses every call between islands from now on."""
    place = {number: index for index, island in enumerate(islands) for number in island}
    ports = {f"p{number}": index for number, index in place.items()}
    world.cut = lambda caller, host: place.get(caller) != ports.get(host)


def heal(world):
    world.cut = None


async def train(world, seconds, every_s=0.5):
    """Has every living peer add gradients for a while."""
    loop = asyncio.get_running_loop()
    until_s, key = loop.time() + seconds, 0
    while loop.time() < until_s:
        for number, run in world.alive().items():
            run.add(gradient(7 * key + number), 5)
        key += 1
        await asyncio.sleep(every_s)


def finder(world):
    async def find():
        return [run.context.me.peer for run in world.runs.values() if run.is_member]

    return find


async def start_findable(world, num):
    for number in range(num):
        await world.start(number, may_found=number == 0, find=finder(world))
    await world.wait(lambda: all(len(run.members) == num for run in world.runs.values()))


def test_a_minority_commits_nothing_and_the_majority_goes_on():
    async def main():
        async with World(minority_after_s=1000) as world:
            await world.start_all(5)
            cut(world, [0, 1, 2], [3, 4])
            steps = world.runs[3].state.num_steps
            await train(world, 20)
            assert world.runs[0].state.num_steps > steps + 5
            assert world.runs[3].state.num_steps == world.runs[4].state.num_steps == steps
            assert len(world.runs[0].members) == 3
            heal(world)
            await world.wait(lambda: len({run.state.name for run in world.runs.values()}) == 1, 200)
            await world.wait(lambda: all(len(run.members) == 5 for run in world.runs.values()), 200)
            world.check()

    virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("islands", [([0, 1, 2], [3, 4]), ([0, 1], [2, 3]), ([0, 1], [2, 3], [4, 5])])
def test_islands_fork_and_become_one_when_they_meet(islands):
    async def main():
        async with World() as world:
            await start_findable(world, sum(map(len, islands)))
            await train(world, 3)
            cut(world, *islands)
            await train(world, 60, 1.0)
            forks = {run.state.fork for run in world.runs.values()}
            assert len(forks) == len(islands), "each island goes on, under its own name or the old one"
            for island in islands:
                assert len({world.runs[number].state.fork for number in island}) == 1
            heal(world)
            await train(world, 30, 1.0)
            await world.wait(lambda: len({run.state.fork for run in world.runs.values()}) == 1, 300)
            await world.wait(lambda: all(len(r.members) == len(world.runs) for r in world.runs.values()), 300)
            await train(world, 5)
            await asyncio.sleep(3)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            assert sum(run.ledger.num_lost for run in world.runs.values()) > 0
            world.check()
            world.check_samples()

    virtual(main())


def test_one_that_is_left_alone_goes_on():
    async def main():
        async with World() as world:
            await world.start_all(5)
            await train(world, 2)
            for number in range(4):
                world.kill(number)
            steps = world.runs[4].state.num_steps
            await train(world, 100)
            assert world.runs[4].state.num_steps > steps + 10
            assert len(world.runs[4].members) == 1
            world.check()

    virtual(main())


def test_a_pair_that_was_cut_becomes_one_again():
    """Of two, the first of the order goes on alone; the other forks, and ends when they meet."""

    async def main():
        async with World(minority_after_s=5.0, target_samples=5) as world:
            await start_findable(world, 2)
            cut(world, [0], [1])
            await train(world, 30, 2.0)
            assert world.runs[0].state.fork != world.runs[1].state.fork
            heal(world)
            await world.wait(lambda: all(len(run.members) == 2 for run in world.runs.values()), 300)
            await train(world, 3)
            await asyncio.sleep(3)
            assert world.runs[0].state.fingerprint() == world.runs[1].state.fingerprint()
            assert sum(run.ledger.num_lost for run in world.runs.values()) > 0
            world.check()
            world.check_samples()

    virtual(main())


def test_a_proposal_that_is_refused_at_once_is_not_made_again_and_again():
    """Members that are about to go on in another fork have none either, and agree to no second one."""

    async def main():
        async with World() as world:
            await world.start_all(3)
            run, num_asked = world.runs[0], 0

            async def refuse(peer, method, request, wait_s):
                nonlocal num_asked
                num_asked += 1
                return request.stage == "ask"

            forks = ForkKeeper("test", run.context, run.state, refuse)
            first = sorted(run.members, key=lambda member: member != run.context.me)
            round_ = SwarmRound(run.context, tuple(first), (run.state.fork, 0, b""), 1, (0, 64))
            loop = asyncio.get_running_loop()
            until_s = loop.time() + 20
            while loop.time() < until_s:
                assert not await forks.propose(round_)
            assert num_asked <= 40

    virtual(main())


def test_those_who_wait_to_be_listed_when_a_fork_begins_take_its_state_first():
    """They are near the old fork's state: listed by the new one without knowing, they would be no quorum."""

    async def main():
        async with World() as world:
            await world.start_all(3)
            for number in (1, 2):
                world.kill(number)
            for number in (5, 6, 7):
                await world.start(number, may_found=False, find=finder(world))
            first, alive = world.runs[0], world.alive()
            old_fork = first.state.fork

            def is_one():
                if first.state.fork != old_fork:
                    listed = [run for run in alive.values() if run.context.me in first.members]
                    assert all(run.state.fork == first.state.fork for run in listed)
                return all(len(run.members) == 4 for run in alive.values())

            await world.wait(is_one, 60)
            world.check()

    virtual(main())


def test_joiners_of_an_older_fork_do_not_keep_a_new_one_from_its_quorum():
    virtual(suffer(103))
