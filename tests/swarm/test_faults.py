"""Faults: at every message of a round in turn, then many at random: one state, no hang, no sample twice."""

import asyncio
import random

import pytest

from swarm.swarms import World, gradient, virtual

KINDS = ["lost", "answer lost", "late", "twice", "before", "after"]
NUM_PEERS = 5
NUM_ELEMENTS = 13_000  # three reducers


async def start(world):
    await world.start_all(NUM_PEERS)
    world.num_calls = 0


async def one_round(world):
    """Has all contribute, and waits until all that live have gone on together, and then once more."""
    for key in range(2):
        steps = {number: run.state.num_steps for number, run in world.runs.items()}
        for number, run in world.alive().items():
            run.add(gradient(10 * key + number, NUM_ELEMENTS), 5)
        await world.wait(
            lambda steps=steps: all(
                run.state.num_steps > steps[number] for number, run in world.alive().items()
            ),
            timeout_s=60,
        )
    await world.wait(lambda: len({run.state.name for run in world.alive().values()}) == 1, timeout_s=60)


async def survive(kind, message):
    async with World(num_elements=NUM_ELEMENTS) as world:
        await start(world)
        world.fault = lambda number, sender, method: kind if number == message else None
        await one_round(world)
        if kind == "late":
            await asyncio.sleep(50)  # it arrives
        world.check()
        world.check_samples()
        assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
        return asyncio.get_running_loop().time()


def num_messages():
    async def main():
        async with World(num_elements=NUM_ELEMENTS) as world:
            await start(world)
            for number, run in world.runs.items():
                run.add(gradient(number, NUM_ELEMENTS), 5)
            await world.wait(lambda: all(run.state.num_steps == 1 for run in world.runs.values()))
            world.check()
            return world.num_calls

    return virtual(main())


@pytest.fixture
def group_size(request, monkeypatch):
    """More contributors than this average on two levels; usually that begins far above five peers."""
    monkeypatch.setattr("shoal.swarm.plan.GROUP", request.param)


@pytest.mark.parametrize("group_size", [32, 2], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_survives_a_fault_at_some_message(kind, group_size):
    virtual(survive(kind, 8 * KINDS.index(kind)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group_size", [32, 2], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_survives_a_fault_at_every_message(kind, group_size):
    for message in range(num_messages()):
        virtual(survive(kind, message))


async def suffer(seed, seconds=60.0):
    """Training under random faults of ten kinds; at the end they stop, and all must agree again."""
    choice = random.Random(seed)
    rate = choice.choice([0.01, 0.03, 0.1])
    kinds = choice.sample(["lost", "answer lost", "late", "twice"], choice.randint(1, 4))
    async with World(seed=seed, target_samples=15, minority_after_s=30.0) as world:

        async def find():
            return [run.context.me.peer for run in world.alive().values() if run.is_member]

        for number in range(NUM_PEERS):
            await world.start(number, may_found=number == 0, find=find)
        await world.wait(lambda: all(len(run.members) == NUM_PEERS for run in world.runs.values()))
        num_faults = 0

        def fault(message, sender, method):
            nonlocal num_faults
            if choice.random() < rate:
                num_faults += 1
                return choice.choice(kinds)
            return None

        world.fault = fault
        loop = asyncio.get_running_loop()
        until_s, number = loop.time() + seconds, NUM_PEERS
        while loop.time() < until_s:
            event = choice.random()
            members = [key for key, run in world.alive().items() if run.is_member]
            if event < 0.05 and len(members) > 3:
                world.kill(choice.choice(members))
            elif event < 0.1 and len(world.alive()) < 8:
                await world.start(number, may_found=False, find=find)
                number += 1
            elif event < 0.13:
                island = choice.sample(sorted(world.alive()), len(world.alive()) // 2)
                world.cut = lambda caller, host, island=island: (
                    (caller in island) != (int(host[1:]) in island)
                )
            elif event < 0.2:
                world.cut = None
            elif event < 0.23:
                frozen = choice.choice(sorted(world.alive()))
                world.cut = lambda caller, host, frozen=frozen: frozen in (caller, int(host[1:]))
            for key, run in world.alive().items():
                if choice.random() < 0.7:
                    run.add(gradient(key), choice.randint(1, 9))
            await asyncio.sleep(choice.uniform(0.1, 2.0))
            world.check()
        world.fault = world.cut = None
        num_whole = 0
        for _ in range(300):
            for key, run in world.alive().items():
                run.add(gradient(key), 5)
            await asyncio.sleep(1)
            runs = list(world.alive().values())
            is_one = len({run.state.fork for run in runs}) == 1
            num_whole = num_whole + 1 if is_one and all(len(r.members) == len(runs) for r in runs) else 0
            if num_whole == 8:  # nobody is about to be dropped for what was before
                break
        else:
            raise AssertionError("they have not become one again")
        await world.wait(lambda: len({run.state.name for run in world.alive().values()}) == 1)
        world.check()
        world.check_samples()
        assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
        return num_faults


@pytest.mark.parametrize("seed", range(2))
def test_random_faults(seed):
    virtual(suffer(seed, seconds=20.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_faults_over_many_seeds(first):
    for seed in range(first, first + 20):
        virtual(suffer(seed))
